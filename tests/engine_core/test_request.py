from __future__ import annotations

import pytest

from engine_core.request import FINISH_REASONS, Request, RequestStatus
from engine_core.sampling_params import SamplingParams


def create(**params: object) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(max_tokens=4, **params), max_total_tokens=7, rank=(0, 1))  # type: ignore[arg-type]


def test_r2_lengths_follow_the_tokens() -> None:
    request = create()
    assert (request.num_prompt_tokens, request.num_tokens, request.num_tokens_with_spec) == (3, 3, 3)
    request.num_tokens_with_spec += 1  # as the scheduler does for a token that is being sampled
    request.append_output(9)
    assert request.all_token_ids == [1, 2, 3, 9]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_tokens_with_spec) == (3, 4, 4)


def test_stop_ids_join_the_models_and_the_clients() -> None:
    params = {"eos_token_ids": frozenset({0}), "stop_token_ids": frozenset({5})}
    assert create(**params).stop_ids == {0, 5}
    assert create(**params, ignore_eos=True).stop_ids == {5}


@pytest.mark.parametrize(("num_prompt_logprobs", "skips"), [(None, False), (0, True), (5, True)])
def test_whoever_asks_for_its_prompts_logprobs_never_reads_the_cache(
    num_prompt_logprobs: int | None, skips: bool
) -> None:
    assert create(num_prompt_logprobs=num_prompt_logprobs).skip_reading_prefix_cache is skips


@pytest.mark.parametrize("status", RequestStatus)
def test_every_final_status_has_a_reason_and_no_other(status: RequestStatus) -> None:
    assert status.is_finished == (status in FINISH_REASONS) == status.name.startswith("FINISHED_")
