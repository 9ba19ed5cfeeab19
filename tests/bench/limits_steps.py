"""The C++ step on the real model in bf16, timed: no engine, no HTTP, no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine_core import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_core.engine import open_checkpoint
from engine_core.model.compute import settle_compute
from engine_core.model.fused_loader import load_fused
from kernels.cpu_backend import CpuKernels, CpuModel
from kernels.cpu_library import Linear
from kernels.fused import FusedWeights, LinearWeights, ModelSpec
from tests.bench.limits_cases import Case, ModelSize, Span, build_meta
from tests.bench.limits_report import StepTime

Clock = Callable[[], float]

PAGE_SIZE = 64
# Computed before the one that is timed: it finds other cases' data in the caches.
_SETTLE_STEPS = 1


class TimedModel:
    """A model on the C++ kernels, every linear in bf16 whatever the file stores.

    Args:
        path: A checkpoint.
        num_threads: 0 = as many as the engine would take.

    Raises:
        RuntimeError: There are no C++ kernels for it here.
    """

    def __init__(self, path: Path, num_threads: int = 0) -> None:
        checkpoint = open_checkpoint(path)
        config = EngineConfig(
            ModelConfig(path, dtype="bf16", quantization="none"),
            CacheConfig(),
            SchedulerConfig(),
            DeviceConfig("cpu", num_threads),
        )
        compute = settle_compute(config.resolve(trained_model_len=1 << 20), checkpoint.arch)
        if not isinstance(compute.kernels, CpuKernels):
            raise RuntimeError("There are no C++ kernels here: pointsman serve says why, when it starts.")
        weighed = _WeighedKernels(compute.kernels)
        self._decoder = load_fused(
            checkpoint, weighed, quantization="none", kv_dtype="bf16", on_progress=lambda share, detail: None
        )
        self.isa = compute.kernels.isa
        self.num_threads = compute.kernels.num_threads
        self.size = weighed.size()
        self._model = weighed.model

    def time_cases(
        self, cases: Sequence[Case], num_rounds: int, *, clock: Clock, on_round: Callable[[], None]
    ) -> dict[Case, StepTime]:
        """Time the cases in turn, many times over; keep each one's best.

        Args:
            cases: Steps.
            num_rounds: Of all cases.
            clock: Seconds.
            on_round: Called after each.
        """
        runs = {case: _CaseRun(self._decoder, self._model, case, clock) for case in cases}
        for _ in range(num_rounds):
            for run in runs.values():
                run.time_once()
            on_round()
        return {case: run.best for case, run in runs.items()}


class _CaseRun:
    """One case with pages of its own, its context computed."""

    def __init__(self, decoder: Any, model: CpuModel, case: Case, clock: Clock) -> None:
        self.best = StepTime()
        self._decoder = decoder
        self._model = model
        self._pages_per_request = case.pages_per_request(PAGE_SIZE)
        self._clock = clock
        self._vocab_size: int = decoder.arch.vocab_size
        self._kv = decoder.alloc_kv(num_pages=case.num_requests * self._pages_per_request, page_size=PAGE_SIZE)
        for spans in case.fills():
            self._compute(spans)
        self._meta = self._build_meta(case.spans())

    def time_once(self) -> None:
        """Compute the step, and again with the clock running."""
        for _ in range(_SETTLE_STEPS):
            self._run()
        self._model.take_times()
        started = self._clock()
        self._run()
        seconds = self._clock() - started
        phases = self._model.take_times()
        if seconds < self.best.seconds:
            self.best = StepTime(seconds, phases)

    def _compute(self, spans: Sequence[Span]) -> None:
        self._meta = self._build_meta(spans)
        self._run()

    def _build_meta(self, spans: Sequence[Span]) -> Any:
        return build_meta(
            spans, pages_per_request=self._pages_per_request, page_size=PAGE_SIZE, vocab_size=self._vocab_size
        )

    def _run(self) -> None:
        needs_logits = np.zeros(len(self._meta.logit_rows), np.bool_)
        list(self._decoder.compute(self._meta, self._kv, needs_logits=needs_logits, num_token_ids=self._vocab_size))


class _WeighedKernels:
    """FusedKernels that note what is packed, and keep what is built."""

    model: CpuModel

    def __init__(self, kernels: CpuKernels) -> None:
        self.isa = kernels.isa
        self.num_threads = kernels.num_threads
        self._kernels = kernels
        self._linears: list[Linear] = []
        self._num_head_params = 0

    def pack(self, weights: LinearWeights) -> Linear:
        linear = self._kernels.pack(weights)
        self._linears.append(linear)
        return linear

    def build(self, spec: ModelSpec, weights: FusedWeights, *, kv_dtype: str) -> CpuModel:
        self._num_head_params = spec.hidden_size * spec.vocab_size
        self.model = self._kernels.build(spec, weights, kv_dtype=kv_dtype)
        return self.model

    def size(self) -> ModelSize:
        num_params = sum(linear.num_inputs * linear.num_outputs for linear in self._linears)
        num_bytes = sum(linear.num_bytes for linear in self._linears)
        return ModelSize(num_bytes, num_params - self._num_head_params, self._num_head_params)
