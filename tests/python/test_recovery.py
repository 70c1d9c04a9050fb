"""An error that one rank alone has seen: all ranks destroy their buffers, make new ones and go on, as often as need be."""

import contextlib
import os
import signal
import threading
import time

import elastic_cases
import low_latency_calls
import pytest
import torch
import torch.distributed as dist
from low_latency_calls import ll_case
from reference import make_case
from test_calls import round_trip, send
from time_scale import scaled

from deep_ep import Buffer
from deep_ep.errors import Error, PeerTimeout, RankMismatch

ROUNDS = 2  # each rank is the late one once


@contextlib.contextmanager
def deadline(seconds):
    """Of buffers that are made meanwhile, and of their ends."""
    before = os.environ.get("DEEP_EP_TIMEOUT_S")
    os.environ["DEEP_EP_TIMEOUT_S"] = str(seconds)
    try:
        yield
    finally:
        if before is None:
            del os.environ["DEEP_EP_TIMEOUT_S"]
        else:
            os.environ["DEEP_EP_TIMEOUT_S"] = before


@contextlib.contextmanager
def interrupted():
    """Ctrl-C, a while after the block has begun to wait."""
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, was)


class LowLatency:
    """A rank that is late finds all that it waits for."""

    late_rank_succeeds = True

    @staticmethod
    def make(group):
        return low_latency_calls.make_buffer(group, explicitly_destroy=True)

    @staticmethod
    def call(buffer):
        low_latency_calls.dispatch(buffer, ll_case([3, 4]))


class Normal:
    late_rank_succeeds = False

    @staticmethod
    def make(group):
        return Buffer(group, 1 << 22, explicitly_destroy=True)

    @staticmethod
    def call(buffer):
        send(buffer, make_case([6, 5]))


class Elastic:
    late_rank_succeeds = False

    @staticmethod
    def make(group):
        return elastic_cases.make_buffer(group, explicitly_destroy=True)

    @staticmethod
    def call(buffer):
        elastic_cases.send(buffer, make_case([6, 5], hidden=elastic_cases.H))


KINDS = {"low_latency": LowLatency, "normal": Normal, "elastic": Elastic}


def recover(group, kind, interrupt):
    kind = KINDS[kind]
    apart = dist.new_group(list(range(group.size())))  # to tell each other when an error was seen
    for number in range(ROUNDS):
        late = number % 2
        with deadline(scaled(60) if interrupt else scaled(1.5)):
            buffer = kind.make(group)
        if group.rank() == late:
            dist.barrier(apart)
            if kind.late_rank_succeeds:
                kind.call(buffer)
        else:
            with interrupted() if interrupt else pytest.raises(PeerTimeout, match=f"rank {late}"):
                kind.call(buffer)
            dist.barrier(apart)
        buffer.destroy()
    buffer = kind.make(group)
    kind.call(buffer)
    buffer.destroy()


@pytest.mark.parametrize("interrupt", [False, True], ids=["times out", "is interrupted"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_alone(ranks, kind, interrupt):
    ranks(2).run(recover, kind, interrupt)


def interrupted_in_destroy(group):
    apart = dist.new_group(list(range(group.size())))
    for number in range(ROUNDS):
        buffer = Buffer(group, 1 << 22, explicitly_destroy=True)
        if group.rank() == number % 2:
            with interrupted():
                buffer.destroy()
            dist.barrier(apart)
        else:
            dist.barrier(apart)
            buffer.destroy()  # ends as soon as the other rank makes its next buffer
    Buffer(group, 1 << 22, explicitly_destroy=True).destroy()


def test_interrupted_in_destroy(ranks):
    ranks(2).run(interrupted_in_destroy)
    ranks(2).run(round_trip, [6, 5], {})


def interrupted_in_the_constructor(group):
    apart = dist.new_group(list(range(group.size())))
    for number in range(ROUNDS):
        if group.rank() == number % 2:
            with interrupted():
                Buffer(group, 1 << 22)
            dist.barrier(apart)
            Buffer(group, 1 << 22, explicitly_destroy=True).destroy()
        else:
            dist.barrier(apart)
            with pytest.raises(Error, match=f"rank {number % 2} has left buffer"):
                Buffer(group, 1 << 22)
            Buffer(group, 1 << 22, explicitly_destroy=True).destroy()


def test_interrupted_in_the_constructor(ranks):
    ranks(2).run(interrupted_in_the_constructor)
    ranks(2).run(round_trip, [6, 5], {})


def destroy_without_the_other(group, kind):
    apart = dist.new_group(list(range(group.size())))
    for number in range(2):
        buffer = KINDS[kind].make(group)
        if group.rank() == number:
            limit = scaled(1)  # asked once: it follows the machine's load
            begin = time.monotonic()
            with deadline(limit), pytest.raises(PeerTimeout, match="for the other ranks of its group to destroy"):
                buffer.destroy()
            assert time.monotonic() - begin > 0.9 * limit
            dist.barrier(apart)
        else:
            dist.barrier(apart)
            buffer.destroy()
    KINDS[kind].make(group).destroy()


@pytest.mark.parametrize("kind", ["normal", "elastic"])
def test_destroy_is_bounded(ranks, kind):
    ranks(2).run(destroy_without_the_other, kind)


def different_things(group):
    buffer = Buffer(group, 1 << 22, explicitly_destroy=True)
    texts = ("rank 0 is destroying buffer", "rank 1 is making a new buffer")
    with pytest.raises(RankMismatch) as raised:
        if group.rank() == 0:
            buffer.destroy()
        else:
            Buffer(group, 1 << 22)
    assert all(text in str(raised.value) for text in texts), raised.value
    if group.rank() == 1:
        buffer.destroy()
    Buffer(group, 1 << 22, explicitly_destroy=True).destroy()


def test_different_things_are_named(ranks):
    ranks(2).run(different_things)


def group_ends(group):
    """What is kept about a group goes with it."""
    import gc
    import weakref

    own = dist.new_group(list(range(group.size())))
    Buffer(own, 1 << 22, explicitly_destroy=True).destroy()
    gone = weakref.ref(own)
    dist.destroy_process_group(own)
    del own
    gc.collect()
    assert gone() is None
    assert torch.distributed.is_initialized()


def test_a_group_is_not_kept(ranks):
    ranks(2).run(group_ends)
