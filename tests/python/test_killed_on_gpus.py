"""A process that is killed in mid call, on GPUs: the survivor hears of it whatever its GPU and its streams are busy with.

Two processes, one GPU each; without GPUs, the CPU executor runs the cases that it has.
"""

import os
import random
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster

import deep_ep

TIMEOUT_S = 20.0  # an error that comes after the time-out says nothing about the control plane
CASES = {}


def case(needs_gpu=False, **variables):
    def add(function):
        CASES[function.__name__] = (function, needs_gpu, variables)
        return function

    return add


class Rank:
    """This rank, its buffer, and inputs of its calls."""

    def __init__(self, group, masking):
        self.rank, self.gpu = group.rank(), torch.cuda.is_available()
        if self.gpu:
            torch.cuda.set_device(self.rank)
            torch.set_default_device("cuda")
        self.tokens, hidden, topk, self.experts = (128, 7168, 8, 256) if self.gpu else (8, 256, 4, 16)
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(self.tokens, hidden, 2, self.experts)
        self.buffer = deep_ep.Buffer(
            group, int(5e8) if self.gpu else 1 << 22, size, low_latency_mode=True,
            num_qps_per_rank=self.experts // 2, explicitly_destroy=True, enable_shrink=masking,
        )  # fmt: skip
        torch.manual_seed(self.rank)
        self.x = torch.randn((self.tokens, hidden)).to(torch.bfloat16)
        self.idx = torch.rand((self.tokens, self.experts)).topk(topk, dim=-1)[1].to(deep_ep.topk_idx_t)
        self.weights = torch.rand((self.tokens, topk), dtype=torch.float32)

    def sync(self):
        if self.gpu:
            torch.cuda.synchronize()

    def pair(self):
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(self.x, self.idx, self.tokens, self.experts, use_fp8=False)
        return self.buffer.low_latency_combine(rows, self.idx, self.weights, handle)[0]

    def pairs(self):
        """Some calls; waits for the GPU."""
        for _ in range(20 if self.gpu else 2):
            self.pair()
        self.sync()


@case()
def low_latency(rank):
    return rank.pairs


@case()
def normal_mode(rank):
    buffer, experts = rank.buffer, rank.experts
    x = rank.x.repeat(32 if rank.gpu else 4, 1)
    idx = rank.idx.repeat(32 if rank.gpu else 4, 1)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)

    def calls():
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
        )
        buffer.combine(rows, handle)
        rank.sync()

    return calls


@case(needs_gpu=True, CUDA_DEVICE_MAX_CONNECTIONS="1")
def one_hardware_queue(rank):
    return rank.pairs


@case(needs_gpu=True)
def graph_replay(rank):
    rank.pairs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            rank.pair()

    def calls():
        graph.replay()
        rank.sync()
        rank.pair()  # says what the replay has met

    return calls


def beside(rank, work):
    """`work` again and again in a thread beside the calls."""

    def run():
        torch.cuda.set_device(rank.rank)
        while True:
            work()

    threading.Thread(target=run, daemon=True).start()
    return rank.pairs


@case(needs_gpu=True)
def blocked_free(rank):
    def work():
        memory = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        del memory
        torch.cuda.empty_cache()  # cudaFree: waits for all kernels of the device
        time.sleep(0.001)

    return beside(rank, work)


@case(needs_gpu=True)
def global_capture(rank):
    stream = torch.cuda.Stream()

    def calls():
        for _ in range(20):
            rank.pair()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="global")
            memory = torch.zeros(8)
            time.sleep(0.05)  # no thread may make a call now that waits for the GPU, or frees memory
            graph.capture_end()
        del memory
        rank.sync()

    return calls


@case()
def masked(rank):
    """With masks nothing is raised: calls go on, and the next one is right."""
    status = torch.zeros(2, dtype=torch.int32)

    def calls():
        rank.pairs()
        rank.buffer.low_latency_query_mask_buffer(status)
        if status.tolist() == [0, 0]:
            return None
        assert status.tolist() == [int(rank.rank == 1), int(rank.rank == 0)], status
        noticed = time.monotonic()
        combined = rank.pair()
        rank.sync()
        took = time.monotonic() - noticed
        mine = (rank.idx // (rank.experts // 2)) == rank.rank
        expected = rank.x.float() * (rank.weights * mine).sum(1, keepdim=True)
        torch.testing.assert_close(combined.float(), expected, rtol=0.05, atol=0.1)
        return noticed, "masked", f"the next call took {1e3 * took:.1f} ms"

    return calls


def until_it_ends(group, name, ready):
    """Calls until one tells of the other rank's end: when, by what, and a text. Then destroy says nothing."""
    rank = Rank(group, masking=name == "masked")
    calls = CASES[name][0](rank)
    calls()
    dist.barrier(group)
    if rank.rank == 0:
        open(ready, "w").close()
    told = None
    try:
        while not told:
            told = calls()
    except Exception as error:
        told = time.monotonic(), type(error).__name__, str(error)
    rank.buffer.destroy()
    return told


def check(name, folder):
    """Time from the kill to what the survivor saw, and its words."""
    _, needs_gpu, variables = CASES[name]
    ready = os.path.join(folder, f"ready {name} {time.monotonic_ns()}")
    with mock.patch.dict(os.environ, DEEP_EP_TIMEOUT_S=str(TIMEOUT_S), **variables):
        cluster = Cluster(2)
    try:
        cluster.begin(range(2), until_it_ends, name, ready)
        while not os.path.exists(ready) and cluster.usable:
            if any(connection.poll() for connection in cluster.connections):
                cluster.end(range(2))  # raises what a rank says
            time.sleep(0.01)
        time.sleep(random.uniform(0.2, 0.5))
        killed = time.monotonic()
        cluster.processes[1].kill()
        ((at, kind, text),) = cluster.end([0])
    finally:
        cluster.close(kill=True)
    milliseconds = 1e3 * (at - killed)
    assert milliseconds < 1e3 * TIMEOUT_S / 4, (name, milliseconds, text)
    assert (kind == "masked") == (name == "masked") and (needs_gpu or kind in ("masked", "PeerTimeout")), (kind, text)
    assert kind == "masked" or "the process of rank 1 has ended" in text, (kind, text)
    return f"{milliseconds:.1f} ms from the kill; {kind}: {text[:160]}"


@pytest.mark.parametrize("name", CASES)
def test_killed(name, tmp_path):
    if CASES[name][1] and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    print(check(name, str(tmp_path)))
