"""The layer of moe_layer.py with MPI instead of torch.distributed.

    mpirun -n 4 python examples/python/mpi_moe_layer.py

Needs mpi4py. With GPUs, ranks take them in the order of their place on the node.
"""

import torch
from moe_layer import train_step
from mpi4py import MPI

from deep_ep import Buffer


def main() -> None:
    comm = MPI.COMM_WORLD
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(comm.Split_type(MPI.COMM_TYPE_SHARED).Get_rank() % torch.cuda.device_count())
        torch.cuda.init()
    else:
        torch.set_num_threads(1)
    buffer = Buffer(None, num_nvl_bytes=64 << 20, explicitly_destroy=True, comm=comm)
    difference = train_step(buffer, torch.device("cuda" if gpu else "cpu"))
    assert difference < 0.02, f"rank {comm.Get_rank()}: relative difference {difference}"
    if comm.allreduce(difference, op=MPI.MAX) < 0.02 and comm.Get_rank() == 0:
        print(f"{comm.Get_size()} ranks: output and gradients agree with one rank's")
    buffer.destroy()


if __name__ == "__main__":
    main()
