"""Sampling and logprobs on a real decoder with random weights: the same whatever happens around a request, and as
transformers has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine_core.messages import TokenLogprobs
from engine_core.sampling_params import SamplingParams
from tests.e2e.stepped_engine import Ask, LoadedModel, SteppedEngine, load_reference_model
from tests.engine_core.model_checkpoints import VOCAB_SIZE, oracle_logits, save_checkpoint

NUM_TOKENS = 12
NUM_TOP = 5
PROMPT = [(11 * n + n * n) % VOCAB_SIZE for n in range(37)]


def ask(name: str, prompt: Sequence[int], **params: Any) -> Ask:
    return Ask(name, list(prompt), SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **params}))


ASKS = [
    ask("plain", PROMPT[3:9], seed=1),
    ask("cuts", PROMPT[:20], seed=2, top_k=40, top_p=0.9, min_p=0.02, temperature=1.5),
    ask("penalties", PROMPT, seed=3, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.5),
    ask("bias", PROMPT[5:], seed=4, logit_bias={5: 3.0, 6: -100.0}, min_tokens=8, stop_token_ids=frozenset({5})),
    ask("greedy penalties", PROMPT[:12], temperature=0.0, frequency_penalty=1.5),
]


@dataclass(frozen=True)
class Models:
    """One checkpoint, twice."""

    ours: LoadedModel
    oracle: PreTrainedModel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    path: Path = tmp_path_factory.mktemp("llama")
    oracle = save_checkpoint(path, "llama")
    return Models(load_reference_model(path), oracle)


@pytest.fixture(scope="module")
def alone(models: Models) -> dict[str, list[int]]:
    """What each request gets that has an engine to itself."""
    found: dict[str, list[int]] = {}
    for each in ASKS:
        found |= SteppedEngine(models.ours, enable_prefix_caching=False).generate([each])
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"block_size": 4}, id="side by side"),
        pytest.param({"block_size": 4, "max_steps_in_flight": 2}, id="two steps in flight"),
        pytest.param({"max_chunk_size": 1, "enable_prefix_caching": False}, id="chunks of 1"),
        pytest.param({"max_chunk_size": 7}, id="chunks of 7"),
        pytest.param({"num_blocks": 22, "block_size": 4}, id="crowded"),
    ],
)
def test_draws_are_the_same_beside_others(models: Models, alone: dict[str, list[int]], options: dict[str, Any]) -> None:
    others = [ask(f"other {n}", PROMPT[n : n + 5], seed=n, top_p=0.5, num_logprobs=n) for n in range(6)]
    engine = SteppedEngine(models.ours, **options)
    found = engine.generate([*others[:2], *reversed(ASKS), *others[2:]])
    assert {name: found[name] for name in alone} == alone
    if "num_blocks" in options:
        assert sum(engine.num_preemptions.values()) > 0


def test_draws_are_the_same_when_all_is_thrown_away_at_every_third_step(
    models: Models, alone: dict[str, list[int]]
) -> None:
    engine = SteppedEngine(models.ours, max_steps_in_flight=2)

    def forget(index: int) -> None:
        if index % 3 == 2:
            assert engine.scheduler.reset_prefix_cache(reset_running=True)

    assert engine.generate(ASKS, after_step=forget) == alone
    assert min(engine.num_preemptions[each.name] for each in ASKS) >= 2


def test_min_tokens_holds_back_an_end_that_bias_makes_likely(alone: dict[str, list[int]]) -> None:
    assert 5 not in alone["bias"][:8] and 6 not in alone["bias"]
    assert len(alone["greedy penalties"]) == NUM_TOKENS


# ---------------------------------------------------------------------- logprobs
def check_against_oracle(oracle: PreTrainedModel, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> None:
    """Compare logprobs of the last tokens of a text with transformers' over the whole text."""
    logprobs = torch.log_softmax(oracle_logits(oracle, tokens).double(), -1)
    start = len(tokens) - len(found)
    for position, mine in enumerate(found, start=start):
        theirs = logprobs[position - 1]
        top = theirs.topk(NUM_TOP)
        assert mine.token_id == tokens[position]
        assert mine.logprob == pytest.approx(float(theirs[mine.token_id]), abs=1e-4)
        assert mine.rank == 1 + int((theirs > theirs[mine.token_id]).sum())
        assert list(mine.top_token_ids) == top.indices.tolist()
        assert mine.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
        assert sum(map(math.exp, mine.top_logprobs)) <= 1.0 + 1e-6


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("depth", [1, 2])
def test_logprobs_are_transformers(models: Models, chunk: int, depth: int) -> None:
    asked = {"num_logprobs": NUM_TOP, "num_prompt_logprobs": NUM_TOP, "temperature": 2.0, "logit_bias": {7: 5.0}}
    engine = SteppedEngine(models.ours, max_chunk_size=chunk, max_steps_in_flight=depth)
    engine.generate([ask("earlier", PROMPT, seed=8)])
    found = engine.generate([ask("a", PROMPT, seed=9, **asked), ask("beside", PROMPT[:9], seed=5)])
    assert engine.num_cached_tokens["a"] == 0
    assert (len(engine.prompt_logprobs["a"]), len(engine.logprobs["a"])) == (len(PROMPT) - 1, NUM_TOKENS)
    check_against_oracle(models.oracle, PROMPT, engine.prompt_logprobs["a"])
    check_against_oracle(models.oracle, [*PROMPT, *found["a"]], engine.logprobs["a"])
    assert set(engine.logprobs) == set(engine.prompt_logprobs) == {"a"}


@pytest.mark.parametrize("when", [2, 5, 8])
def test_a_preemption_leaves_logprobs_as_they_are(models: Models, when: int) -> None:
    """Within the prompt, whose six chunks take six steps, and behind it."""
    asked = {"num_logprobs": NUM_TOP, "num_prompt_logprobs": NUM_TOP}
    engine = SteppedEngine(models.ours, max_chunk_size=7, max_steps_in_flight=2)

    def forget(index: int) -> None:
        if index == when:
            assert engine.scheduler.reset_prefix_cache(reset_running=True)

    found = engine.generate([ask("a", PROMPT, seed=9, **asked)], after_step=forget)
    assert engine.num_preemptions["a"] == 1
    check_against_oracle(models.oracle, PROMPT, engine.prompt_logprobs["a"])
    check_against_oracle(models.oracle, [*PROMPT, *found["a"]], engine.logprobs["a"])
    assert len(engine.logprobs["a"]) == NUM_TOKENS


def test_all_probabilities_of_a_token_together_are_1(models: Models) -> None:
    engine = SteppedEngine(models.ours)
    engine.generate([ask("a", PROMPT, num_logprobs=VOCAB_SIZE)])
    for each in engine.logprobs["a"]:
        assert sum(map(math.exp, each.top_logprobs)) == pytest.approx(1.0, abs=1e-5)
        assert each.logprob == each.top_logprobs[each.top_token_ids.index(each.token_id)]
