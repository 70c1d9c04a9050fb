"""The stream that a call of the second interface works on."""

from __future__ import annotations

from typing import Any, Iterable, List, Optional

import torch

from .. import _native
from .._native import EventHandle
from ..utils.event import EventOverlap


def used_here(*tensors: Optional[torch.Tensor]) -> None:
    """Their memory is not given to other work before the current stream has used them. That stream may be another one than
    that of the call which made them."""
    for each in tensors:
        if each is not None and each.is_cuda:
            each.record_stream(torch.cuda.current_stream(each.device))


class CallEvent(EventOverlap):
    """Also tells the library which stream uses what it handed out: its memory (of handles, and of all results where
    ``results`` is ``"heap"``) does not know ``record_stream``."""

    _parts: Iterable[EventHandle] = ()

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        for part in self._parts:  # first: the hook comes behind all of them
            part.current_stream_wait()
        result = super().current_stream_wait(release_handle)
        if release_handle:
            self._parts = ()
        return result


class CallStream:
    """Makes the stream of a call current for its block.

    That is the communication stream if the call is asynchronous or comes after events; it waits for ``previous`` if
    given, else for the caller's stream. Otherwise it is the caller's stream itself, which gives the same order.
    """

    def __init__(
        self,
        communication: Optional[torch.cuda.Stream],
        previous: Optional[EventHandle],
        before_epilogue: Optional[EventHandle],
        asynchronous: bool,
    ) -> None:
        self._communication = communication
        self._previous = previous
        self._before_epilogue = before_epilogue
        self._asynchronous = asynchronous
        #: Calls of the library leave an event, for ``finish``.
        self.switched = communication is not None and bool(asynchronous or previous or before_epilogue)
        self._caller: Any = None
        self._context: Any = None
        self._parts: List[EventHandle] = []

    def __enter__(self) -> "CallStream":
        if self.switched:
            assert self._communication is not None
            self._caller = torch.cuda.current_stream(self._communication.device)
            if self._previous is None:
                self._communication.wait_stream(self._caller)
            self._context = torch.cuda.stream(self._communication)
            self._context.__enter__()
            # Rows arrive in what the call returns, so whatever outputs must wait for is waited for at the start.
            try:
                for event in (self._previous, self._before_epilogue):
                    if event is not None:
                        event.current_stream_wait()
            except BaseException:  # __exit__ does not come then
                self._context.__exit__(None, None, None)
                raise
        return self

    def part(self, event: Optional[EventHandle]) -> None:
        """A call of the library returned this."""
        if event is not None:
            self._parts.append(event)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self._context is not None:
            try:
                self._end = EventHandle()
            finally:
                self._context.__exit__(exc_type, exc_value, traceback)
            if exc_type is not None:
                self._end.current_stream_wait()

    def finish(self, inputs: Iterable[Optional[torch.Tensor]], outputs: Iterable[Optional[torch.Tensor]]) -> EventOverlap:
        """After the block. The caller's stream waits, or the result stands for the call."""
        if not self.switched:
            # On the CPU there is nothing to wait for; but who asks for an event gets one.
            return EventOverlap(EventHandle()) if self._asynchronous else EventOverlap()
        given = [tensor for tensor in inputs if tensor is not None and tensor.is_cuda]
        made = [tensor for tensor in outputs if tensor is not None and tensor.is_cuda]
        held = None
        if self._asynchronous and _native.environment_text("EP_AVOID_RECORD_STREAM") == "1":
            held = given + made
        else:
            for tensor in made:
                tensor.record_stream(self._caller)
        if not self._asynchronous:
            for event in (*self._parts, self._end):
                event.current_stream_wait()
            return EventOverlap()
        if held is None:
            for tensor in given:
                tensor.record_stream(self._communication)
        result = CallEvent(self._end, held)
        result._parts = tuple(self._parts)
        return result
