"""An error that one rank alone has seen: all ranks destroy their buffers, make new ones and go on, as often as need be."""

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from unittest import mock

import low_latency_calls
import pytest
import torch.distributed as dist
from cluster import on_ranks
from low_latency_calls import ll_case
from normal_mode import send
from reference import make_case
from time_scale import scaled

from deep_ep import Buffer
from deep_ep.errors import Error, PeerTimeout, RankMismatch

ROUNDS = 2  # each rank is the late one once


def deadline(seconds):
    """Of buffers that are made meanwhile, and of their ends."""
    return mock.patch.dict(os.environ, DEEP_EP_TIMEOUT_S=str(seconds))


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


def make(group):
    return Buffer(group, 1 << 22, explicitly_destroy=True)


# A buffer and a call on it.
KINDS = {
    "low_latency": (
        lambda group: low_latency_calls.make_buffer(group, explicitly_destroy=True),
        lambda buffer: low_latency_calls.dispatch(buffer, ll_case([3, 4])),
    ),
    "normal": (make, lambda buffer: send(buffer, make_case([6, 5]))),
}


@pytest.mark.parametrize("kind, interrupt", [("normal", False), ("normal", True), ("low_latency", True)])
@on_ranks(2)
def test_one_rank_alone(group, kind, interrupt):
    make, call = KINDS[kind]
    apart = dist.new_group(list(range(group.size())))  # to tell each other when an error was seen
    for number in range(ROUNDS):
        late = number % 2
        with deadline(scaled(60) if interrupt else scaled(1.5)):
            buffer = make(group)
        if group.rank() == late:
            dist.barrier(apart)
            if kind == "low_latency":
                call(buffer)  # finds all that it waits for
        else:
            with interrupted() if interrupt else pytest.raises(PeerTimeout, match=f"rank {late}"):
                call(buffer)
            dist.barrier(apart)
        buffer.destroy()
    buffer = make(group)
    call(buffer)
    buffer.destroy()


@on_ranks(2)
def test_interrupted_in_destroy(group):
    apart = dist.new_group(list(range(group.size())))
    for number in range(ROUNDS):
        buffer = make(group)
        if group.rank() == number % 2:
            with interrupted():
                buffer.destroy()
            dist.barrier(apart)
        else:
            dist.barrier(apart)
            buffer.destroy()  # ends as soon as the other rank makes its next buffer
    make(group).destroy()


@on_ranks(2)
def test_interrupted_in_the_constructor(group):
    apart = dist.new_group(list(range(group.size())))
    for number in range(ROUNDS):
        if group.rank() == number % 2:
            with interrupted():
                Buffer(group, 1 << 22)
            dist.barrier(apart)
            make(group).destroy()
        else:
            dist.barrier(apart)
            with pytest.raises(Error, match=f"rank {number % 2} has left buffer"):
                Buffer(group, 1 << 22)
            make(group).destroy()


@on_ranks(2)
def test_destroy_is_bounded(group):
    apart = dist.new_group(list(range(group.size())))
    buffer = make(group)
    if group.rank() == 0:
        limit = scaled(1)  # asked once: it follows the machine's load
        begin = time.monotonic()
        with deadline(limit), pytest.raises(PeerTimeout, match="for the other ranks of its group to destroy"):
            buffer.destroy()
        assert time.monotonic() - begin > 0.9 * limit
        dist.barrier(apart)
    else:
        dist.barrier(apart)
        buffer.destroy()
    make(group).destroy()


@on_ranks(2)
def test_different_things_are_named(group):
    buffer = make(group)
    texts = ("rank 0 is destroying buffer", "rank 1 is making a new buffer")
    with pytest.raises(RankMismatch) as raised:
        if group.rank() == 0:
            buffer.destroy()
        else:
            Buffer(group, 1 << 22)
    assert all(text in str(raised.value) for text in texts), raised.value
    if group.rank() == 1:
        buffer.destroy()
    make(group).destroy()


@on_ranks(2)
def test_a_group_is_not_kept(group):
    """What is kept about a group goes with it."""
    own = dist.new_group(list(range(group.size())))
    Buffer(own, 1 << 22, explicitly_destroy=True).destroy()
    gone = weakref.ref(own)
    dist.destroy_process_group(own)
    del own
    gc.collect()
    assert gone() is None
