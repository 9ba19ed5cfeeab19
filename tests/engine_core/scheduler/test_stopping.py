"""Golden trace G18 as a table, and what surrounds it (U5)."""

from __future__ import annotations

import pytest

from engine_core.request import Request, RequestStatus
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.stopping import check_stop

STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH


def judge(outputs: list[int], *, max_total_tokens: int, **params: object) -> tuple[RequestStatus, int | None] | None:
    sampling = SamplingParams(max_tokens=100, **params)  # type: ignore[arg-type]
    request = Request("r", [1, 2], sampling, max_total_tokens=max_total_tokens, rank=(0, 1))
    verdict = None
    for token_id in outputs:
        assert verdict is None, "went on after the end"
        request.append_output(token_id)
        verdict = check_stop(request)
    return verdict


@pytest.mark.parametrize(
    ("eos", "stops", "outputs", "verdict"),
    [
        (99, {98}, [1, 2, 99], (STOPPED, None)),
        (99, {98}, [1, 2, 98], (STOPPED, 98)),
        (99, {98}, [1, 2, 4], (LENGTH, None)),
        (98, {98}, [1, 98], (STOPPED, None)),
        (99, {98}, [1, 2], None),
    ],
)
def test_u5_order_of_the_rules(eos: int, stops: set[int], outputs: list[int], verdict: object) -> None:
    params = {"eos_token_ids": frozenset({eos}), "stop_token_ids": frozenset(stops)}
    assert judge(outputs, max_total_tokens=5, **params) == verdict


def test_u5_ignore_eos_leaves_the_clients_own_stop_tokens() -> None:
    params = {"eos_token_ids": frozenset({7, 8}), "stop_token_ids": frozenset({8}), "ignore_eos": True}
    assert judge([7], max_total_tokens=50, **params) is None
    assert judge([7, 8], max_total_tokens=50, **params) == (STOPPED, 8)


def test_each_of_several_eos_ids_ends() -> None:
    for token_id in (3, 4):
        assert judge([token_id], max_total_tokens=50, eos_token_ids=frozenset({3, 4})) == (STOPPED, None)
