"""Where the library's log lines go."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Callable, Optional

from . import _native
from .arguments import integer, type_name

__all__ = ["LogSink", "set_log_sink"]

#: Receives a level of Python's module ``logging`` (5 for trace, which that lacks) and a line without time and line end.
LogSink = Callable[[int, str], object]

_lock = threading.Lock()
_thread: Optional[threading.Thread] = None


def set_log_sink(sink: Optional[LogSink], least: Optional[int] = None) -> None:
    """Sends all further log lines of this process to ``sink``::

        deep_ep.set_log_sink(logging.getLogger("deep_ep").log)

    The library never waits for ``sink``: a thread of its own calls it with one line after the other, soon after they were
    written. When ``set_log_sink`` is called again, or the program ends, the previous sink gets what was written before,
    and is not called any more when the call returns. An exception of the sink is reported as that of a thread, and the
    next line comes all the same. A forked child writes its lines to standard error until it calls this itself.

    Args:
        sink: ``None``: lines go back to where ``DEEP_EP_LOG_FILE`` says, by default to standard error.
        least: the lowest level that is logged, a number like ``logging.INFO``; ``None``: what ``DEEP_EP_LOG`` says.
    """
    global _thread
    if sink is not None and not callable(sink):
        raise TypeError(f"sink is of type {type_name(sink)}, expected a function (int, str), or None")
    number = 0 if least is None else integer("least", least, 1)
    if _thread is threading.current_thread():
        raise RuntimeError("set_log_sink: the sink itself called it, which must return first")
    with _lock:
        if _thread is not None:
            _native.end_log_lines()
            _thread.join()
            _thread = None
        if sink is None:
            return
        _native.begin_log_lines(min(number, 1 << 16))
        _thread = threading.Thread(target=_deliver, args=(sink,), name="deep_ep log", daemon=True)
        _thread.start()


def _deliver(sink: LogSink) -> None:
    while True:
        lines = _native.next_log_lines()
        if not lines:
            return
        for level, line in lines:
            try:
                sink(level, line)
            except Exception as error:
                thread = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))


def _forget() -> None:
    """In a forked child, where the thread is not."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
# Before the interpreter stops threads where they are.
atexit.register(set_log_sink, None)
