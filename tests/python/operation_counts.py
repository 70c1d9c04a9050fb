"""How many PyTorch operations a call of the second interface makes: of any kind, and of those that launch a kernel on a GPU.

    python tests/python/operation_counts.py      prints the table of docs/measurements

Counted on one CPU rank: the calls are made of the same operations there.
"""

import torch
from test_errors import Alone
from torch.utils._python_dispatch import TorchDispatchMode

from deep_ep.buffers.elastic import ElasticBuffer

T, H, K, EXPERTS = 12, 128, 4, 8
#: Operations that only make or describe memory. The others are kernels, or copies.
SILENT = {"empty", "empty_strided", "empty_like", "view", "_unsafe_view", "slice", "select", "detach", "unsqueeze", "expand",
          "reshape", "flatten", "alias", "as_strided", "t", "transpose", "view_as", "squeeze", "split", "new_empty"}  # fmt: skip


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    @property
    def all(self):
        return len(self.names)

    @property
    def launches(self):
        return sum(name not in SILENT for name in self.names)


def counts():
    """By name of the call."""
    buffers = {multiple: ElasticBuffer(Alone, num_max_tokens_per_rank=T, hidden=H, num_topk=K, allow_multiple_reduction=multiple)
               for multiple in (True, False)}  # fmt: skip
    x, idx, weights = torch.randn(T, H).to(torch.bfloat16), torch.randint(0, EXPERTS, (T, K)), torch.rand(T, K)
    scaled = (x.to(torch.float8_e4m3fn), torch.rand(T, H // 32))
    bias = torch.zeros_like(x)
    result = {}

    def counted(name, call):
        with Count() as counter:
            value = call()
        result[name] = counter
        return value

    buffer = buffers[True]
    for expand in (False, True):
        layout = "expanded" if expand else "plain"
        for sync in (True, False):
            options = {"num_experts": EXPERTS, "do_expand": expand, "do_cpu_sync": sync}
            waits = "" if sync else ", no host wait"
            got = counted(f"dispatch, {layout}{waits}", lambda: buffer.dispatch(x, idx, weights, **options))
        stats = torch.zeros(EXPERTS, dtype=torch.int32)
        more = {"use_tma_aligned_col_major_sf": True, "cumulative_local_expert_recv_stats": stats, "expert_alignment": 8}
        if expand:
            more["do_zero_padding"] = True
        counted(f"dispatch, {layout}, everything", lambda: buffer.dispatch(scaled, idx, weights, **options, **more))
        rows, _, received, handle, _ = got
        counted(f"cached dispatch, {layout}", lambda: buffer.dispatch(x, handle=handle, do_expand=expand))
        column = {"use_tma_aligned_col_major_sf": True}
        counted(
            f"cached dispatch, {layout}, scales and weights",
            lambda: buffer.dispatch(scaled, topk_weights=weights, handle=handle, do_expand=expand, **column),
        )
        counted(f"combine, {layout}", lambda: buffer.combine(rows, handle))
        counted(f"combine, {layout}, weights and biases", lambda: buffer.combine(rows, handle, received, (bias, bias)))
        if expand:
            counted("combine, expanded, rounded once", lambda: buffers[False].combine(rows, handle))
    counted("barrier", buffer.barrier)
    return result


def main():
    print("| call | operations | of these, launches |\n| --- | --- | --- |")
    for name, count in counts().items():
        print(f"| {name} | {count.all} | {count.launches} |")


if __name__ == "__main__":
    main()
