"""A process that is killed in mid call, on GPUs: the survivor hears of it whatever its GPU and its streams are busy with.

``python tests/python/test_killed_on_gpus.py``, with names of cases (default: all) and ``--times N`` each. Two processes,
one GPU each; without GPUs, the CPU executor runs the cases that it has.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

TIMEOUT_S = 20.0  # an error that comes after the time-out says nothing about the control plane
CASES = {}


def case(needs_gpu=False, **variables):
    def add(function):
        CASES[function.__name__] = (function, needs_gpu, variables)
        return function

    return add


class Masked(Exception):
    """When the mask was seen, and a text."""


class Rank:
    """This rank, its buffer, and inputs of its calls."""

    def __init__(self, rank, store, masking):
        import torch
        import torch.distributed as dist

        import deep_ep

        self.torch, self.rank, self.gpu = torch, rank, torch.cuda.is_available()
        if self.gpu:
            torch.cuda.set_device(rank)
            torch.set_default_device("cuda")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        self.group = dist.new_group([0, 1])
        self.tokens, hidden, topk, self.experts = (128, 7168, 8, 256) if self.gpu else (8, 256, 4, 16)
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(self.tokens, hidden, 2, self.experts)
        self.buffer = deep_ep.Buffer(
            self.group, int(5e8) if self.gpu else 1 << 22, size, low_latency_mode=True,
            num_qps_per_rank=self.experts // 2, explicitly_destroy=True, enable_shrink=masking,
        )  # fmt: skip
        torch.manual_seed(rank)
        self.x = torch.randn((self.tokens, hidden)).to(torch.bfloat16)
        self.idx = torch.rand((self.tokens, self.experts)).topk(topk, dim=-1)[1].to(deep_ep.topk_idx_t)
        self.weights = torch.rand((self.tokens, topk), dtype=torch.float32)
        self.barrier = lambda: dist.barrier(self.group)

    def sync(self):
        if self.gpu:
            self.torch.cuda.synchronize()

    def pair(self):
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(self.x, self.idx, self.tokens, self.experts, use_fp8=False)
        return self.buffer.low_latency_combine(rows, self.idx, self.weights, handle)[0]

    def pairs(self):
        """Some calls; waits for the GPU."""
        for _ in range(20 if self.gpu else 2):
            combined = self.pair()
        self.sync()
        return combined


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
    graph = rank.torch.cuda.CUDAGraph()
    with rank.torch.cuda.graph(graph):
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
        rank.torch.cuda.set_device(rank.rank)
        while True:
            work()

    threading.Thread(target=run, daemon=True).start()
    return rank.pairs


@case(needs_gpu=True)
def blocked_free(rank):
    torch = rank.torch

    def work():
        memory = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        del memory
        torch.cuda.empty_cache()  # cudaFree: waits for all kernels of the device
        time.sleep(0.001)

    return beside(rank, work)


@case(needs_gpu=True)
def global_capture(rank):
    torch, stream = rank.torch, rank.torch.cuda.Stream()

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
    status = rank.torch.zeros(2, dtype=rank.torch.int32)

    def calls():
        combined = rank.pairs()
        rank.buffer.low_latency_query_mask_buffer(status)
        if status.tolist() == [0, 0]:
            return
        assert status.tolist() == [int(rank.rank == 1), int(rank.rank == 0)], status
        noticed = time.monotonic()
        combined = rank.pair()
        rank.sync()
        took = time.monotonic() - noticed
        mine = (rank.idx // (rank.experts // 2)) == rank.rank
        expected = rank.x.float() * (rank.weights * mine).sum(1, keepdim=True)
        rank.torch.testing.assert_close(combined.float(), expected, rtol=0.05, atol=0.1)
        raise Masked(noticed, f"the next call took {1e3 * took:.1f} ms")

    return calls


def run_rank(name, rank, store):
    function, _, _ = CASES[name]
    me = Rank(rank, store, masking=name == "masked")
    calls = function(me)
    calls()
    me.barrier()
    print(json.dumps({"ready": rank}), flush=True)
    if rank == 1:
        delay = random.Random(time.time_ns()).uniform(0.2, 0.5)

        def die():
            time.sleep(delay)
            print(json.dumps({"killed": time.monotonic()}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()
    told = {}
    try:
        while True:
            calls()
    except Masked as seen:
        told = {"at": seen.args[0], "type": "Masked", "text": seen.args[1]}
    except Exception as error:
        told = {"at": time.monotonic(), "type": type(error).__name__, "text": str(error)}
    try:
        me.buffer.destroy()
    except Exception as error:
        told["destroy"] = repr(error)
    print(json.dumps(told), flush=True)
    os._exit(0)


def kill_one(name, bound_s=120):
    """Milliseconds from the kill to what the survivor saw, and its words."""
    _, _, variables = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "DEEP_EP_TIMEOUT_S": str(TIMEOUT_S), "OMP_NUM_THREADS": "1", **variables}
        arguments = [sys.executable, __file__, "--rank", name, os.path.join(folder, "store")]
        ranks = [
            subprocess.Popen([*arguments, str(rank)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for rank in range(2)
        ]
        said, errors = [], []
        for process in ranks:
            try:
                out, err = process.communicate(timeout=bound_s)
            except subprocess.TimeoutExpired:
                for one in ranks:
                    one.kill()
                raise AssertionError(f"{name}: a rank has not ended after {bound_s} s") from None
            said.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
            errors.append(err[-3000:])
    killed = [line["killed"] for line in said[1] if "killed" in line]
    told = said[0][-1] if said[0] else {}
    assert killed and "at" in told, f"{name}: {said} {errors}"
    return 1e3 * (told["at"] - killed[0]), told


def check(name):
    milliseconds, told = kill_one(name)
    assert milliseconds < 1e3 * TIMEOUT_S / 4, (name, milliseconds, told)
    assert "destroy" not in told, (name, told)
    if name == "masked":
        assert told["type"] == "Masked", told
    else:
        assert "the process of rank 1 has ended" in told["text"], told
        assert CASES[name][1] or told["type"] == "PeerTimeout", told
    return milliseconds, told


@pytest.mark.parametrize("name", CASES)
def test_killed(name):
    import torch

    if CASES[name][1] and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    check(name)


def main():
    parser = argparse.ArgumentParser(description="Kill a process in mid call, and tell when the survivor heard of it")
    parser.add_argument("names", nargs="*", default=list(CASES), help="cases (default: all)")
    parser.add_argument("--times", type=int, default=3, help="kills of each (default: %(default)s)")
    arguments = parser.parse_args()
    failed = False
    for name in arguments.names:
        times, last = [], {}
        for _ in range(arguments.times):
            try:
                milliseconds, last = check(name)
                times.append(milliseconds)
            except AssertionError as error:
                failed = True
                print(f"{name}: FAILED: {error}", flush=True)
        shown = " ".join(f"{one:.1f}" for one in sorted(times))
        print(f"{name}: ms from the kill: {shown}; {last.get('type')}: {last.get('text', '')[:160]}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2], int(sys.argv[4]), sys.argv[3])
    else:
        main()
