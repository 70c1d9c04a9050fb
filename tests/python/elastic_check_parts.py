"""The checks of test_elastic_checks.py share this: their list, a rank's buffers and data, and comparisons of rows."""

import copy

import torch
import torch.distributed as dist
from reference import make_case

from deep_ep.buffers.elastic import ElasticBuffer, EPHandle

H, M, K = 256, 64, 4
TOKENS = [64, 37, 0, 51, 64, 1, 20, 64]
SPIN = 100_000_000  # cycles: about 50 ms
checks = {}  # name: function of a Rank, whether it needs a GPU, and whether it is meaningful with a single rank


def check(needs_gpu=True, alone=True):
    def add(function):
        checks[function.__name__] = (function, needs_gpu, alone)
        return function

    return add


class Rank:
    """This process's part: its device, its group, and data of all ranks."""

    def __init__(self, group, device):
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.gpu = device.type == "cuda"

    def buffer(self, **options):
        settings = {"num_max_tokens_per_rank": M, "hidden": H, "num_topk": K, "explicitly_destroy": True, **options}
        return ElasticBuffer(self.group, **settings)

    def case(self, seed=0, tokens=None, drop=0.2):
        counts = [TOKENS[rank % len(TOKENS)] for rank in range(self.size)] if tokens is None else [tokens] * self.size
        return make_case(counts, hidden=H, num_topk=K, seed=seed, drop=drop)

    def there(self, tensor):
        return tensor.to(self.device)

    def wait(self):
        if self.gpu:
            torch.cuda.synchronize()


def on_host(value):
    """The same with all tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
    if isinstance(value, tuple):
        return tuple(on_host(each) for each in value)
    if isinstance(value, EPHandle):
        result = copy.copy(value)
        for name, each in vars(value).items():
            if isinstance(each, torch.Tensor) and each.is_cuda:
                setattr(result, name, on_host(each))
        return result
    return value


def noise(rows=4096):
    """Fills memory that was freed: what still needed it is wrong then."""
    for size in (rows * H, 1 << 20, 1 << 14, 1 << 9):
        for _ in range(3):
            torch.full((size,), float("nan"), dtype=torch.bfloat16, device="cuda")


def recorded_graph(step, **options):
    """A graph of ``step``, which has run once before, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        results = step()
    return graph, results
