from __future__ import annotations

import pytest

from engine_core.sampling_params import SamplingParams

EOS, STOP = frozenset({0, 5}), frozenset({5, 9})


@pytest.mark.parametrize(
    ("ignore_eos", "expected"),
    [(False, {0, 5, 9}), (True, {5, 9})],  # an id of both kinds still ends it: the client named it
)
def test_ends_are_the_models_and_the_clients(ignore_eos: bool, expected: set[int]) -> None:
    params = SamplingParams(max_tokens=1, eos_token_ids=EOS, stop_token_ids=STOP, ignore_eos=ignore_eos)
    assert params.end_token_ids == expected
