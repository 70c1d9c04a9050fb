"""Low-latency dispatch and combine: every combination of options, and ranks that fail. `deep_ep bench low-latency` has the
timings.

On GPUs: ``python tests/python/test_low_latency.py`` (8 processes, NCCL). Without a GPU the same on CPU ranks with small
shapes. MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and RANK (of the node) as for upstream's script of this name.
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import parser_of_script, run_on_cpu_ranks

import deep_ep
from deep_ep.utils.envs import init_dist
from deep_ep.utils.math import calc_diff, hash_tensor, per_token_cast_back

#: Constant rows are the rank less this, so that every rank's are different and exact in bfloat16.
OFFSET = 128


class Failures:
    """The shrink test: three ranks leave, each at the first call of a kind, and the others must notice who."""

    LEAVING = {"dispatch": 1, "combine": 3, "clean": 5}

    def __init__(self, enabled, rank, num_ranks, buffer):
        self.enabled, self.rank, self.num_ranks, self.buffer = enabled, rank, num_ranks, buffer
        self.gone = set()

    def leaves(self, step):
        """Is this rank away from now on? Otherwise the one that leaves at this step is known to be gone."""
        if not self.enabled:
            return False
        self.gone.add(self.LEAVING[step])
        return self.rank in self.gone

    def check(self):
        """This rank's masks say exactly who is gone: nobody that is merely late."""
        if not self.enabled:
            return
        status = torch.full((self.num_ranks,), -1, dtype=torch.int32)
        self.buffer.low_latency_query_mask_buffer(status)
        masked = set(status.nonzero().flatten().tolist())
        assert masked == self.gone, f"rank {self.rank} has masked {sorted(masked)}, gone are {sorted(self.gone)}"

    def without_gone(self, topk_idx, num_local_experts):
        """The selections less those of experts on ranks that are gone."""
        if not self.gone:
            return topk_idx
        owners = topk_idx // num_local_experts
        gone = torch.zeros_like(topk_idx, dtype=torch.bool)
        for rank in self.gone:
            gone |= owners == rank
        return topk_idx.masked_fill(gone, -1)


def make_data(args, rank):
    """Sets of rows, the first constant: the rank in all channels but the last 128, which hold the token's index."""
    tokens, hidden = args.num_tokens, args.hidden
    constant = torch.full((tokens, hidden), float(rank - OFFSET), dtype=torch.bfloat16)
    constant[:, -128:] = torch.arange(tokens, dtype=torch.bfloat16).view(-1, 1)
    return [constant, torch.randn((tokens, hidden), dtype=torch.bfloat16) * 0.1]


def make_selections(args):
    scores = torch.randn((args.num_tokens, args.num_experts), dtype=torch.float32).abs() + 1
    topk_idx = torch.topk(scores, args.num_topk, dim=-1, sorted=True)[1].to(deep_ep.topk_idx_t)
    topk_weights = torch.randn((args.num_tokens, args.num_topk), dtype=torch.float32).abs()
    for _ in range(10):
        topk_idx[torch.randint(args.num_tokens, (1,)), torch.randint(args.num_topk, (1,))] = -1
    return topk_idx, topk_weights


def check_dispatched(args, case, rows, counts, stats, handle, all_topk_idx, rank, failures, constant):
    """Counts, ranges and, for the constant rows, every value."""
    round_scale, num_ranks = case["round_scale"], all_topk_idx.size(0)
    local_experts = args.num_experts // num_ranks
    present = [source for source in range(num_ranks) if source not in failures.gone]
    for local in range(local_experts):
        expert = rank * local_experts + local
        count, ranges = counts[local].item(), handle[1][local]
        valid, sources = rows[local][:count], handle[0][local][:count]
        assert count == stats[local].item(), f"expert {expert}: count {count}, statistics {stats[local].item()}"
        assert count == (ranges & 0xFFFFFFFF).sum().item()
        assert count == (all_topk_idx[present] == expert).sum().item()
        if count == 0 or not constant:
            continue
        assert torch.equal(valid[:, :-128].amin(dim=-1), valid[:, :-128].amax(dim=-1))
        if round_scale:
            assert calc_diff(valid[:, -1], sources.view(-1)) < 0.007
        else:
            assert (valid[:, -128:] - sources.view(-1, 1) % args.num_tokens == 0).all()
        for source in range(num_ranks):
            begin, number = (ranges[source] >> 32).item(), (ranges[source] & 0xFFFFFFFF).item()
            if source in failures.gone:
                assert number == 0
                continue
            assert number == (all_topk_idx[source] == expert).sum().item()
            if not round_scale:
                assert (valid[begin : begin + number, 0] == source - OFFSET).all()


