"""Drives runners through a scheduler, and tells what each request got: of the device's runner and of the plain one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_core.core import EngineCore
from engine_core.messages import EngineCoreOutput, EngineCoreOutputs, TokenLogprobs
from engine_core.model.decoder import Decoder
from engine_core.model.device_runner import DeviceRunner, build_device_runner
from engine_core.model.loader import load_decoder
from engine_core.model.runner import ModelRunner
from engine_core.step_executor import DirectExecutor, OverlappedExecutor, StepExecutor
from kernels.testing.fake_cuda import FakeAccelerator
from tests.engine_core.scheduler.scheduler_helpers import create_request, create_scheduler
from tests.kernels.fused_case import create_arch, create_checkpoint
from tests.kernels.torch_device_backend import TorchDeviceBackend

MAX_MODEL_LEN = 96
BLOCK_SIZE = 4
NUM_BLOCKS = 64
# Untied: a head that is the embedding would give each token back.
ARCH = create_arch(vocab_size=97, hidden_size=48, intermediate_size=80, qk_norm=True, tie_word_embeddings=False)
CHECKPOINT = create_checkpoint(ARCH)
_SCHEDULER = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "num_blocks": NUM_BLOCKS,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}


@dataclass
class Got:
    """What a request got."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: Any = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Asked:
    """A request: when it comes (before which step), its prompt, its parameters, and when it is aborted."""

    prompt: Sequence[int]
    params: dict[str, Any]
    arrives: int = 0
    aborted: int | None = None


@dataclass
class Machine:
    """A device, a backend for it, and a model. Graphs are captured once: runners go from one test to the next."""

    accelerator: FakeAccelerator
    backend: TorchDeviceBackend
    decoder: Decoder
    _runners: dict[bool, DeviceRunner] = field(default_factory=dict)

    def device_runner(self, *, enforce_eager: bool = False) -> DeviceRunner:
        if enforce_eager not in self._runners:
            self._runners[enforce_eager] = self.new_runner(enforce_eager=enforce_eager)
        return self._runners[enforce_eager]

    def new_runner(self, *, max_num_seqs: int = 8, **options: Any) -> DeviceRunner:
        return build_device_runner(
            decoder=self.decoder,
            kv=self.decoder.alloc_kv(num_pages=NUM_BLOCKS + 1, page_size=BLOCK_SIZE),
            backend=self.backend,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            **options,
        )

    def plain_runner(self, *, num_token_ids: int | None = None) -> ModelRunner:
        kv = self.decoder.alloc_kv(num_pages=NUM_BLOCKS + 1, page_size=BLOCK_SIZE)
        return ModelRunner(decoder=self.decoder, kv=kv, max_model_len=MAX_MODEL_LEN, num_token_ids=num_token_ids)


def build_machine(**backend_options: Any) -> Machine:
    """Load a model with random weights onto a device."""
    accelerator = FakeAccelerator()
    backend = TorchDeviceBackend(accelerator, **backend_options)
    return Machine(accelerator, backend, load_decoder(CHECKPOINT, backend, torch.float32, lambda share, what: None))


class Engine:
    """A core over an executor, stepped by hand."""

    def __init__(self, executor: StepExecutor, *, depth: int, **config: Any) -> None:
        self.scheduler = create_scheduler(max_steps_in_flight=depth, **{**_SCHEDULER, **config})
        self.core = EngineCore(scheduler=self.scheduler, executor=executor, publish=self._take)
        self.got: dict[str, Got] = {}
        self.num_preempted = 0

    def run(self, asked: Sequence[Asked]) -> dict[str, Got]:
        """Step until all have ended."""
        step = 0
        while step <= max(each.arrives for each in asked) or self.core._has_work():
            for index, each in enumerate(asked):
                if each.arrives == step:
                    self.got[str(index)] = Got()
                    params = {"max_tokens": 12, "temperature": 0.0, **each.params}
                    self.core.add_request(create_request(str(index), each.prompt, **params))
                if each.aborted == step:
                    self.core.abort_requests((str(index),))
            self.core._drain_input(block=False)
            if self.core._has_work():
                self.core.step()
            step += 1
            assert step < 1000
        self.scheduler.check_invariants()
        return self.got

    def _take(self, outputs: EngineCoreOutputs) -> None:
        assert outputs.stats is not None
        self.num_preempted += outputs.stats.num_preempted
        for request_id, token_id in zip(outputs.token_req_ids, outputs.token_ids, strict=True):
            self.got[request_id].token_ids.append(token_id)
        for output in outputs.outputs:
            self._take_record(self.got[output.request_id], output)

    def _take_record(self, got: Got, output: EngineCoreOutput) -> None:
        got.token_ids += output.new_token_ids
        got.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert got.prompt_logprobs is None
            got.prompt_logprobs = output.prompt_logprobs
        got.finish_reason = output.finish_reason or got.finish_reason
        got.error = output.error or got.error


def run_plain(machine: Machine, asked: Sequence[Asked], **config: Any) -> dict[str, Got]:
    """Run requests one step after the other, over the plain runner."""
    return Engine(DirectExecutor(machine.plain_runner()), depth=1, **config).run(asked)


def run_device(
    machine: Machine, asked: Sequence[Asked], *, enforce_eager: bool = False, depth: int = 2, **config: Any
) -> Engine:
    """Run requests over the device's runner, two steps in flight."""
    executor = OverlappedExecutor(machine.device_runner(enforce_eager=enforce_eager))
    engine = Engine(executor, depth=depth, **config)
    engine.run(asked)
    machine.accelerator.synchronize()
    return engine
