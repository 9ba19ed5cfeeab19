"""A request's tokens are the same whatever happens around it: on the real model, fp32, the reference backend; and on a
random one, bf16, FlashInfer's and CUDA's stand-ins.

Each request alone, nothing cached, is what all else is compared with, token id by token id.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core import CacheConfig, SamplingParams, SchedulerConfig
from engine_core.engine import open_checkpoint
from server.tokenizer import load_tokenizer
from tests.e2e.stepped_engine import Ask, LoadedModel, SteppedEngine, load_device_model, load_reference_model
from tests.engine_core.cuda_machine import create_machine
from tests.engine_core.model_checkpoints import VOCAB_SIZE, save_checkpoint
from tests.helpers import EngineDriver, greedy
from tests.kernels.flashinfer_machine import RowByRowBackend

# The reference takes a minute and a half; test_cpu_sameness asks the same of the kernels that everybody uses.
BACKENDS = [pytest.param("torch", marks=pytest.mark.long), "flashinfer"]
NUM_TOKENS = 24
TEXT = """The harbour master kept two books. In the first he wrote what the ships had told him before they came: their
names, their cargo, the hour at which they hoped to be in. In the second he wrote what had become of it. A fishing boat
of eleven metres might lie outside for half a day because a tanker blocked the lock, and nobody was to blame. "If you
want to know how good a harbour is," he used to say, "do not ask the captain of the largest ship. Ask the smallest one
how long she waited, and ask whether she could have known." Every spring he drew the two books as curves on one sheet of
paper, pinned it to the door of the office, and invited the pilots to explain the gap. Some years it was the weather:
fog in March, ice until April, a storm that tore the third buoy from its chain. Other years it was the crane, which had
been repaired so often that hardly a bolt of it was older than the apprentice. But now and then the curves met for weeks
on end, and then he took the sheet down, folded it twice, and sent it to his daughter in Rotterdam, who kept them all in
a tin box and claimed, when she was asked about her father, that he had been the only honest historian on that coast.
She was wrong about one thing only: he never believed that it was"""


def sampled(**params: float) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, **params)  # type: ignore[arg-type]


# Name, first and last token of the prompt within the text, sampling.
CASES = (
    ("short, nucleus", slice(100, 105), sampled(seed=11, top_p=0.9)),
    ("small, greedy", slice(200, 218), greedy(NUM_TOKENS)),
    ("medium, top-k and nucleus", slice(60, 95), sampled(seed=12, top_p=0.95, top_k=40)),
    ("long, top-k", slice(0, 220), sampled(seed=13, top_k=50)),
)
SHORT, SMALL, MEDIUM, LONG = (name for name, _, _ in CASES)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def path(backend: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if backend == "torch":
        embedded: Path = request.getfixturevalue("embedded_model")
        return embedded
    directory = tmp_path_factory.mktemp("qwen3")
    save_checkpoint(directory, "qwen3", head_dim=64)
    return directory


@pytest.fixture(scope="module")
def model(backend: str, path: Path) -> LoadedModel:
    return load_reference_model(path) if backend == "torch" else load_device_model(path, RowByRowBackend())


@pytest.fixture(scope="module")
def asks(backend: str, path: Path) -> list[Ask]:
    if backend == "torch":
        tokenizer = load_tokenizer(path, open_checkpoint(path).gguf_metadata)
        tokens = tokenizer.encode(TEXT, add_special_tokens=False)
        assert len(tokens) > 220
    else:
        tokens = random.Random(4).choices(range(3, VOCAB_SIZE - 3), k=221)
    return [Ask(name, tokens[part], params) for name, part, params in CASES]


@pytest.fixture(scope="module")
def alone(model: LoadedModel, asks: list[Ask]) -> dict[str, list[int]]:
    """The tokens of each request that has an engine to itself."""
    token_ids: dict[str, list[int]] = {}
    for ask in asks:
        token_ids |= SteppedEngine(model, enable_prefix_caching=False).generate([ask])
    assert all(len(tokens) == NUM_TOKENS for tokens in token_ids.values())
    return token_ids


def check_same(
    regime: str, alone: Mapping[str, list[int]], found: Mapping[str, list[int]], names: Iterable[str]
) -> None:
    """Compare token by token, and tell whose tokens differ, and the first that does."""
    differences = []
    for name in names:
        here, expected = found[name], alone[name]
        if here != expected:
            pairs = zip(here, expected, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(here), len(expected)))
            differences.append(
                (first, f"{name!r} from output token {first}: {here[first:][:4]} not {expected[first:][:4]}")
            )
    assert not differences, f"{regime}: " + "; ".join(text for _, text in sorted(differences))


def test_with_logprobs_as_the_reference_has_them(
    path: Path, model: LoadedModel, asks: list[Ask], alone: dict[str, list[int]]
) -> None:
    """Asking for logprobs has the host draw where a device did, and changes no token."""
    engine = SteppedEngine(model)
    found = engine.generate([replace(ask, params=replace(ask.params, num_logprobs=0)) for ask in asks])
    check_same("with logprobs", alone, found, alone)
    reference = SteppedEngine(load_reference_model(path))
    scored = replace(greedy(1), num_prompt_logprobs=0)
    reference.generate([Ask(ask.name, [*ask.prompt, *alone[ask.name]], scored) for ask in asks])
    for name in alone:
        expected = reference.prompt_logprobs[name][-NUM_TOKENS:]
        gaps = [abs(mine.logprob - own.logprob) for mine, own in zip(engine.logprobs[name], expected, strict=True)]
        assert max(gaps) < (0.3 if model.decoder.dtype == torch.bfloat16 else 1e-3), name


def tail_last(asks: list[Ask], tail: str) -> list[Ask]:
    """Return the requests with one moved to the end of the line, where preemption strikes."""
    return sorted(asks, key=lambda ask: ask.name == tail)


def test_among_31_others(model: LoadedModel, asks: list[Ask], alone: dict[str, list[int]]) -> None:
    """The others share prefixes of any length with them, computed in the same step or before."""
    others = []
    for index in range(28):
        near = asks[index % 4].prompt
        prompt = [*near[: 1 + index * len(near) // 28], 60 + index]
        others.append(Ask(f"other {index}", prompt, replace(asks[index % 4].params, seed=index)))
    crowd = [*others[:5], asks[0], *others[5:14], asks[1], asks[2], *others[14:27], asks[3], others[27]]
    engine = SteppedEngine(model, num_blocks=160, max_num_seqs=32)
    found = engine.generate(crowd)
    assert sum(len(step.req_ids) == 32 for step in engine.steps) >= NUM_TOKENS - 4
    check_same("among 31 others", alone, found, alone)


def test_preempted_at_every_step_with_nothing_left_of_the_cache(
    model: LoadedModel, asks: list[Ask], alone: dict[str, list[int]]
) -> None:
    engine = SteppedEngine(model)

    def forget(index: int) -> None:
        assert engine.scheduler.reset_prefix_cache(reset_running=True)

    found = engine.generate([ask for ask in asks if ask.name != LONG], after_step=forget)
    names = (SHORT, SMALL, MEDIUM)
    assert all(engine.num_preemptions[name] == NUM_TOKENS - 1 for name in names)
    check_same("preempted at every step, cache reset", alone, found, names)


def test_preempted_with_a_step_in_flight_whose_result_is_dropped(
    model: LoadedModel, asks: list[Ask], alone: dict[str, list[int]]
) -> None:
    engine = SteppedEngine(model, max_steps_in_flight=2)

    def forget(index: int) -> None:
        if index % 10 == 9:
            assert engine.scheduler.num_steps_in_flight == 1
            assert engine.scheduler.reset_prefix_cache(reset_running=True)

    found = engine.generate(asks, after_step=forget)
    assert all(engine.num_preemptions[name] >= 2 for name in alone)
    check_same("step in flight dropped, cache reset", alone, found, alone)


def test_preempted_for_want_of_blocks_at_every_step(
    model: LoadedModel, asks: list[Ask], alone: dict[str, list[int]]
) -> None:
    """With blocks of one token each step needs blocks, and every other step finds none: the last in line is admitted,
    finds of itself what survived, and never keeps its blocks for a second token."""
    block_size = min(model.backend.page_sizes)
    engine = SteppedEngine(model, num_blocks=512, block_size=block_size, max_steps_in_flight=2)
    found = engine.generate(tail_last(asks, LONG), is_squeezed=lambda index: index % 2 == 1)
    assert engine.num_preemptions[LONG] >= (NUM_TOKENS - 1) // block_size
    stats = engine.scheduler.make_stats()
    assert 0 < stats.num_resumed_hits < stats.num_resumed_queries
    check_same("no free block at every other step, 2 in flight", alone, found, alone)


def test_displaced_by_a_more_urgent_request_at_every_step(
    model: LoadedModel, asks: list[Ask], alone: dict[str, list[int]]
) -> None:
    """There is one seat, and at every other step somebody with more right to it: in mid-prompt, then at each token."""
    engine = SteppedEngine(model, max_num_seqs=1, max_num_batched_tokens=32, policy="priority")
    victim = next(ask for ask in asks if ask.name == LONG)

    def send_urgent(index: int) -> None:
        if index % 2 == 0 and len(engine.token_ids[LONG]) < NUM_TOKENS:
            engine.add(Ask(f"urgent {index}", victim.prompt[:3], greedy(1), priority=1))

    found = engine.generate([victim], after_step=send_urgent)
    assert engine.num_preemptions[LONG] >= NUM_TOKENS + len(victim.prompt) // 32 - 1
    assert max(step.total_num_scheduled_tokens for step in engine.steps) == 32
    check_same("displaced by priority, 32 tokens a step", alone, found, [LONG])


def test_with_a_prefix_hit_in_chunks_of_7(model: LoadedModel, asks: list[Ask], alone: dict[str, list[int]]) -> None:
    """Half of the prompt, or all of it but a token, was computed before for somebody else."""
    block_size = max(4, min(model.backend.page_sizes))
    engine = SteppedEngine(model, num_blocks=256, block_size=block_size, max_chunk_size=7)
    lengths = {SHORT: 4, SMALL: 17, MEDIUM: 20, LONG: 110}
    engine.generate([Ask(f"stem of {ask.name}", ask.prompt[: lengths[ask.name]], greedy(1)) for ask in asks])
    found = engine.generate(asks)
    cached = {name: length // block_size * block_size for name, length in lengths.items()}
    assert {name: engine.num_cached_tokens[name] for name in alone} == cached
    assert max(max(step.token_counts) for step in engine.steps if step.token_counts) == 7
    check_same("a stem in the cache, chunks of 7", alone, found, alone)


def test_in_chunks_of_1(model: LoadedModel, asks: list[Ask], alone: dict[str, list[int]]) -> None:
    """Without the long prompt: it would take 220 steps."""
    engine = SteppedEngine(model, enable_prefix_caching=False, max_chunk_size=1, max_steps_in_flight=2)
    names = (SHORT, SMALL, MEDIUM)
    found = engine.generate([ask for ask in asks if ask.name in names])
    assert all(set(step.token_counts) <= {1} for step in engine.steps)
    check_same("chunks of 1, nothing cached, 2 in flight", alone, found, names)


@pytest.mark.parametrize("is_overlapping", [False, True])
def test_in_an_engine_with_a_crowded_pool(
    is_overlapping: bool, backend: str, path: Path, asks: list[Ask], alone: dict[str, list[int]]
) -> None:
    cache = CacheConfig(block_size=16, num_blocks=23)
    scheduler = SchedulerConfig(max_num_seqs=4, max_chunk_size=64, async_scheduling=is_overlapping)
    options: dict[str, Any] = {}
    if backend == "flashinfer":
        card = replace(create_machine(), create_backend=lambda name, options: RowByRowBackend())
        options = {"backend": "cuda", "dtype": "auto", "machine": card, "num_threads": 1}
    with EngineDriver(path, cache=cache, scheduler=scheduler, **options) as driver:
        tokens = driver.generate([ask.prompt for ask in asks], [ask.params for ask in asks])
    assert driver.num_preemptions > 0
    found = dict(zip(alone, tokens, strict=True))
    check_same(f"engine with overlap {'on' if is_overlapping else 'off'}, crowded pool", alone, found, alone)


def test_drawn_from_the_whole_distribution_beside_others(model: LoadedModel, asks: list[Ask]) -> None:
    """No top-k, no nucleus: a draw may fall among thousands of tokens that are less likely than logits are exact."""
    whole = replace(asks[-1], name="long, whole distribution", params=replace(asks[-1].params, top_k=0))
    alone = SteppedEngine(model, enable_prefix_caching=False).generate([whole])
    found = SteppedEngine(model, enable_prefix_caching=False).generate([*asks[:-1], whole])
    check_same("drawn from the whole distribution, beside three others", alone, found, alone)
