"""Events: points in the work of a stream."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch

from .._native import EventHandle as EventHandle
from ..errors import WrongUse


class EventOverlap:
    """A point in the communication stream's work, as calls return it.

    As a context manager it waits at the end of the block, so that what runs inside overlaps with communication::

        with buffer.dispatch(..., async_finish=True)[-1]:
            independent_computation()

    Attributes:
        event: an ``EventHandle``, or ``None`` when there is nothing to wait for (the call was synchronous).
        extra_tensors: tensors that must live as long as the event.
        hook_after_wait: called once, after the first wait; see ``register_hook_after_wait``.
    """

    hook_after_wait: Optional[Callable[[], Any]] = None
    _release_at_exit: bool = False

    def __init__(
        self, event: Optional[EventHandle] = None, extra_tensors: Optional[Sequence[torch.Tensor]] = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """``hook`` is called after the next wait. There is room for one."""
        if self.hook_after_wait is not None:
            raise WrongUse("a hook is registered already: there is room for one")
        self.hook_after_wait = hook

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """The stream that is current now waits for the event; the host does not. ``release_handle``: the event is
        dropped then, and the tensors that it keeps. Returns what the hook returns, ``None`` where there is none; a hook that
        fails stays for the next wait."""
        if self.event is None:
            raise WrongUse("there is no event: the call was made without async_finish")
        self.event.current_stream_wait()
        result = None if self.hook_after_wait is None else self.hook_after_wait()
        self.hook_after_wait = None
        if release_handle:
            self.event = None
            self.extra_tensors = None
        return result

    def wait(self) -> Any:
        """``current_stream_wait`` by its short name: for calls with ``defer_epilogue`` it returns their results."""
        return self.current_stream_wait()

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """For ``with event(release_handle=True):``, which drops the event at the end of the block."""
        self._release_at_exit = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release_at_exit)