def run_case(args, case, x, topk_idx, topk_weights, all_topk_idx, rank, num_ranks, buffer, failures, constant, twice):
    """One dispatch and its combines. Returns a hash of all results, or nothing when this rank is gone."""
    fp8, hook_mode = case["use_fp8"], case["return_recv_hook"]
    ends = {"return_recv_hook": hook_mode, "async_finish": not hook_mode}
    digest = 0

    def finish(event, hook):
        hook() if hook_mode else event.current_stream_wait()

    if failures.leaves("dispatch"):
        return None
    for _ in range(1 + twice):  # a dispatch that no combine follows is allowed
        stats = torch.zeros(args.num_experts // num_ranks, dtype=torch.int32)
        packed, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, topk_idx, args.num_tokens, args.num_experts, use_fp8=fp8, round_scale=case["round_scale"],
            use_ue8m0=case["use_ue8m0"], cumulative_local_expert_recv_stats=stats, **ends,
        )  # fmt: skip
        finish(event, hook)
    failures.check()
    rows = packed
    if fp8:
        assert packed[1].transpose(1, 2).is_contiguous(), "scales must be column-major"
        flat = packed[0].flatten(0, 1), packed[1].contiguous().flatten(0, 1)
        rows = per_token_cast_back(*flat).view(packed[0].shape)
    check_dispatched(args, case, rows, counts, stats, handle, all_topk_idx, rank, failures, constant)
    for local in range(counts.numel()):
        valid = slice(0, counts[local].item())
        digest ^= hash_tensor(packed[0][local][valid] if fp8 else packed[local][valid])
        if fp8:
            digest ^= hash_tensor(packed[1][local][valid])

    for zero_copy in (False,) if args.use_logfmt else (False, True):
        if failures.leaves("combine"):
            return None
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
        out = torch.empty((args.num_tokens, args.hidden), dtype=torch.bfloat16)
        combined, event, hook = buffer.low_latency_combine(
            rows, topk_idx, topk_weights, handle, use_logfmt=args.use_logfmt, zero_copy=zero_copy, out=out, **ends
        )
        finish(event, hook)
        failures.check()
        assert combined.data_ptr() == out.data_ptr() and not combined.isnan().any()
        kept = failures.without_gone(topk_idx, args.num_experts // num_ranks)
        weight = topk_weights.masked_fill(kept == -1, 0).sum(dim=1).view(-1, 1)
        difference = calc_diff(x * weight, combined)
        if not case["round_scale"]:
            limit = 9e-4 if fp8 else 1e-5
            assert difference < limit, f"combined differs by {difference}, allowed {limit}: {case}, {zero_copy=}"
        digest ^= hash_tensor(combined)

    if failures.enabled:
        if failures.leaves("clean"):
            return None
        buffer.clean_low_latency_buffer(args.num_tokens, args.hidden, args.num_experts)
        failures.check()
    return digest


def cases():
    for return_recv_hook in (False, True):
        for number in range(4):
            yield dict(return_recv_hook=return_recv_hook, use_fp8=number > 0, round_scale=number > 1, use_ue8m0=number > 2)


def run_cases(args, rank, num_ranks, group, buffer, seed=0, report=print):
    torch.manual_seed(seed + rank)
    topk_idx, topk_weights = make_selections(args)
    gathered = [None] * num_ranks
    dist.all_gather_object(gathered, topk_idx.cpu(), group)
    all_topk_idx = torch.stack(gathered).to(topk_idx.device)
    failures = Failures(args.shrink_test, rank, num_ranks, buffer)
    digest = 0
    for number, x in enumerate(make_data(args, rank)):
        for position, case in enumerate(cases()):
            names = ", ".join(name for name, value in case.items() if value) or "BF16"
            report(f"[testing] Running with data {number}, {names} ...", end="")
            result = run_case(
                args, case, x, topk_idx, topk_weights, all_topk_idx, rank, num_ranks, buffer, failures,
                constant=number == 0, twice=position % 2,
            )  # fmt: skip
            if result is None:
                return None
            digest ^= result
            report(" passed")
    return digest


def run_rank(local_rank, args):
    if args.shrink_test:
        os.environ["DEEP_EP_TIMEOUT_S"] = str(args.shrink_timeout)
    rank, num_ranks, group = init_dist(local_rank, args.num_processes)
    assert not args.shrink_test or num_ranks > max(Failures.LEAVING.values()), "the shrink test needs at least 6 ranks"

    def report(text, end="\n"):
        if rank == 0:
            print(text, end=end, flush=True)

    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(args.num_tokens, args.hidden, num_ranks, args.num_experts)
    report(f"Allocating buffer size: {size / 1e6} MB ...")
    buffer = deep_ep.Buffer(
        group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=args.num_experts // num_ranks,
        allow_nvlink_for_low_latency_mode=not args.disable_nvlink, explicitly_destroy=True,
        allow_mnnvl=args.allow_mnnvl, enable_shrink=args.shrink_test,
    )  # fmt: skip
    run_cases(args, rank, num_ranks, group, buffer, report=report)
    for seed in range(args.pressure_seeds if args.pressure_test else 0):
        report(f"Testing with seed {seed} ...")
        expected = run_cases(args, rank, num_ranks, group, buffer, seed, report=lambda *_, **__: None)
        for _ in range(20):
            repeated = run_cases(args, rank, num_ranks, group, buffer, seed, report=lambda *_, **__: None)
            assert repeated == expected, f"seed {seed}: other results than at first"
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = parser_of_script("Test low-latency dispatch and combine", (128, 16), (288, 24), 512)
    parser.add_argument("--allow-mnnvl", action="store_true", help="allow NVLink between nodes")
    parser.add_argument("--disable-nvlink", action="store_true", help="do not use NVLink")
    parser.add_argument("--use-logfmt", action="store_true", help="pass use_logfmt to combine, which has no effect")
    parser.add_argument("--pressure-test", action="store_true", help="repeat with many seeds and compare hashes")
    parser.add_argument("--pressure-seeds", type=int, default=50, help="how many (default: %(default)s)")
    parser.add_argument("--shrink-test", action="store_true", help="three ranks fail; the others go on")
    parser.add_argument("--shrink-timeout", type=float, default=float(os.environ.get("DEEP_EP_TIMEOUT_S", "5")),
                        help="seconds after which a rank counts as failed (default: %(default)s)")  # fmt: skip
    return parser.parse_args(arguments)


def test_low_latency_on_cpu_ranks(monkeypatch):
    words = "--num-tokens 8 --hidden 512 --num-topk 3 --num-experts 12 --num-processes 3"
    run_on_cpu_ranks(monkeypatch, run_rank, parse(words.split()))


if __name__ == "__main__":
    arguments = parse()
    mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)
