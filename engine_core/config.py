"""EngineConfig: frozen, checked once, read by everyone and written by nobody.

What depends on the model is settled by ``resolve()``, what depends on the device by engine_core.model.compute: each
returns a new object. Until then None, 0 or auto stand for what suits. The defaults are a CPU's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine_core.errors import ConfigError

POLICIES = ("fcfs", "priority")
PRIORITY_ORDERS = ("higher-first", "lower-first")
DTYPES = ("auto", "bf16", "fp32")
QUANTIZATIONS = ("auto", "none", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "bf16", "int8")
# kernels.cpu_library.ISAS, which would cost an import of torch; a test compares the two.
CPU_ISAS = ("auto", "amx", "avx512", "avx512_vnni", "avx2", "generic", "torch")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is computed.

    Attributes:
        path: A checkpoint directory or a .gguf file.
        dtype: auto, bf16 or fp32: what weights and KV are computed in.
        max_model_len: Context in tokens; None = what the model was trained for.
        quantization: Of the linears. auto: as the checkpoint stores them, none: dequantised to ``dtype``, or int8 or
            int4.
    """

    path: Path
    dtype: str = "auto"
    max_model_len: int | None = None
    quantization: str = "auto"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: Tokens a KV block; 0 = what suits the device.
        num_blocks: Usable KV blocks; None = from ``kv_cache_bytes``, or from what is free after loading.
        kv_cache_bytes: Memory for KV blocks; None = from what is free.
        gpu_memory_utilization: Share of a card's memory that may be taken, by weights, steps and KV together, 0..1.
        enable_prefix_caching: Reuse the KV of equal prompt prefixes.
        watermark: Share of the blocks that admission leaves free while anything runs, 0..1.
        kv_cache_dtype: auto, bf16 or int8; auto = the model's dtype.
    """

    block_size: int = 64
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold.

    Attributes:
        max_num_batched_tokens: Tokens a step at most, prompt and output together; 0 = what suits the kernels.
        max_num_seqs: Requests running at once at most; 0 = what suits the device.
        max_chunk_size: Tokens of one request a step at most; 0 = no limit of its own.
        long_prefill_token_threshold: A second such limit; 0 = off.
        enable_chunked_prefill: Off: a prompt is computed in one step or not yet.
        policy: fcfs, or priority: the more urgent first, and a waiting request may take the place of a less urgent one.
        priority_order: higher-first or lower-first: which end of the numbers is urgent.
        delay_factor: A new request waits this many times the last prompt step's duration while others run; 0 = off.
        target_itl_ms: Prompts get no more of a step than keeps the gap between a running stream's tokens at so many
            milliseconds, as measured while serving; 0 = off.
        async_scheduling: Schedule the next step while this one executes; None = where a card computes. On a CPU the
            model and the scheduler share the cores: running ahead gains nothing there, and a new request waits for one
            more step.
        enable_cascade_attn: Count the leading KV blocks that all rows of a step share, for kernels that read them once.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_chunk_size: int = 0
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    priority_order: str = "higher-first"
    delay_factor: float = 0.0
    target_itl_ms: float = 0.0
    async_scheduling: bool | None = None
    enable_cascade_attn: bool = False


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """What computes.

    Attributes:
        backend: A name of kernels.backend.backend_names(), or auto: cuda where there is a card and flashinfer, else
            cpu.
        num_threads: Compute threads; 0 = as many as affinity and cgroup allow.
        cpu_isa: The cpu backend's instruction set, or torch; auto = the quickest that runs here.
        cache_dir: Where kernels are built; None = the user's cache.
        enforce_eager: No CUDA graphs: each step of a card's is queued kernel by kernel.
    """

    backend: str = "auto"
    num_threads: int = 0
    cpu_isa: str = "auto"
    cache_dir: Path | None = None
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that the engine is told."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def check(self) -> None:
        """Raise ConfigError where fields contradict each other (scheduler.md B9)."""
        self._check_scheduling()
        sched, cache = self.scheduler, self.cache
        if sched.max_num_seqs < 0:
            raise ConfigError(f"max_num_seqs must be at least 1, or 0 for what suits, not {sched.max_num_seqs}")
        if 0 < sched.max_num_batched_tokens < sched.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({sched.max_num_batched_tokens}) is below "
                f"max_num_seqs ({sched.max_num_seqs}): a full batch of one token each would not fit; "
                "raise the first or lower the second"
            )
        if cache.block_size < 0:
            raise ConfigError(f"block_size must be at least 1, or 0 for what suits, not {cache.block_size}")
        if cache.num_blocks is not None and cache.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {cache.num_blocks}")
        if not 0.0 <= cache.watermark < 1.0:
            raise ConfigError(f"watermark must lie in [0, 1), not {cache.watermark}")
        if not 0.0 < cache.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must lie in (0, 1], not {cache.gpu_memory_utilization}")
        self._check_compute()

    def _check_compute(self) -> None:
        for name, value, known in (
            ("dtype", self.model.dtype, DTYPES),
            ("quantization", self.model.quantization, QUANTIZATIONS),
            ("kv_cache_dtype", self.cache.kv_cache_dtype, KV_CACHE_DTYPES),
            ("cpu_isa", self.device.cpu_isa, CPU_ISAS),
        ):
            if value not in known:
                raise ConfigError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, not {value!r}")
        if self.device.num_threads < 0:
            raise ConfigError(f"num_threads must be at least 0, not {self.device.num_threads}")

    def _check_scheduling(self) -> None:
        sched = self.scheduler
        self._check_target_itl()
        if sched.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {sched.policy!r}")
        if sched.priority_order not in PRIORITY_ORDERS:
            raise ConfigError(
                f"priority_order must be one of {', '.join(PRIORITY_ORDERS)}, not {sched.priority_order!r}"
            )
        if sched.policy == "fcfs" and sched.priority_order != PRIORITY_ORDERS[0]:
            raise ConfigError(
                f"priority_order {sched.priority_order} has no effect under fcfs: it needs scheduling policy priority"
            )
        for name in ("max_chunk_size", "long_prefill_token_threshold"):
            if getattr(sched, name) and not sched.enable_chunked_prefill:
                raise ConfigError(
                    f"{name} ({getattr(sched, name)}) limits chunks, but enable_chunked_prefill is off: drop either"
                )
        if not (math.isfinite(sched.delay_factor) and sched.delay_factor >= 0.0):
            raise ConfigError(f"delay_factor must be a number of at least 0, not {sched.delay_factor}")

    def _check_target_itl(self) -> None:
        sched = self.scheduler
        if not (math.isfinite(sched.target_itl_ms) and sched.target_itl_ms >= 0.0):
            raise ConfigError(f"target_itl_ms must be a number of at least 0, not {sched.target_itl_ms}")
        if sched.target_itl_ms and not sched.enable_chunked_prefill:
            raise ConfigError(
                f"target_itl_ms ({sched.target_itl_ms:g}) cuts prompts, but enable_chunked_prefill is off: drop either"
            )

    def resolve(self, *, trained_model_len: int) -> EngineConfig:
        """Return a new config with the context length settled, and check it against the rest.

        Args:
            trained_model_len: The context the checkpoint was made for, in tokens.

        Raises:
            ConfigError: Fields contradict each other.
        """
        self.check()
        asked = self.model.max_model_len
        max_model_len = trained_model_len if asked is None else asked
        if max_model_len < 2:
            raise ConfigError(f"max_model_len must hold a prompt token and an answer, at least 2, not {max_model_len}")
        if max_model_len > trained_model_len:
            raise ConfigError(
                f"max_model_len ({max_model_len}) is above the {trained_model_len} positions the model was made for"
            )
        sched = self.scheduler
        budget = sched.max_num_batched_tokens
        if not sched.enable_chunked_prefill and 0 < budget < max_model_len:
            raise ConfigError(
                f"with enable_chunked_prefill off, max_num_batched_tokens ({budget}) must reach "
                f"max_model_len ({max_model_len}), or the longest prompt could never be computed"
            )
        if sched.long_prefill_token_threshold > max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold ({sched.long_prefill_token_threshold}) is above "
                f"max_model_len ({max_model_len})"
            )
        return replace(
            self,
            model=replace(self.model, max_model_len=max_model_len),
            scheduler=replace(
                sched,
                max_num_batched_tokens=budget if budget or sched.enable_chunked_prefill else max_model_len,
            ),
        )
