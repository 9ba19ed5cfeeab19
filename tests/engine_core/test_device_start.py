"""The engine on a card, on FlashInfer's and CUDA's stand-ins: what it starts with, what it says, what it computes."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from engine_core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_core.engine import Engine
from engine_core.messages import EngineCoreOutputs, EngineCoreRequest, EnginePhase, EngineState
from engine_core.model.checkpoint import Checkpoint
from engine_core.model.compute import Machine
from engine_core.sampling_params import SamplingParams
from tests.engine_core.cuda_machine import create_accelerator, create_machine
from tests.helpers import greedy
from tests.kernels.fused_case import create_arch, create_checkpoint

ARCH = create_arch(head_dim=64, max_position_embeddings=512)
SCHEDULER = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, async_scheduling=None)


def create_config(backend: str, *, scheduler: SchedulerConfig = SCHEDULER, enforce_eager: bool = False) -> EngineConfig:
    cache = CacheConfig(block_size=16, num_blocks=40)
    return EngineConfig(
        ModelConfig(Path("random"), "bf16"), cache, scheduler, DeviceConfig(backend, enforce_eager=enforce_eager)
    )


class Run:
    """An engine from its start to its end."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, machine: Machine) -> None:
        self.states: list[EngineState] = []
        self._outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
        self._settled = threading.Event()
        self.engine = Engine(config, checkpoint, publish=self._outputs.put, on_state=self._note, machine=machine)
        self.engine.start()
        assert self._settled.wait(60), "the engine did not load"

    def _note(self, state: EngineState) -> None:
        self.states.append(state)
        if state.phase is not EnginePhase.LOADING:
            self._settled.set()

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        assert self.engine.state.phase is EnginePhase.READY, self.engine.state.detail
        found: list[list[int]] = [[] for _ in prompts]
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            self.engine.add_request(EngineCoreRequest(str(i), prompt, each, arrival_time=0.0))
        ended = 0
        while ended < len(prompts):
            outputs = self._outputs.get(timeout=60)
            assert outputs.engine_error is None, outputs.engine_error
            for output in outputs.as_records():
                assert output.error is None, output.error
                found[int(output.request_id)] += output.new_token_ids
                ended += output.finish_reason is not None
        return found


PROMPTS = [[(7 * i + 3 * j * j + 1) % ARCH.vocab_size for j in range(5 + 17 * i)] for i in range(6)]


def test_flashinfer_gives_the_tokens_of_the_reference() -> None:
    params = [greedy(12), *(greedy(12, temperature=0.8, seed=i, top_p=0.9) for i in range(1, 6))]
    checkpoint = create_checkpoint(ARCH)
    found = []
    for backend in ("torch", "cuda"):
        machine = create_machine() if backend == "cuda" else Machine()
        run = Run(create_config(backend), checkpoint, machine)
        found.append(run.generate(PROMPTS, params))
        assert run.engine.shutdown(60)
    assert found[0] == found[1]
