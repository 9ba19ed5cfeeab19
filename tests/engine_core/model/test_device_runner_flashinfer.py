"""The device's runner over FlashInfer's stand-in: shared prefixes in graphs, next to rows that need the host."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine_core.model.device_runner import build_device_runner
from engine_core.model.loader import load_decoder
from engine_core.model.runner import ModelRunner
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from engine_core.step_executor import OverlappedExecutor
from kernels.testing.fake_cuda import FakeAccelerator
from kernels.torch_backend import TorchBackend
from tests.engine_core.model.device_steps import Asked, Engine
from tests.kernels.flashinfer_machine import create_backend
from tests.kernels.fused_case import create_arch, create_checkpoint

ARCH = create_arch(head_dim=64, vocab_size=97, qk_norm=True, tie_word_embeddings=False)
CHECKPOINT = create_checkpoint(ARCH)
MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 320, 16, 60


def prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 90), k=num_tokens)


def find_worst_gap(asked: list[int], found: list[int]) -> float:
    """Return how far below the likeliest token, in log probability, any of those found is to the reference."""
    decoder = load_decoder(CHECKPOINT, TorchBackend(), torch.float32, lambda share, what: None)
    kv = decoder.alloc_kv(num_pages=NUM_BLOCKS, page_size=BLOCK_SIZE)
    tokens = [*asked, *found]
    params = SamplingParams(max_tokens=1, num_prompt_logprobs=1)
    blocks = list(range(1, 2 + len(tokens) // BLOCK_SIZE))
    entering = NewRequestData("0", tokens, len(tokens), params, blocks, 0)
    step = SchedulerOutput(1, ["0"], [len(tokens)], [0], {}, [entering], total_num_scheduled_tokens=len(tokens))
    result = ModelRunner(decoder=decoder, kv=kv, max_model_len=MAX_MODEL_LEN).execute(step)
    return max(each.top_logprobs[0] - each.logprob for each in result.prompt_logprobs["0"][-len(found) :])


def test_flashinfer_gives_the_references_tokens_in_either_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = create_backend()
    accelerator = backend.accelerator
    assert isinstance(accelerator, FakeAccelerator)
    monkeypatch.setattr(backend, "graph_sizes", lambda max_num_reqs: (1, 9))
    decoder = load_decoder(CHECKPOINT, backend, torch.bfloat16, lambda share, what: None)
    runner = build_device_runner(
        decoder=decoder,
        kv=decoder.alloc_kv(num_pages=NUM_BLOCKS + 1, page_size=BLOCK_SIZE),
        backend=backend,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=9,
        max_num_batched_tokens=512,
    )
    head = prompt(260, 1)
    asked = [Asked([*head, *prompt(3 + n, n)], {"max_tokens": 6}, arrives=2 * (n > 0)) for n in range(8)]
    asked.append(Asked([*head, 5], {"max_tokens": 2, "num_logprobs": 1}, arrives=4))
    engine = Engine(
        OverlappedExecutor(runner),
        depth=2,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=512,
        max_num_seqs=9,
        enable_cascade_attn=True,
    )
    accelerator.log.clear()
    got = engine.run(asked)
    accelerator.synchronize()
    assert [len(each.token_ids) for each in got.values()] == [6] * 8 + [2]
    for index in (0, 4, 8):
        gap = find_worst_gap(list(asked[index].prompt), got[str(index)].token_ids)
        assert gap < 0.05, "bf16 rounds in another order; a token that is as good as equal may win"
    assert accelerator.count("replay") > 8
    assert len({tuple(each.token_ids) for each in got.values()}) > 4
    assert np.isclose(got["8"].logprobs[0].logprob, got["8"].logprobs[0].top_logprobs[0])
