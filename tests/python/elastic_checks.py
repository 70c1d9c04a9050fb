"""Both interfaces where they meet streams, events, CUDA graphs and PyTorch's memory: checks that run on GPUs, one rank each.

    python tests/python/elastic_checks.py [--num-processes 2] [--only graph,memory]

Each check prints one line, PASS, FAIL with the reason, or SKIP, and the next one runs in any case. The exit status is 1 if
one failed. Values are compared with those of ``elastic_reference``, bit for bit. ``--cpu``: what needs no GPU, on CPU ranks.
``--without-pools``: as with a PyTorch that has no pools of memory. No check begins after ``--seconds``.
"""

import argparse
import gc
import importlib
import re
import sys
import time

import torch
from cluster import Cluster
from elastic_check_parts import Rank, checks

from deep_ep import results

# They list their checks, which run in this order.
for part in ("values", "streams", "graphs", "memory", "results", "replicas", "deferred", "faces"):
    importlib.import_module(f"elastic_checks_{part}")


def reason_to_skip(name, size, cpu):
    _, needs_gpu, alone = checks[name]
    return "needs a GPU" if needs_gpu and cpu else "needs two ranks" if size == 1 and not alone else ""


def run_check(group, name, cpu, pools=True):
    """Of one rank."""
    device = torch.device("cpu")
    if not cpu:
        device = torch.device("cuda", group.rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.cuda.init()
    has_pools = results._has_pools
    if not pools:
        results._has_pools = lambda: False
    try:
        ranks = Rank(group, device)
        text = checks[name][0](ranks)
        gc.collect()
        ranks.wait()
    finally:
        results._has_pools = has_pools
    return text or ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--num-processes", type=int, default=0, help="ranks to start (default: as many as GPUs, at most 8)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[""], help="parts of the names of checks to run")
    parser.add_argument("--seconds", type=float, default=170.0, help="later no check begins (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="what needs no GPU, on CPU ranks")
    parser.add_argument("--without-pools", action="store_true", help="as with a PyTorch that has no pools of memory")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        print("SKIP everything: there is no GPU (--cpu: what needs none)")
        return 0
    size = args.num_processes or (2 if args.cpu else min(8, torch.cuda.device_count()))
    begin, cluster, count = time.monotonic(), None, dict.fromkeys(("PASS", "FAIL", "SKIP"), 0)
    for name in [name for name in checks if any(part in name for part in args.only)]:
        started, text = time.monotonic(), reason_to_skip(name, size, args.cpu)
        word = "SKIP" if text else "PASS"
        if not text and started - begin > args.seconds:
            word, text = "FAIL", "no time is left"
        elif not text:
            if cluster is None or not cluster.usable:
                cluster = Cluster(size)
            try:
                text = cluster.run(run_check, name, args.cpu, not args.without_pools)[0]
            except AssertionError as error:
                word, text = "FAIL", " | ".join(each.strip().splitlines()[-1] for each in re.split(r"(?m)^(?=rank \d)", str(error))[1:])
        count[word] += 1
        print(f"{word} {name} ({time.monotonic() - started:.1f} s): {text}", flush=True)
    print("elastic checks:", ", ".join(f"{number} {kind}" for kind, number in count.items()), flush=True)
    if cluster is not None:
        cluster.close(kill=not cluster.usable)
    return 1 if count["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
