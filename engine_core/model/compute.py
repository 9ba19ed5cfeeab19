"""What computes a model, and in which numbers: settled once, before anything is loaded, from config and checkpoint.

Whole-step kernels where the backend has them for the model, else layer by layer. Asking for more than that is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from engine_core.config import DeviceConfig, EngineConfig, SchedulerConfig
from engine_core.errors import ConfigError
from engine_core.model.arch import ArchSpec, attn_specs
from engine_core.model.checkpoint import Checkpoint
from engine_core.model.decoder import LanguageModel
from engine_core.model.fused_loader import load_fused, measure_fused, model_spec
from engine_core.model.loader import load_decoder, measure_decoder
from engine_core.survey import CudaSurvey, survey_cuda
from kernels.backend import (
    Backend,
    BackendOptions,
    DeviceBackend,
    NoKernelsError,
    NotFusableError,
    UnavailableBackendError,
    UnsupportedModelError,
    UnusableIsaError,
    create_backend,
)
from kernels.cpu_threads import usable_threads
from kernels.fused import FusedKernels

logger = logging.getLogger(__name__)

# As many tokens as make a step wait for multiplying, not for reading the weights. A longer step gains nothing, and all
# wait for it: on 2 cores with AVX-512, for 8 streams of 256 + 128 tokens, steps of 512, 256 and 128 give 338, 342 and
# 352 tokens a second, and first tokens after 706, 510 and 340 ms. AMX multiplies ten times faster.
_STEP_TOKENS = 128
_AMX_STEP_TOKENS = 512
_LAYER_BY_LAYER_STEP_TOKENS = 512  # each step calls torch some 500 times
_CUDA_STEP_TOKENS = 8192

_CPU_BLOCK_SIZE, _CUDA_BLOCK_SIZE = 64, 16
_CPU_NUM_SEQS, _CUDA_NUM_SEQS = 64, 256

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model would take, once loaded.

    Attributes:
        weights_bytes: Its weights.
        block_bytes: One KV block over all layers.
    """

    weights_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What is asked of the machine. Tests give another one.

    Attributes:
        survey_cuda: Looks for cards.
        create_backend: By name.
    """

    survey_cuda: Callable[[], CudaSurvey] = survey_cuda
    create_backend: Callable[[str, BackendOptions], Backend] = create_backend


THIS_MACHINE = Machine()


@dataclass(frozen=True, slots=True)
class Compute:
    """What was settled on.

    Attributes:
        config: With backend, dtypes, instruction set and threads named; settling it again gives the same.
        backend: What computes.
        kernels: For whole steps; None = layer by layer.
        reason: Why layer by layer, as the end of a sentence; empty where that is how it should be.
        device: The backend again, where it computes on a card.
    """

    config: EngineConfig
    backend: Backend
    kernels: FusedKernels | None
    reason: str = ""
    device: DeviceBackend | None = None

    def load(self, checkpoint: Checkpoint, on_progress: Callable[[float, str], None]) -> LanguageModel:
        """Load the weights; call it on the thread that will run the model.

        Raises:
            CheckpointError: A tensor's bytes cannot be read.
        """
        # Torch's own threads would spin beside the kernels'.
        torch.set_num_threads(1 if self.kernels else self.config.device.num_threads)
        if self.kernels is None:
            return load_decoder(checkpoint, self.backend, _DTYPES[self.config.model.dtype], on_progress)
        return load_fused(
            checkpoint,
            self.kernels,
            quantization=self.config.model.quantization,
            kv_dtype=self.config.cache.kv_cache_dtype,
            on_progress=on_progress,
        )

    def measure(self, checkpoint: Checkpoint) -> ModelSizes:
        """Return what load() would take, from the checkpoint's headers alone."""
        arch, cache, dtype = checkpoint.arch, self.config.cache, _DTYPES[self.config.model.dtype]
        if self.kernels is None:
            weights_bytes = measure_decoder(checkpoint, self.backend, dtype)
            page_bytes = self.backend.kv_page_bytes(attn_specs(arch), page_size=cache.block_size, dtype=dtype)
        else:
            weights_bytes = measure_fused(checkpoint, self.kernels, quantization=self.config.model.quantization)
            page_bytes = self.kernels.kv_page_bytes(
                model_spec(arch), page_size=cache.block_size, kv_dtype=cache.kv_cache_dtype
            )
        return ModelSizes(weights_bytes, page_bytes)


