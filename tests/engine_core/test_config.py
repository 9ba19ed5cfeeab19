"""EngineConfig: contradictions are named, and resolve() gives a new object."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine_core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_core.errors import ConfigError

CONFIG = EngineConfig(ModelConfig(Path("m")))


def test_resolve_settles_the_context_and_leaves_the_original_alone() -> None:
    resolved = CONFIG.resolve(trained_model_len=2048)
    assert resolved.model.max_model_len == 2048
    assert CONFIG.model.max_model_len is None


def test_what_depends_on_the_device_stays_open() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=0, max_num_seqs=0)
    resolved = replace(CONFIG, cache=CacheConfig(block_size=0), scheduler=scheduler).resolve(trained_model_len=2048)
    assert (resolved.cache.block_size, resolved.scheduler, resolved.device.backend) == (0, scheduler, "auto")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(CONFIG, scheduler=SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=9)), "max_num_seqs"),
        (replace(CONFIG, scheduler=SchedulerConfig(max_num_seqs=-1)), "max_num_seqs"),
        (replace(CONFIG, scheduler=SchedulerConfig(enable_chunked_prefill=False)), "enable_chunked_prefill"),
        (replace(CONFIG, scheduler=SchedulerConfig(long_prefill_token_threshold=5000)), "long_prefill_token_threshold"),
        (replace(CONFIG, model=ModelConfig(Path("m"), max_model_len=4096)), "max_model_len"),
        (replace(CONFIG, model=ModelConfig(Path("m"), max_model_len=1)), "max_model_len"),
        (replace(CONFIG, model=ModelConfig(Path("m"), max_model_len=0)), "max_model_len"),
        (replace(CONFIG, model=ModelConfig(Path("m"), dtype="int3")), "dtype"),
        (replace(CONFIG, scheduler=SchedulerConfig(policy="lifo")), "policy must be one of fcfs, priority"),
        (replace(CONFIG, scheduler=SchedulerConfig(policy="priority", priority_order="up")), "priority_order must be"),
        (replace(CONFIG, scheduler=SchedulerConfig(priority_order="lower-first")), "no effect under fcfs"),
        (replace(CONFIG, scheduler=SchedulerConfig(delay_factor=-0.5)), "delay_factor"),
        (replace(CONFIG, scheduler=SchedulerConfig(delay_factor=float("nan"))), "delay_factor"),
        (replace(CONFIG, scheduler=SchedulerConfig(target_itl_ms=-1.0)), "target_itl_ms must be"),
        (replace(CONFIG, scheduler=SchedulerConfig(target_itl_ms=float("inf"))), "target_itl_ms must be"),
        (
            replace(CONFIG, scheduler=SchedulerConfig(enable_chunked_prefill=False, target_itl_ms=40.0)),
            "target_itl_ms \\(40\\).*enable_chunked_prefill is off",
        ),
        (
            replace(CONFIG, scheduler=SchedulerConfig(enable_chunked_prefill=False, max_chunk_size=64)),
            "max_chunk_size \\(64\\).*enable_chunked_prefill is off",
        ),
        (replace(CONFIG, cache=CacheConfig(watermark=1.0)), "watermark"),
        (replace(CONFIG, cache=CacheConfig(block_size=-1)), "block_size"),
        (replace(CONFIG, cache=CacheConfig(num_blocks=0)), "num_blocks"),
        (replace(CONFIG, cache=CacheConfig(gpu_memory_utilization=0.0)), "gpu_memory_utilization"),
        (replace(CONFIG, cache=CacheConfig(gpu_memory_utilization=1.5)), "gpu_memory_utilization"),
    ],
)
def test_contradictions_name_the_fields(config: EngineConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.resolve(trained_model_len=2048)
