"""What computes a model is settled once, named in full, and never less than what was asked for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_core.errors import ConfigError
from engine_core.model.compute import Machine, settle_compute
from engine_core.model.decoder import Decoder
from engine_core.model.fused_decoder import FusedDecoder
from engine_core.survey import CudaCard, CudaSurvey
from kernels.backend import BackendOptions, UnavailableBackendError
from kernels.cpu_threads import usable_threads
from kernels.fused import Storage
from tests.engine_core.cuda_machine import WITH_CARD, create_machine
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
    assert settled.device is None
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


# ---------------------------------------------------------------------- on a card
HEADS_64 = create_arch(head_dim=64)
OPEN = (CacheConfig(block_size=0), SchedulerConfig(max_num_batched_tokens=0, max_num_seqs=0))


def ask_openly(backend: str = "auto", **scheduler: int) -> EngineConfig:
    """As the server asks where nobody has said anything."""
    cache, steps = OPEN
    return EngineConfig(ModelConfig(Path("m"), "auto", 128), cache, replace(steps, **scheduler), DeviceConfig(backend))


def test_auto_is_a_card_where_flashinfer_is_and_takes_what_suits_it() -> None:
    settled = settle_compute(ask_openly(), HEADS_64, create_machine())
    cache, sched = settled.config.cache, settled.config.scheduler
    assert settled.device is settled.backend and settled.config.device.backend == "cuda" and settled.kernels is None
    assert (cache.block_size, sched.max_num_seqs, sched.max_num_batched_tokens) == (16, 256, 8192)
    assert sched.async_scheduling and sched.enable_cascade_attn
    assert settled.config.model.dtype == cache.kv_cache_dtype == "bf16"
    assert settle_compute(settled.config, HEADS_64, create_machine()).config == settled.config


def test_on_a_cpu_what_suits_is_what_it_was() -> None:
    config = settle_compute(ask_openly("torch"), HEADS_64, create_machine()).config
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (64, 64)
    assert config.scheduler.async_scheduling is False


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_few_tokens_a_step_mean_few_requests_where_nobody_says_how_many(backend: str) -> None:
    config = settle_compute(ask_openly(backend, max_num_batched_tokens=16), HEADS_64, create_machine()).config
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (16, 16)


def test_what_is_asked_of_a_card_is_given() -> None:
    asked = replace(ask_openly(max_num_seqs=5000), cache=CacheConfig(block_size=32))
    asked = replace(asked, scheduler=replace(asked.scheduler, async_scheduling=False))
    config = settle_compute(asked, HEADS_64, create_machine()).config
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (32, 5000)
    assert config.scheduler.max_num_batched_tokens == 10_000, "a full batch leaves half of a step to prompts"
    assert config.scheduler.async_scheduling is False


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (create_config(dtype="fp32"), "dtype fp32 is not for backend cuda.* leave --dtype out, or use --backend cpu"),
        (create_config(quantization="int8"), "quantization int8 .*--quantization"),
        (create_config(quantization="int4"), "quantization int4"),
        (create_config(kv_cache_dtype="int8"), "kv_cache_dtype int8 .*--kv-cache-dtype"),
        (create_config(backend="cuda", cpu_isa="avx2"), "cpu_isa avx2 .*--cpu-isa"),
        (replace(create_config(), cache=CacheConfig(block_size=48)), "block_size 48 is not one of the cuda backend's"),
    ],
)
def test_what_a_card_has_no_kernels_for_is_refused_with_what_to_change(config: EngineConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settle_compute(config, HEADS_64, create_machine())


def test_a_model_that_a_card_has_no_kernels_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="heads of 64, 128, 256, and this model's have 20: use --backend cpu"):
        settle_compute(ask_openly(), ODD, create_machine())


def without(**missing: Any) -> CudaSurvey:
    return replace(WITH_CARD, **missing)


@pytest.mark.parametrize(
    ("survey", "told"),
    [
        (without(flashinfer=""), r'pip install "pointsman\[cuda\]"'),
        (without(cards=(), torch_cuda=""), "torch is a build for the CPU"),
        (without(cards=(), driver=""), "there is no NVIDIA driver here"),
        (without(cards=(CudaCard("Tesla T4", (7, 5), 1),)), "compute capability 7.5, and the kernels need 8.0"),
    ],
)
def test_without_what_it_takes_cuda_is_refused_and_auto_is_the_cpu(
    survey: CudaSurvey, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine = replace(Machine(), survey_cuda=lambda: survey)
    with pytest.raises(ConfigError, match=told):
        settle_compute(ask_openly("cuda"), ARCH, machine)
    with caplog.at_level(logging.WARNING):
        config = settle_compute(ask_openly(), ARCH, machine).config
        settle_compute(config, ARCH, machine)
    assert config.device.backend == "cpu"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (1 if survey.driver else 0), "once, and only where there is a card to use"
    card = survey.cards[0].name if survey.cards else "an NVIDIA driver"
    assert all(card in warning and survey.problem in warning for warning in warnings)


@pytest.mark.parametrize("device", [{"cpu_isa": "torch"}, {"backend": "cpu"}, {"backend": "torch"}])
def test_who_asks_for_the_cpu_gets_it_beside_a_card_that_nobody_looks_for(device: dict[str, Any]) -> None:
    def fail() -> CudaSurvey:
        raise AssertionError("nobody asked for a card")

    settled = settle_compute(create_config(**device), ARCH, replace(Machine(), survey_cuda=fail))
    assert settled.device is None and settled.config.device.backend == device.get("backend", "cpu")


def test_a_library_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    def create(name: str, options: BackendOptions) -> Any:
        raise UnavailableBackendError("the cuda backend needs flashinfer, which cannot be imported: no libcuda")

    machine = replace(create_machine(), create_backend=create)
    with pytest.raises(ConfigError, match="no libcuda: use --backend cpu"):
        settle_compute(ask_openly(), HEADS_64, machine)


def test_a_quantised_checkpoint_is_dequantised_for_a_card() -> None:
    arch = create_arch(head_dim=64, hidden_size=128, intermediate_size=160)
    checkpoint = create_checkpoint(arch, storage=Storage.Q4_0)
    settled = settle_compute(ask_openly(), arch, create_machine())
    model = settled.load(checkpoint, lambda share, what: None)
    assert isinstance(model, Decoder) and model.dtype == torch.bfloat16
    num_values = sum(math.prod(shape) for shape in checkpoint.weights.shapes.values() if len(shape) == 2)
    assert arch.tie_word_embeddings
    assert settled.measure(checkpoint).weights_bytes == model.weights_bytes == 2 * num_values, "a tied head once"
