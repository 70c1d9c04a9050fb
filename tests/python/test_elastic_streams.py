"""What calls of the second interface come behind, and what their events keep, with stand-ins: this needs no GPU, and does not
replace one."""

import pytest
import torch

from deep_ep import EventOverlap
from deep_ep.buffers.elastic import ElasticBuffer
from deep_ep.errors import InvalidArgument
from deep_ep.utils.event import EventHandle


class Input:
    is_cuda = True

    def __init__(self, log):
        self.log = log

    def record_stream(self, stream):
        self.log.append(stream)


@pytest.fixture
def buffer(monkeypatch):
    monkeypatch.delenv("EP_AVOID_RECORD_STREAM", raising=False)
    buffer = object.__new__(ElasticBuffer)
    buffer._comm_stream = "comm"
    return buffer


def test_inputs_of_asynchronous_calls_are_used_on_the_communication_stream(buffer):
    log, event = [], EventHandle()
    inputs = [Input(log), None, torch.zeros(1)]
    overlap = buffer._event(event, inputs)
    assert isinstance(overlap, EventOverlap) and overlap.event is event and overlap.extra_tensors is None
    assert log == ["comm"]
    assert buffer._event(None, inputs).event is None and log == ["comm"]


def test_the_event_keeps_inputs_instead(buffer, monkeypatch):
    monkeypatch.setenv("EP_AVOID_RECORD_STREAM", "1")
    log = []
    given = Input(log)
    event = buffer._event(EventHandle(), [given, None])
    assert event.extra_tensors == [given] and log == []
    event.current_stream_wait(release_handle=True)
    assert event.event is None and event.extra_tensors is None


def test_events_that_a_call_comes_behind(buffer):
    first, second = EventHandle(), EventHandle()
    assert buffer._order(EventOverlap(first), second, 1, True) == (first, second, True)
    assert buffer._order(None, None, False, True) == (None, None, False)
    with pytest.raises(InvalidArgument, match="previous_event needs allocate_on_comm_stream"):
        buffer._order(first, None, True, False)
