"""What is foretold is what comes: every form of weights and KV cache, measured from headers and then really loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_core import EngineState
from engine_core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_core.engine import Checkpoint, Forecast, forecast, imagine_checkpoint, open_checkpoint
from engine_core.model.compute import settle_compute
from kernels.fused import Storage
from tests.engine_core.model_checkpoints import save_checkpoint
from tests.helpers import EngineDriver
from tests.kernels.fused_case import create_arch, create_checkpoint

GIB = 2**30
ARCH = create_arch()
BIASED = create_arch(qkv_bias=True, o_bias=True, mlp_bias=True, tie_word_embeddings=False, qk_norm=True)


def create_config(
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    cache: dict[str, Any] | None = None,
    **device: Any,
) -> EngineConfig:
    return EngineConfig(
        ModelConfig(Path("m"), dtype, 128, quantization),
        CacheConfig(kv_cache_dtype=kv_cache_dtype, **(cache or {})),
        SchedulerConfig(max_num_seqs=4),
        DeviceConfig(**device),
    )


def check_sizes(config: EngineConfig, checkpoint: Checkpoint) -> None:
    compute = settle_compute(config, checkpoint.arch)
    sizes = compute.measure(checkpoint)
    model = compute.load(checkpoint, lambda share, what: None)
    assert sizes.weights_bytes == model.weights_bytes > 0
    assert sizes.block_bytes == model.kv_page_bytes(config.cache.block_size)
    kv = model.alloc_kv(num_pages=2, page_size=config.cache.block_size)
    assert kv.page_bytes == sizes.block_bytes


@pytest.mark.parametrize("quantization", ["auto", "none", "int8", "int4"])
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("arch", [ARCH, BIASED], ids=["tied", "biased"])
def test_plain_weights(arch: Any, quantization: str, kv_cache_dtype: str) -> None:
    config = create_config(quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    check_sizes(config, create_checkpoint(arch))


@pytest.mark.parametrize("quantization", ["auto", "none", "int8", "int4"])
@pytest.mark.parametrize(
    "storage",
    [Storage.Q4_0, Storage.Q8_0, (Storage.Q4_1, Storage.Q8_0, Storage.Q5_0)],
    ids=["Q4_0", "Q8_0", "mixed"],
)
def test_stored_blocks(storage: Storage | Sequence[Storage], quantization: str) -> None:
    arch = create_arch(hidden_size=128, intermediate_size=160)
    check_sizes(create_config(quantization=quantization), create_checkpoint(arch, storage=storage))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", [ARCH, BIASED], ids=["tied", "biased"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_layer_by_layer(arch: Any, dtype: str, backend: str) -> None:
    config = create_config(dtype=dtype, backend=backend, cpu_isa="torch", cache={"block_size": 32})
    assert settle_compute(config, arch).kernels is None
    check_sizes(config, create_checkpoint(arch))


def foretell(available: int = GIB, **options: Any) -> Forecast:
    return forecast(create_config(**options), create_checkpoint(ARCH), available=available)


def test_the_state_is_the_one_that_the_engine_will_publish(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    cache = CacheConfig(block_size=32, kv_cache_bytes=2**20)
    config = EngineConfig(ModelConfig(tmp_path, "fp32"), cache, SchedulerConfig(), DeviceConfig("torch"))
    expected = forecast(config, open_checkpoint(tmp_path)).state
    with EngineDriver(tmp_path, cache=cache, scheduler=SchedulerConfig()) as driver:
        found: EngineState = driver.engine.state
    assert found == expected


def test_half_of_what_the_weights_leave_is_the_pool() -> None:
    plenty = foretell()
    assert plenty.state is not None and plenty.state.detail == "4 full-length requests"
    found = foretell(available=plenty.weights_bytes + 11 * plenty.block_bytes)
    assert found.state is not None and found.state.detail == "half of the free memory"
    assert found.state.num_blocks == 4, "five of eleven, one of them the null block"


def test_weights_that_do_not_fit_are_said_to_need_more() -> None:
    found = foretell(available=2**10)
    assert found.state is None and found.longest_model_len == 0
    assert "the weights need" in found.problem and "--quantization" in found.problem


def test_a_pool_that_does_not_fit_is_refused_in_the_words_of_the_start() -> None:
    found = foretell(cache={"num_blocks": 10**6})
    assert found.state is None
    assert "lower --num-kv-blocks" in found.problem
    assert found.longest_model_len == ARCH.max_position_embeddings, "without the flag it would fit"


def test_the_longest_context_is_what_one_request_alone_could_have() -> None:
    found = foretell()
    assert found.longest_model_len == ARCH.max_position_embeddings
    tight = foretell(available=found.weights_bytes + 41 * found.block_bytes)
    assert tight.longest_model_len == 19 * 64, "half of 41 blocks, one of them the null block"


def test_why_torch_computes_is_told() -> None:
    assert foretell().reason == ""
    assert "torch was asked for" in foretell(cpu_isa="torch").reason


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    config = replace(create_config(quantization="none"), model=ModelConfig(tmp_path, "auto", 64, "none"))
    whole = forecast(config, open_checkpoint(tmp_path), available=GIB)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    imagined = forecast(config, imagine_checkpoint(tmp_path), available=GIB)
    assert imagined.weights_bytes == whole.weights_bytes
    assert imagined.state == whole.state
