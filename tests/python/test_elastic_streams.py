"""The order of streams and events in calls of the second interface, with stand-ins that write down what happens: this
needs no GPU, and does not replace one."""

import pytest

from deep_ep.buffers import streams


class World:
    """Streams are names; events say what they wait for."""

    def __init__(self, monkeypatch):
        self.log, self.current = [], "caller"
        world = self

        class Stream:
            device = "gpu"

            def __init__(self, name):
                self.name = name

            def wait_stream(self, other):
                world.log.append(f"{self.name} waits for {other.name}")

        class Event:
            def __init__(self, of=None):
                self.of = of or f"end of {world.current}"
                if of is None:
                    world.log.append(f"event on {world.current}")

            def current_stream_wait(self):
                world.log.append(f"{world.current} waits for {self.of}")

        class Enter:  # no generator: that would leave by itself where it is forgotten
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                self.before, world.current = world.current, self.stream.name

            def __exit__(self, *_):
                world.current = self.before

        self.Event, self.communication = Event, Stream("comm")
        monkeypatch.setattr(streams, "EventHandle", Event)
        monkeypatch.setattr(streams.torch.cuda, "current_stream", lambda device: Stream(world.current))
        monkeypatch.setattr(streams.torch.cuda, "stream", Enter)

    def tensor(self, name):
        world = self

        class Tensor:
            is_cuda = True

            def record_stream(self, stream):
                world.log.append(f"{name} is used on {stream.name}")

        return Tensor()

    def call(self, previous=None, before=None, asynchronous=False, fails=False):
        call = streams.CallStream(self.communication, previous, before, asynchronous)
        with call:
            self.log.append(f"works on {self.current}")
            call.part(self.Event("rows") if call.switched else None)
            if fails:
                raise RuntimeError("a call failed")
        return call.finish((self.tensor("input"), None), (self.tensor("output"), None))


@pytest.fixture
def world(monkeypatch):
    monkeypatch.delenv("EP_AVOID_RECORD_STREAM", raising=False)
    return World(monkeypatch)


def test_synchronous_calls_stay_on_the_callers_stream(world):
    assert world.call().event is None
    assert world.log == ["works on caller"]


def test_synchronous_call_behind_an_event(world):
    assert world.call(previous=world.Event("input"), before=world.Event("output")).event is None
    assert world.log == [
        "comm waits for input", "comm waits for output", "works on comm", "event on comm", "output is used on caller",
        "caller waits for rows", "caller waits for end of comm",
    ]  # fmt: skip


def test_only_outputs_wait(world):
    world.call(before=world.Event("output"))
    assert world.log[:3] == ["comm waits for caller", "comm waits for output", "works on comm"]


def test_asynchronous_call(world):
    event = world.call(asynchronous=True)
    assert world.log == [
        "comm waits for caller", "works on comm", "event on comm", "output is used on caller", "input is used on comm",
    ]  # fmt: skip
    del world.log[:]
    world.current = "another"
    event.current_stream_wait(release_handle=True)
    assert sorted(world.log) == ["another waits for end of comm", "another waits for rows"]
    assert event.event is None and event.extra_tensors is None


def test_asynchronous_call_behind_an_event_does_not_wait_for_the_caller(world):
    world.call(previous=world.Event("input"), asynchronous=True)
    assert world.log[:2] == ["comm waits for input", "works on comm"]


def test_the_event_keeps_tensors_instead(world, monkeypatch):
    monkeypatch.setenv("EP_AVOID_RECORD_STREAM", "1")
    event = world.call(asynchronous=True)
    assert len(event.extra_tensors) == 2 and not [line for line in world.log if "is used on" in line]
    world.call(previous=world.Event("input"))  # no event would keep them
    assert "output is used on caller" in world.log


def test_the_hook_comes_behind_all_waits(world):
    event = world.call(asynchronous=True)
    event.register_hook_after_wait(lambda: world.log.append("hook"))
    del world.log[:]
    event.current_stream_wait()
    assert sorted(world.log[:2]) == ["caller waits for end of comm", "caller waits for rows"] and world.log[2:] == ["hook"]


def test_a_wait_that_fails_gives_the_stream_back(world):
    class Broken(world.Event):
        def current_stream_wait(self):
            raise RuntimeError("no such event")

    for events in ({"previous": Broken("input")}, {"before": Broken("output")}):
        with pytest.raises(RuntimeError, match="no such event"):
            world.call(**events)
        assert world.current == "caller" and "works on comm" not in world.log


def test_an_end_that_fails_gives_the_stream_back(world, monkeypatch):
    def broken():
        raise RuntimeError("no event")

    call = streams.CallStream(world.communication, None, None, True)
    with pytest.raises(RuntimeError, match="no event"), call:
        monkeypatch.setattr(streams, "EventHandle", broken)
    assert world.current == "caller"


def test_a_call_that_fails_gives_the_stream_back(world):
    for asynchronous in (False, True):
        with pytest.raises(RuntimeError, match="failed"):
            world.call(previous=world.Event("input"), asynchronous=asynchronous, fails=True)
        assert world.current == "caller" and world.log[-1] == "caller waits for end of comm"
