"""The second interface where it meets streams, events, CUDA graphs and memory: checks that run on GPUs, one rank each.

    python tests/python/elastic_checks.py [--num-processes 2] [--only graph,memory]
    python3 -m torch.distributed.run --nproc-per-node 2 tests/python/elastic_checks.py

Each check prints one line, PASS, FAIL with the reason, or SKIP, and the next one runs in any case. The exit status is 1 if
one failed. What tensors must hold comes from ``elastic_reference``, bit for bit. ``--cpu``: what needs no GPU, on CPU
ranks. All of it ends within ``--seconds``.
"""

import argparse
import contextlib
import gc
import importlib
import os
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import free_port, launched_by_torchrun
from elastic_check_parts import Rank, _checks

from deep_ep.utils.envs import group_settings

# They list their checks, which run in this order.
for part in ("values", "streams", "graphs", "memory", "replicas", "deferred", "faces"):
    importlib.import_module(f"elastic_checks_{part}")


def run_checks(group, agreement, device, only=(), seconds=85.0, say=print):
    """Results by name: "PASS", "SKIP", or "FAIL" with every rank's reason. The same on all ranks."""
    ranks = Rank(group, device)
    ranks.agreement = agreement
    begin, results = time.monotonic(), {}
    for name, function, needs_gpu, alone in _checks:
        if only and not any(part in name for part in only):
            continue
        late = [None] * ranks.size
        dist.all_gather_object(late, time.monotonic() - begin > 0.8 * seconds, group=agreement)
        reason = ""
        if needs_gpu and not ranks.gpu:
            reason = "needs a GPU"
        elif not alone and ranks.size == 1:
            reason = "needs two ranks"
        elif any(late):
            reason = "no time is left"
        if reason:
            word = "FAIL" if reason == "no time is left" else "SKIP"
            results[name] = word
            if ranks.rank == 0:
                say(f"{word} {name}: {reason}")
            continue
        started, broken = time.monotonic(), False
        try:
            text, mine = function(ranks), None
            ranks.wait()
        except BaseException as error:  # the next check shall run in any case
            where = traceback.extract_tb(error.__traceback__)
            here = [each for each in where if os.path.basename(each.filename).startswith("elastic_check")]
            last = (here[1:] or where)[-1]  # the first one is the call above
            lines = str(error).strip().splitlines() or [f"{where[-1].filename}:{where[-1].lineno}: {where[-1].line}"]
            place = f"line {last.lineno} of {os.path.basename(last.filename)}"
            text, mine = None, f"{type(error).__name__} in {place}: {lines[0][:300]}"
        gc.collect()
        try:
            ranks.wait()
        except BaseException as error:
            broken, mine = True, mine or f"{error}".splitlines()[0][:300]
        said = [None] * ranks.size
        dist.all_gather_object(said, (mine, broken), group=agreement)
        failures = [f"rank {rank}: {each[0]}" for rank, each in enumerate(said) if each[0]]
        results[name] = "FAIL " + " | ".join(failures) if failures else "PASS"
        if ranks.rank == 0:
            took = f"({time.monotonic() - started:.1f} s)"
            say(f"FAIL {name} {took}: {' | '.join(failures)}" if failures else f"PASS {name} {took}" + (f": {text}" if text else ""))
        if any(each[1] for each in said):
            results["the rest"] = "FAIL"
            if ranks.rank == 0:
                say("FAIL the rest: CUDA does not work any more on a rank")
            break
    return results


def run_rank(local_rank, args):
    os.environ.setdefault("DEEP_EP_TIMEOUT_S", "10")
    nodes, node, local = 1, 0, args.num_processes
    if launched_by_torchrun():
        local_rank, local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // local
        node = int(os.environ["RANK"]) // local
    address = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '8361')}"
    device, settings = torch.device("cpu"), {"backend": "gloo"}
    if args.cpu:
        torch.set_num_threads(1)
    else:
        settings = group_settings(local_rank, local)
        torch.cuda.init()
        device = torch.device("cuda", torch.cuda.current_device())

    def out_of_time():
        print(f"FAIL rank {local_rank}: not done after {args.seconds} s", flush=True)
        os._exit(1)

    watchdog = threading.Timer(args.seconds, out_of_time)
    watchdog.daemon = True
    watchdog.start()
    dist.init_process_group(init_method=address, rank=node * local + local_rank, world_size=nodes * local, **settings)
    everybody = list(range(nodes * local))
    group, agreement = dist.new_group(everybody), dist.new_group(everybody, backend="gloo")
    results = run_checks(group, agreement, device, args.only, args.seconds, lambda line: print(line, flush=True))
    failed = [name for name, result in results.items() if result.startswith("FAIL")]
    if dist.get_rank() == 0:
        count = {kind: sum(each.startswith(kind) for each in results.values()) for kind in ("PASS", "FAIL", "SKIP")}
        print("elastic checks:", ", ".join(f"{number} {kind}" for kind, number in count.items()), flush=True)
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # what a failed check left behind must not hold the process


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--num-processes", type=int, default=0, help="ranks to start (default: as many as GPUs, at most 8)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="parts of the names of checks to run")
    parser.add_argument("--seconds", type=float, default=85.0, help="after so long everything ends (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="what needs no GPU, on CPU ranks")
    return parser.parse_args(arguments)


def main():
    args = parse()
    if not args.cpu and not torch.cuda.is_available():
        print("SKIP everything: there is no GPU (--cpu: what needs none)")
        return 0
    args.num_processes = args.num_processes or (2 if args.cpu else min(8, torch.cuda.device_count()))
    if launched_by_torchrun():
        run_rank(0, args)
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    context = mp.get_context("spawn")
    processes = [context.Process(target=run_rank, args=(rank, args)) for rank in range(args.num_processes)]
    for process in processes:
        process.start()
    with contextlib.suppress(KeyboardInterrupt):
        for process in processes:
            process.join()
    return max(1 if process.exitcode else 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main())
