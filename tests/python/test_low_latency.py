"""Low-latency dispatch and combine: every combination of options, and ranks that fail. `deep_ep bench low-latency` has the
timings.

On GPUs: ``python tests/python/test_low_latency.py`` (8 processes, NCCL). Without a GPU the same on CPU ranks with small
shapes. MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and RANK (of the node) as for upstream's script of this name.
"""

import itertools
import os

import low_latency_calls as calls
import low_latency_reference as reference
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import parser_of_script, run_on_cpu_ranks
from normal_mode import print_once

import deep_ep
from deep_ep.utils.envs import init_dist
from deep_ep.utils.math import calc_diff, per_token_cast_back

# The shrink test: three ranks leave, each at the first call of a kind, and the others must notice who.
LEAVING = {"dispatch": 1, "combine": 3, "clean": 5}


class Left(Exception):
    """This rank is away from now on."""


def run_cases(args, buffer, seed=0):
    rank, ranks, tokens = buffer.rank, buffer.group_size, args.num_tokens
    case = calls.ll_case(
        [tokens] * ranks, args.hidden, num_topk=args.num_topk, experts_per_rank=args.num_experts // ranks, seed=seed, drop=0.02
    )
    owners = torch.where(case.topk_idx[rank] >= 0, case.topk_idx[rank] // case.local_experts, -1)
    gone = []

    def leave(step):
        if args.shrink_test and LEAVING[step] not in gone:
            gone.append(LEAVING[step])
        if rank in gone:
            raise Left

    def check_masks():
        """This rank's masks say exactly who is gone: nobody that is merely late."""
        if args.shrink_test:
            status = torch.full((ranks,), -1, dtype=torch.int32)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(each in gone) for each in range(ranks)], f"gone are {gone}"

    for with_hook, form in itertools.product((False, True), calls.FORMS):
        form = {"use_fp8": True, **form}
        names = ", ".join(name for name, value in {"hook": with_hook, **form}.items() if value)
        print_once(rank, f"[testing] Running with {names or 'BF16'} ...", end="")
        ends = {"return_recv_hook": with_hook, "async_finish": not with_hook}
        leave("dispatch")
        for _ in range(2):  # a dispatch that no combine follows is allowed
            stats = torch.zeros(case.local_experts, dtype=torch.int32)
            result = calls.dispatch(buffer, case, tokens, cumulative_local_expert_recv_stats=stats, **form, **ends)
            result[4]() if with_hook else result[3].current_stream_wait()
        check_masks()
        reference.check_dispatched(case, rank, tokens, result, stats, without=gone, **form)
        rows, _, handle, _, _ = result
        if form["use_fp8"]:
            flat = rows[0].flatten(0, 1), rows[1].contiguous().flatten(0, 1)
            rows = per_token_cast_back(*flat).view(rows[0].shape)
        for zero_copy in (False,) if args.use_logfmt else (False, True):
            leave("combine")
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
            out = torch.empty_like(case.x[rank])
            back, event, hook = calls.combine(buffer, case, rows, handle, use_logfmt=args.use_logfmt, zero_copy=zero_copy, out=out, **ends)
            hook() if with_hook else event.current_stream_wait()
            check_masks()
            assert back.data_ptr() == out.data_ptr() and not back.isnan().any()
            left = torch.isin(owners, torch.tensor([-1, *gone]))
            wanted = case.x[rank].float() * case.topk_weights[rank].masked_fill(left, 0).sum(dim=1).view(-1, 1)
            limit = 1e-5 if not form["use_fp8"] else 3e-3 if form.get("round_scale") else 9e-4
            assert calc_diff(back, wanted) < limit, f"combined differs by {calc_diff(back, wanted)}: {names}, {zero_copy=}"
        if args.shrink_test:
            leave("clean")
            buffer.clean_low_latency_buffer(tokens, args.hidden, args.num_experts)
            check_masks()
        print_once(rank, " passed")


def run_rank(local_rank, args):
    if args.shrink_test:
        os.environ["DEEP_EP_TIMEOUT_S"] = str(args.shrink_timeout)
    rank, num_ranks, group = init_dist(local_rank, args.num_processes)
    assert not args.shrink_test or num_ranks > max(LEAVING.values()), "the shrink test needs at least 6 ranks"
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(args.num_tokens, args.hidden, num_ranks, args.num_experts)
    print_once(rank, f"Allocating buffer size: {size / 1e6} MB ...")
    buffer = deep_ep.Buffer(
        group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=args.num_experts // num_ranks,
        allow_nvlink_for_low_latency_mode=not args.disable_nvlink, explicitly_destroy=True,
        allow_mnnvl=args.allow_mnnvl, enable_shrink=args.shrink_test,
    )  # fmt: skip
    try:
        for seed in range(args.pressure_seeds if args.pressure_test else 1):
            run_cases(args, buffer, seed)
    except Left:
        pass
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = parser_of_script("Test low-latency dispatch and combine", (128, 16), (288, 24), 512)
    parser.add_argument("--allow-mnnvl", action="store_true", help="allow NVLink between nodes")
    parser.add_argument("--disable-nvlink", action="store_true", help="do not use NVLink")
    parser.add_argument("--use-logfmt", action="store_true", help="pass use_logfmt to combine, which has no effect")
    parser.add_argument("--pressure-test", action="store_true", help="the same with many seeds")
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
