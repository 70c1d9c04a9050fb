"""dispatch and combine on CPU ranks, against the reference."""

import pytest
import reference
import torch
from cluster import on_ranks
from common import run_with_older_pytorch
from normal_mode import CONFIG, check_received, equal, run_cases, send
from reference import make_case
from test_errors import Alone

import deep_ep
from deep_ep import Buffer

SIZE = 1 << 24


def round_trip(group, tokens, options):
    run_cases(Buffer(group, SIZE), make_case(tokens, **options))


@pytest.mark.parametrize(
    "tokens, options",
    [([70, 1, 13], {}), ([0, 0, 0], {}), ([20, 30, 10], {"index_dtype": torch.int32, "num_topk": 6}), ([33], {})],
)
def test_round_trip(ranks, tokens, options):
    ranks(len(tokens)).run(round_trip, tokens, options)


@on_ranks(3)
def test_bias(group):
    buffer = Buffer(group, SIZE)
    case = make_case([30, 12, 0], drop=0.4)
    rank = buffer.rank
    rows = [reference.dispatched(case, r).x for r in range(case.num_ranks)]
    result = send(buffer, case)
    first, second = torch.randn_like(case.x[rank]), torch.randn_like(case.x[rank])
    for given, terms in ((first, (first,)), ((first, second), (first, second)), ([None, second], (second,))):
        back, _, _ = buffer.combine(result[0], result[4], bias=given, config=CONFIG)
        equal(back, reference.combined(case, rank, rows, bias=terms)[0], "combined_x with bias")


@on_ranks(3)
def test_events(group):
    buffer = Buffer(group, SIZE)
    case = make_case([30, 12, 7])
    mine = reference.dispatched(case, buffer.rank)
    for previous in (None, buffer.capture(), deep_ep.EventOverlap(), deep_ep.utils.EventHandle()):
        result = send(buffer, case, previous_event=previous, async_finish=True)
        assert result[5].event is not None
        with result[5]:
            pass
        result[5].current_stream_wait()
        check_received(result, mine, buffer.rank)
    for previous in (buffer.capture(), buffer.capture().event):
        result = send(buffer, case, previous_event=previous, async_finish=True, allocate_on_comm_stream=True)
        check_received(result, mine, buffer.rank)
    for wrong in ({"async_finish": True}, {"previous_event": buffer.capture()}):
        with pytest.raises(ValueError, match="allocate_on_comm_stream"):
            send(buffer, case, allocate_on_comm_stream=True, **wrong)


def cases_of_one_rank():
    run_cases(Buffer(None, SIZE, comm=Alone), make_case([9], 512))


def test_as_with_older_pytorch():
    run_with_older_pytorch("test_calls", "cases_of_one_rank")