def settle_compute(config: EngineConfig, arch: ArchSpec, machine: Machine = THIS_MACHINE) -> Compute:
    """Settle what computes a model.

    Args:
        config: Checked.
        arch: Of the checkpoint.
        machine: What to compute on.

    Raises:
        ConfigError: It asks for what this machine, build or model cannot do.
    """
    name = _choose_backend(config.device, machine)
    config = _with_defaults(replace(config, device=replace(config.device, backend=name)))
    if name == "cuda":
        return _settle_cuda(config, arch, machine)
    backend = _create_backend(config, machine)
    _check_block_size(config.cache.block_size, backend)
    try:
        kernels = _fuse(config, arch, backend)
    except NotFusableError as error:
        if not isinstance(error, NoKernelsError):
            logger.info("Torch computes this model, layer by layer: %s", error)
        return Compute(_layer_by_layer(config, backend, str(error)), backend, None, str(error))
    return Compute(_fused(config, kernels), backend, kernels)


def _choose_backend(device: DeviceConfig, machine: Machine) -> str:
    """Return the backend's name, with the sentence that says what to change where it is not to be had."""
    if device.backend not in ("auto", "cuda"):
        return device.backend
    if device.backend == "auto" and device.cpu_isa != "auto":
        return "cpu"
    found = machine.survey_cuda()
    if not found.problem:
        return "cuda"
    if device.backend == "cuda":
        found.demand()
    if found.cards or found.driver:
        # Told once: from here on the config says cpu.
        card = f"a {found.cards[0].name}" if found.cards else "an NVIDIA driver"
        logger.warning("The CPU computes, although there is %s: %s", card, found.problem)
    return "cpu"


def _with_defaults(config: EngineConfig) -> EngineConfig:
    """Settle what nobody asked for and depends on the device alone."""
    is_cuda, cache, sched = config.device.backend == "cuda", config.cache, config.scheduler
    max_num_seqs = _CUDA_NUM_SEQS if is_cuda else _CPU_NUM_SEQS
    if sched.max_num_batched_tokens:
        max_num_seqs = min(max_num_seqs, sched.max_num_batched_tokens)
    return replace(
        config,
        cache=replace(cache, block_size=cache.block_size or (_CUDA_BLOCK_SIZE if is_cuda else _CPU_BLOCK_SIZE)),
        scheduler=replace(
            sched,
            max_num_seqs=sched.max_num_seqs or max_num_seqs,
            async_scheduling=is_cuda if sched.async_scheduling is None else sched.async_scheduling,
        ),
    )


def _create_backend(config: EngineConfig, machine: Machine) -> Backend:
    device = config.device
    options = BackendOptions(device.cpu_isa, device.num_threads, device.cache_dir)
    try:
        return machine.create_backend(device.backend, options)
    except UnusableIsaError as error:
        raise ConfigError(f"cpu_isa {error}") from error
    except UnavailableBackendError as error:
        raise ConfigError(f"{error}: use --backend cpu") from error


