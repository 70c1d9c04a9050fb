"""Which GPU a rank takes, and which backend its group has, with as many GPUs as ranks or fewer (CUDA MPS)."""

import pytest
import torch
import torch.distributed as dist

from deep_ep.utils import envs


class Started(Exception):
    """Instead of a process group."""


@pytest.mark.parametrize("gpus, nodes, ranks, local_rank, backend, device", [
    (8, 1, 8, 5, "nccl", 5), (8, 1, 2, 1, "nccl", 1), (2, 1, 4, 3, "gloo", 1), (1, 1, 2, 0, "gloo", 0), (0, 1, 4, 1, "gloo", None),
    (4, 2, 4, 3, "nccl", 3), (4, 2, 8, 3, "gloo", 3),  # only the node's own ranks share its GPUs
])  # fmt: skip
def test_each_rank_has_a_gpu(monkeypatch, capsys, gpus, nodes, ranks, local_rank, backend, device):
    """RANK and WORLD_SIZE count nodes."""
    asked = {}

    def start(**settings):
        asked.update(settings)
        raise Started

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(device=torch.device(device)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: asked["device"].index)
    monkeypatch.setattr(dist, "init_process_group", start)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", str(nodes))
    monkeypatch.setenv("RANK", str(nodes - 1))
    with pytest.raises(Started):
        envs.init_dist(local_rank, ranks)
    first = (nodes - 1) * ranks
    assert (asked["backend"], asked["rank"], asked["world_size"]) == (backend, first + local_rank, nodes * ranks)
    taken = None if device is None else torch.device("cuda", device)
    assert asked.get("device") == taken
    # NCCL is told the device, so it guesses none; gloo takes none.
    assert asked.get("device_id") == (taken if backend == "nccl" else None)
    said = f"deep_ep: {ranks} ranks share {gpus} GPU" in capsys.readouterr().out
    assert said == (backend == "gloo" and gpus > 0 and first + local_rank == 0)
