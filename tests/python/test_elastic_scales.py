"""Scales beside rows in the second interface, in every layout."""

import elastic_reference as reference
import pytest
import torch
from elastic_cases import H, M, check_scales, make_buffer, send
from reference import make_case
from test_errors import Alone

from deep_ep.buffers.elastic import ElasticBuffer


def scales(group):
    buffer = make_buffer(group, use_fp8_dispatch=True)
    rank = buffer.rank_idx
    case = make_case([9, 14, 3, 5][: buffer.num_ranks], hidden=128, num_topk=4, drop=0.2)
    rows8 = [x.to(torch.float8_e4m3fn) for x in case.x]
    want = reference.expected(case, rank, M, 8, [x.view(torch.uint8) for x in rows8])
    generator = torch.Generator().manual_seed(5)
    handle = send(buffer, case, do_expand=True, expert_alignment=8)[3]
    for width, dtype in ((1, torch.float32), (3, torch.int32), (4, torch.float32)):
        values = [(torch.rand(len(x), width, generator=generator) * 1000).to(dtype) for x in case.x]
        want_scales = reference.expected(case, rank, M, 8, values).x
        for given in (values[rank], values[rank].t().contiguous().t()):
            for tma in (False, True):
                for expand in (False, True):
                    options = {"use_tma_aligned_col_major_sf": tma, "do_expand": expand}
                    zero = {"do_zero_padding": True} if expand else {}
                    for cpu_sync in (True, False):
                        sent = send(
                            buffer, case, (rows8[rank], given), expert_alignment=8, do_cpu_sync=cpu_sync, **options, **zero
                        )
                        check_scales(want, want_scales, sent, tma, expand)
                    check_scales(want, want_scales, buffer.dispatch((rows8[rank], given), handle=handle, **options, **zero), tma, expand)


def test_scales(ranks):
    ranks(2).run(scales)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_one_row_with_scales(width):
    """What travels beside a single row is cut out of a wider one."""
    buffer = ElasticBuffer(Alone, num_max_tokens_per_rank=M, hidden=H, num_topk=3)
    x, idx = torch.ones(1, H).to(torch.float8_e4m3fn), torch.tensor([[0, 2, -1]])
    row_scales, weights = torch.rand(1, width), torch.rand(1, 3)
    handle = buffer.dispatch((x, row_scales), idx, num_experts=4, do_expand=True)[3]
    for options, wanted in (({}, None), ({"topk_weights": weights}, weights[0, :2].tolist())):
        result = buffer.dispatch((x, row_scales), handle=handle, do_expand=True, **options)
        (rows, scales_of_rows), _, weights_of_rows = result[:3]
        assert torch.equal(scales_of_rows, row_scales.expand(2, -1)) and rows.shape == (2, H)
        assert (weights_of_rows is None) if wanted is None else (weights_of_rows.tolist() == wanted)
