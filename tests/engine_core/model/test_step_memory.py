"""What is reckoned of a step's memory is what FlashInfer's and CUDA's stand-ins hold while they compute it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_core.device_start import measure_use
from engine_core.model.compute import settle_compute
from engine_core.model.decoder import Decoder
from engine_core.model.step_memory import count_table_bytes, estimate_graph_bytes, estimate_step_bytes
from tests.engine_core.cuda_machine import create_machine
from tests.kernels.fused_case import create_arch, create_checkpoint


@pytest.mark.parametrize(
    ("shape", "num_tokens", "num_rows"),
    [
        pytest.param({"intermediate_size": 512}, 1024, 8, id="the MLP decides"),
        pytest.param({"vocab_size": 40_000}, 64, 32, id="the vocabulary decides"),
    ],
)
def test_flashinfers_step_holds_what_was_reckoned(shape: dict[str, Any], num_tokens: int, num_rows: int) -> None:
    arch = create_arch(head_dim=64, **shape)
    scheduler = SchedulerConfig(max_num_batched_tokens=num_tokens, max_num_seqs=num_rows)
    model = ModelConfig(Path("m"), "auto", 512)
    config = EngineConfig(model, CacheConfig(block_size=16), scheduler, DeviceConfig("cuda", num_threads=1))
    compute = settle_compute(config, arch, create_machine())
    decoder = compute.load(create_checkpoint(arch), lambda share, what: None)
    assert isinstance(decoder, Decoder) and compute.device is not None
    table_bytes = sum(table.values.nbytes for table in decoder._cos_sin)
    assert table_bytes == count_table_bytes(arch, 512)
    held = measure_use(decoder, compute.device, compute.config).step_bytes
    assert held == pytest.approx(estimate_step_bytes(arch, num_tokens=num_tokens, num_rows=num_rows), rel=0.02)


def test_graphs_share_the_largest_ones_step_and_none_take_nothing() -> None:
    arch = create_arch(head_dim=64)
    assert estimate_graph_bytes(arch, ()) == 0
    one, two = estimate_graph_bytes(arch, (64,)), estimate_graph_bytes(arch, (1, 64))
    assert two - one == one - estimate_step_bytes(arch, num_tokens=64, num_rows=64) > 0


def test_tables_grow_by_powers_of_two() -> None:
    arch = create_arch(head_dim=64)
    assert count_table_bytes(arch, 5000) == 8192 * 64 * 4
    assert count_table_bytes(arch, 2) == 4096 * 64 * 4
