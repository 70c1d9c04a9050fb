"""Which GPU a rank takes, and which backend its group has, with as many GPUs as ranks or fewer (CUDA MPS)."""

import pytest
import torch
import torch.distributed as dist

from deep_ep.utils import envs


class Started(Exception):
    """Instead of a process group."""


@pytest.fixture
def machine(monkeypatch):
    """``machine(gpus)``: PyTorch says that there are so many; returns what was asked of it."""

    def pretend(gpus):
        asked = {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(device=torch.device(device)))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: asked["device"].index)

        def start(*positional, **settings):
            assert not positional
            asked.update(settings)
            raise Started

        monkeypatch.setattr(dist, "init_process_group", start)
        return asked

    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return pretend


@pytest.mark.parametrize("gpus, ranks, local_rank, backend, device", [
    (8, 8, 5, "nccl", 5), (8, 2, 1, "nccl", 1), (2, 4, 0, "gloo", 0), (2, 4, 3, "gloo", 1), (1, 2, 1, "gloo", 0),
    (2, 16, 14, "gloo", 0),
])  # fmt: skip
def test_each_rank_has_a_gpu(machine, capsys, gpus, ranks, local_rank, backend, device):
    asked = machine(gpus)
    with pytest.raises(Started):
        envs.init_dist(local_rank, ranks)
    assert asked["device"] == torch.device("cuda", device)
    assert (asked["backend"], asked["rank"], asked["world_size"]) == (backend, local_rank, ranks)
    # NCCL is told the device, so it guesses none; gloo takes none.
    assert asked.get("device_id") == (torch.device("cuda", device) if backend == "nccl" else None)
    said = f"deep_ep: {ranks} ranks share {gpus} GPU" in capsys.readouterr().out
    assert said == (backend == "gloo" and local_rank == 0)


def test_no_gpu(machine, capsys):
    asked = machine(0)
    with pytest.raises(Started):
        envs.init_dist(1, 4)
    assert asked["backend"] == "gloo" and "device" not in asked and "device_id" not in asked
    assert "share" not in capsys.readouterr().out


def test_ranks_of_several_nodes(machine, monkeypatch):
    """RANK and WORLD_SIZE count nodes; only the node's own ranks share its GPUs."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for gpus, ranks, backend in ((4, 4, "nccl"), (4, 8, "gloo")):
        asked = machine(gpus)
        with pytest.raises(Started):
            envs.init_dist(3, ranks)
        assert (asked["backend"], asked["rank"], asked["world_size"]) == (backend, ranks + 3, 2 * ranks)
        assert asked["device"].index == 3
