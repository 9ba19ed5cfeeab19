"""The C++ kernels in a whole engine: a request's tokens are the same whoever runs beside it, in every precision."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine_core import CacheConfig, SchedulerConfig
from tests.engine_core import model_checkpoints
from tests.engine_core.model_checkpoints import VOCAB_SIZE, save_checkpoint
from tests.helpers import EngineDriver, greedy

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model_checkpoints.SHAPE, "max_position_embeddings", 1024)
        save_checkpoint(directory, "qwen3")  # heads of 32, the least that the kernels take
    return directory


def create_prompts() -> list[list[int]]:
    """Of all lengths; the last eight begin alike, over more than the 512 positions that are attended to at once."""
    chance = random.Random(5)

    def tokens(num: int) -> list[int]:
        return chance.choices(range(3, VOCAB_SIZE - 3), k=num)

    shared = tokens(530)
    return [tokens(num) for num in (1, 2, 17, 31, 32, 33, 130, 300)] + [shared + tokens(num) for num in range(1, 9)]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_neighbours_chunks_shared_prefixes_and_preemptions_change_no_token(checkpoint: Path, quantization: str) -> None:
    prompts = create_prompts()

    def answers(num_blocks: int, max_num_batched_tokens: int, batches: list[list[list[int]]]) -> list[list[int]]:
        cache = CacheConfig(block_size=32, num_blocks=num_blocks)
        scheduler = SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens)
        options = {"dtype": "bf16", "backend": "cpu", "quantization": quantization}
        with EngineDriver(checkpoint, cache=cache, scheduler=scheduler, **options) as driver:  # type: ignore[arg-type]
            found = [answer for batch in batches for answer in driver.generate(batch, greedy(NUM_TOKENS))]
            preemptions.append(driver.num_preemptions)
        return found

    preemptions: list[int] = []
    alone = answers(512, 1024, [[prompt] for prompt in prompts])
    together = answers(512, 1024, [prompts])
    squeezed = answers(24, 70, [prompts])
    assert len({tuple(answer) for answer in alone}) > len(alone) // 2, "the model does not say the same to everybody"
    assert together == alone
    assert squeezed == alone
    assert preemptions[-1] > 0
