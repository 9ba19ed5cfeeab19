"""What computes a model is settled once, named in full, and never less than what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_core.errors import ConfigError
from engine_core.model.compute import settle_compute
from engine_core.model.fused_decoder import FusedDecoder
from kernels.cpu_threads import usable_threads
from tests.kernels.cpu_machines import ISAS
from tests.kernels.fused_case import create_arch, create_checkpoint

ARCH = create_arch()
ODD = create_arch(head_dim=20)


def create_config(
    *, dtype: str = "auto", quantization: str = "auto", kv_cache_dtype: str = "auto", **device: Any
) -> EngineConfig:
    return EngineConfig(
        ModelConfig(Path("m"), dtype, 128, quantization),
        CacheConfig(kv_cache_dtype=kv_cache_dtype),
        device=DeviceConfig(**device),
    )


def test_the_quickest_kernels_and_all_threads_are_the_default() -> None:
    settled = settle_compute(create_config(), ARCH)
    assert settled.kernels is not None
    assert settled.config.device == DeviceConfig("cpu", usable_threads(), ISAS[0])
    assert settled.config.model.dtype == settled.config.cache.kv_cache_dtype == "bf16"
    assert settled.config.scheduler.enable_cascade_attn


@pytest.mark.parametrize(
    ("isa", "max_num_seqs", "budget"),
    [("generic", 64, 128), ("generic", 200, 400), ("torch", 64, 512), (ISAS[0], 64, 512 if ISAS[0] == "amx" else 128)],
)
def test_a_steps_tokens_are_what_suits_the_kernels_unless_someone_says_so(
    isa: str, max_num_seqs: int, budget: int
) -> None:
    automatic = SchedulerConfig(max_num_batched_tokens=0, max_num_seqs=max_num_seqs)
    config = replace(create_config(cpu_isa=isa), scheduler=automatic)
    assert settle_compute(config, ARCH).config.scheduler.max_num_batched_tokens == budget
    named = replace(config, scheduler=replace(automatic, max_num_batched_tokens=333))
    assert settle_compute(named, ARCH).config.scheduler.max_num_batched_tokens == 333


@pytest.mark.parametrize(
    ("config", "arch"),
    [
        (create_config(cpu_isa="torch"), ARCH),
        (create_config(backend="torch"), ARCH),
        (create_config(dtype="fp32"), ARCH),
        (create_config(), ODD),
    ],
)
def test_what_the_kernels_cannot_do_is_computed_layer_by_layer(config: EngineConfig, arch: Any) -> None:
    config = replace(config, cache=replace(config.cache, block_size=32))
    settled = settle_compute(config, arch)
    assert settled.kernels is None
    assert settled.config.device.cpu_isa == "torch"
    assert settled.config.model.quantization == "none"
    assert settled.config.model.dtype in ("bf16", "fp32")
    assert not settled.config.scheduler.enable_cascade_attn


@pytest.mark.parametrize("config", [create_config(), create_config(cpu_isa="torch"), create_config(num_threads=3)])
def test_settling_twice_changes_nothing(config: EngineConfig) -> None:
    once = settle_compute(config, ARCH).config
    assert settle_compute(once, ARCH).config == once


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (create_config(cpu_isa="torch", quantization="int8"), "quantization int8 needs .* torch was asked for"),
        (create_config(dtype="fp32", quantization="int4"), "quantization int4 needs .* dtype is fp32"),
        (create_config(dtype="fp32", kv_cache_dtype="int8"), "kv_cache_dtype int8 needs .* dtype is fp32"),
        (create_config(dtype="fp32", kv_cache_dtype="bf16"), "kv_cache_dtype bf16 needs"),
    ],
)
def test_what_is_asked_for_is_given_or_refused(config: EngineConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settle_compute(config, ARCH)


def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are() -> None:
    missing = next((isa for isa in ("amx", "avx512", "avx2") if isa not in ISAS), None)
    if missing is None:
        missing = "sse"
    with pytest.raises(ConfigError, match=f"cpu_isa {missing} is not .*generic and torch can be used"):
        settle_compute(create_config(cpu_isa=missing), ARCH)


@pytest.mark.parametrize("is_fused", [True, False])
def test_progress_is_told(is_fused: bool) -> None:
    told: list[tuple[float, str]] = []
    note: Callable[[float, str], None] = lambda share, what: told.append((share, what))  # noqa: E731
    settled = settle_compute(create_config(cpu_isa="auto" if is_fused else "torch"), ARCH)
    model = settled.load(create_checkpoint(ARCH), note)
    assert isinstance(model, FusedDecoder) == is_fused
    assert model.weights_bytes > 0
    assert told[0] == (0.0, "layer 1 of 2") and told[-1] == (1.0, "loaded")
    assert [share for share, _ in told] == sorted(share for share, _ in told)
