"""What tests and scripts share: launches, nodes, signatures."""

import argparse
import inspect
import os
import socket
import subprocess
import sys
from unittest import mock

import torch
from time_scale import scaled

GPU = torch.cuda.is_available()


def launched_by_torchrun():
    """Then WORLD_SIZE and RANK count ranks; otherwise they count nodes."""
    return "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ


def free_port():
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parser_of_script(description, tokens, experts, hidden_on_cpu):
    """Options that upstream's test scripts have in common. ``tokens``, ``experts``: by default on GPUs, and on the CPU."""
    parser = argparse.ArgumentParser(description=description)
    for name, on_gpus, on_cpu, what in (
        ("processes", 8, 4, "processes of this host"),
        ("tokens", *tokens, "tokens per rank"),
        ("topk", 8, 4, "experts a token"),
        ("experts", *experts, "experts"),
    ):
        parser.add_argument(f"--num-{name}", type=int, default=on_gpus if GPU else on_cpu, help=f"{what} (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=7168 if GPU else hidden_on_cpu, help="hidden size (default: %(default)s)")
    return parser


def run_on_cpu_ranks(monkeypatch, run_rank, args):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.multiprocessing.spawn(run_rank, args=(args,), nprocs=args.num_processes)


def ranks_a_node(number=2):
    """Of buffers that are made meanwhile: so many ranks of this host are a node; 0: all of them."""
    return mock.patch.dict(os.environ, {"DEEP_EP_RANKS_PER_NODE": str(number)} if number else {})


def run(*command, seconds=60, cwd=None, **variables):
    """A program, which must end well. The result has what it says."""
    command = [str(part) for part in command]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(seconds), cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def output_of(*command, **options):
    return run(*command, **options).stdout


def run_program(program, *arguments):
    """A text in a process of its own, which may import what is here."""
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
    return run(sys.executable, "-W", "always::ResourceWarning", "-c", program, *arguments, PYTHONPATH=path)


def run_with_older_pytorch(module, function):
    """A function of tests where PyTorch has no DLPack exchange API, as before 2.10."""
    run_program(f"""
import torch
if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
import {module}
{module}.{function}()
""")


def signature_of(function):
    """Parameters and defaults as they are written."""
    written = inspect.signature(function)
    plain = [each.replace(annotation=each.empty) for each in written.parameters.values()]
    return str(written.replace(parameters=plain, return_annotation=written.empty))[1:-1]