def _settle_cuda(config: EngineConfig, arch: ArchSpec, machine: Machine) -> Compute:
    _refuse_on_cuda(config)
    backend = cast(DeviceBackend, _create_backend(config, machine))
    _check_block_size(config.cache.block_size, backend)
    try:
        backend.check(attn_specs(arch), torch.bfloat16)
    except UnsupportedModelError as error:
        raise ConfigError(f"{error}: use --backend cpu for this model") from error
    settled = replace(
        config,
        # A quantised GGUF is dequantised: there is no kernel here that reads its blocks.
        model=replace(config.model, dtype="bf16", quantization="none"),
        cache=replace(config.cache, kv_cache_dtype="bf16"),
        scheduler=replace(_with_budget(config.scheduler, _CUDA_STEP_TOKENS), enable_cascade_attn=True),
        device=replace(config.device, num_threads=config.device.num_threads or usable_threads()),
    )
    return Compute(settled, backend, None, device=backend)


def _refuse_on_cuda(config: EngineConfig) -> None:
    model, cache = config.model, config.cache
    for name, value, known in (
        ("dtype", model.dtype, ("auto", "bf16")),
        ("quantization", model.quantization, ("auto", "none")),
        ("kv_cache_dtype", cache.kv_cache_dtype, ("auto", "bf16")),
        ("cpu_isa", config.device.cpu_isa, ("auto",)),
    ):
        if value not in known:
            raise ConfigError(
                f"{name} {value} is not for backend cuda, which takes {' or '.join(known)} and computes in bf16: "
                f"leave --{name.replace('_', '-')} out, or use --backend cpu"
            )


def _fuse(config: EngineConfig, arch: ArchSpec, backend: Backend) -> FusedKernels:
    kernels = backend.fuse(model_spec(arch))
    if config.model.dtype == "fp32":
        raise NotFusableError("they compute in bf16, and dtype is fp32")
    return kernels


def _fused(config: EngineConfig, kernels: FusedKernels) -> EngineConfig:
    kv_dtype = config.cache.kv_cache_dtype
    step_tokens = _AMX_STEP_TOKENS if kernels.isa == "amx" else _STEP_TOKENS
    return replace(
        config,
        model=replace(config.model, dtype="bf16"),
        cache=replace(config.cache, kv_cache_dtype="bf16" if kv_dtype == "auto" else kv_dtype),
        # These kernels read what all rows share once.
        scheduler=replace(_with_budget(config.scheduler, step_tokens), enable_cascade_attn=True),
        device=replace(config.device, cpu_isa=kernels.isa, num_threads=kernels.num_threads),
    )


def _layer_by_layer(config: EngineConfig, backend: Backend, reason: str) -> EngineConfig:
    dtype = config.model.dtype if config.model.dtype != "auto" else _NAMES[backend.default_dtype]
    if config.model.quantization not in ("auto", "none"):
        raise ConfigError(f"quantization {config.model.quantization} needs the cpu backend's C++ kernels, but {reason}")
    if config.cache.kv_cache_dtype not in ("auto", dtype):
        raise ConfigError(
            f"kv_cache_dtype {config.cache.kv_cache_dtype} needs the cpu backend's C++ kernels, but {reason}"
        )
    return replace(
        config,
        model=replace(config.model, dtype=dtype, quantization="none"),
        cache=replace(config.cache, kv_cache_dtype="auto"),
        scheduler=_with_budget(config.scheduler, _LAYER_BY_LAYER_STEP_TOKENS),
        device=replace(config.device, cpu_isa="torch", num_threads=config.device.num_threads or usable_threads()),
    )


def _with_budget(scheduler: SchedulerConfig, step_tokens: int) -> SchedulerConfig:
    """Settle a step's tokens where nobody did. A full batch of streams leaves half of them to prompts."""
    budget = scheduler.max_num_batched_tokens or max(step_tokens, 2 * scheduler.max_num_seqs)
    return replace(scheduler, max_num_batched_tokens=budget)


def _check_block_size(block_size: int, backend: Backend) -> None:
    if block_size not in backend.page_sizes:
        sizes = ", ".join(map(str, backend.page_sizes))
        raise ConfigError(f"block_size {block_size} is not one of the {backend.name} backend's: {sizes}")
