"""Wrong use of low-latency calls, and of their handles."""

import low_latency_reference as reference
import torch
import torch.utils._pytree
from cluster import on_ranks
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of
from test_errors import refused

from deep_ep import Buffer


@on_ranks(3)
def test_handles(group):
    """Handles are tuples, and tuples made of their elements do; copies of src_info do not."""
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    handle = dispatch(buffer, case)[2]
    outputs = outputs_of(case)
    rebuilt = (handle[0], handle[1].clone(), handle[2], 256, None)  # combine reads the first element alone
    half = [output[:, :, :256].contiguous() for output in outputs]
    back, _, _ = combine(buffer, case, half[rank], rebuilt)
    reference.close(back, reference.combined(case, rank, half))
    assert type(handle) is tuple and handle[2:] == (M, 512, 12) and isinstance(handle[1], torch.Tensor)
    leaves, form = torch.utils._pytree.tree_flatten(handle)
    assert len(leaves) == 5
    del handle, rebuilt  # a handle is its elements: nothing hangs on the tuple
    handle = torch.utils._pytree.tree_unflatten(leaves, form)
    old = handle
    for _ in range(70):  # others come and go
        dispatch(buffer, case)
    reference.close(combine(buffer, case, outputs[rank], old)[0], reference.combined(case, rank, outputs))
    src_info, layout_range, *shape = handle
    for wrong, kind, text in (
        ((src_info.clone(), layout_range, *shape), ValueError, r"handle\[0\].*copy"),
        ((src_info, layout_range), ValueError, "handle has 2"),
        (([1], layout_range, *shape), TypeError, r"handle\[0\]"),
    ):
        refused((kind, text, lambda: combine(buffer, case, outputs[rank], wrong)))
    other = make_buffer(group)
    refused((ValueError, r"handle\[0\]", lambda: combine(other, case, outputs[rank], handle)))


@on_ranks(3)
def test_wrong_use(group):
    buffer = make_buffer(group)
    rank, ranks = buffer.rank, buffer.group_size
    case = ll_case([M] * ranks)
    x, idx, weights = case.x[rank], case.topk_idx[rank], case.topk_weights[rank]
    handle = dispatch(buffer, case)[2]
    rows = outputs_of(case)[rank]
    plain = Buffer(group, 1 << 20)

    def send(x=x, idx=idx, **options):
        return lambda: buffer.low_latency_dispatch(x, idx, M, 12, **options)

    def back(weights=weights, **options):
        return lambda: buffer.low_latency_combine(rows, idx, weights, handle, **options)

    # Checks of the library have tests in C++ (buffer/low_latency).
    refused(
        (ValueError, "^x ", send(x=x.float())),
        (TypeError, "^x ", send(x=None)),
        (ValueError, "topk_idx", send(idx=idx[1:])),
        (ValueError, "x_global_scale", send(use_nvfp4=True, x_global_scale=torch.ones(2))),
        (ValueError, "use_nvfp4", send(use_nvfp4=True, round_scale=True)),
        (ValueError, "combine_weights", send(combine_weights=weights[:, 1:].contiguous())),
        (ValueError, "arrival_counters", send(arrival_counters=torch.zeros(4, 2, dtype=torch.int64))),
        (ValueError, "async_finish", send(async_finish=True, return_recv_hook=True)),
        (ValueError, "topk_weights", back(weights=weights.double())),
        (ValueError, "^out ", back(out=torch.empty(M, 256, dtype=torch.bfloat16))),
        (ValueError, "masking", lambda: buffer.low_latency_update_mask_buffer(0, True)),
        (ValueError, "low-latency memory", lambda: plain.low_latency_dispatch(x, idx, M, 12)),
        (ValueError, "low-latency memory", lambda: plain.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)),
        (ValueError, "enable_shrink", lambda: Buffer(group, enable_shrink=True)),
    )
    reference.check_dispatched(case, rank, M, dispatch(buffer, case, use_fp8=False))
    gone = make_buffer(group, explicitly_destroy=True)
    called, hook = (dispatch(gone, case, return_recv_hook=True)[4] for _ in range(2))
    called()
    gone.destroy()
    for call in (called, hook, hook, lambda: dispatch(gone, case)):  # a hook that failed may be called again
        refused((RuntimeError, "destroy", call))
