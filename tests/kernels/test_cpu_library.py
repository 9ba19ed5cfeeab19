"""Handles, and linears of every form, on every instruction set: values against gguf's and torch's, bits by bits."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from kernels.cpu_library import ISAS as KNOWN_ISAS
from kernels.cpu_library import KernelError, Linear, Machine
from kernels.fused import FloatArray, LinearWeights, Storage, Target, WeightRows, gate_up_order
from tests.kernels.cpu_machines import (
    ISAS,
    QUANTISED,
    float_rows,
    ggml_kind,
    library,
    machine,
    pack,
    random_blocks,
    row_multiple,
    rows_of,
)

isas = pytest.mark.parametrize("isa", ISAS)
SHAPES = [(32, 64), (7, 40), (96, 576), (203, 130), (33, 1000), (65, 96)]
# How far a row may be off, as a share of its length: what rounding activations, and weights, costs.
ERRORS = {Target.BF16: 0.004, Target.INT8: 0.02, Target.INT4: 0.15, Target.AS_STORED: 0.004}


def normal(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative_error(found: FloatArray, expected: FloatArray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# ---------------------------------------------------------------------- the machine
def test_generic_code_runs_everywhere_and_the_best_is_the_first() -> None:
    assert "generic" in ISAS
    assert library().best_isa == ISAS[0]
    assert set(ISAS) <= set(KNOWN_ISAS)
    assert library().cpu_name


def test_an_instruction_set_that_is_not_there_is_refused_with_a_sentence() -> None:
    with pytest.raises(KernelError, match="lacks the instruction set"):
        Machine(library(), "abacus", 1)


def test_more_threads_than_the_system_gives_are_refused_with_a_sentence() -> None:
    program = """
import resource, sys
from kernels.cpu_library import KernelError
from tests.kernels.cpu_machines import library, machine
library()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), resource.RLIM_INFINITY))
try:
    machine("generic", 1000)
except KernelError as error:
    sys.exit(str(error))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, "ask for fewer" in result.stderr) == (1, True), result.stderr


def test_a_handle_is_destroyed_once_and_after_what_was_made_of_it() -> None:
    where = Machine(library(), "generic", 1)
    linear = pack(where, float_rows(normal(32, 64)))
    alive = weakref.ref(where)
    del where
    gc.collect()
    assert alive() is not None, "its linear needs it"
    assert linear.run(normal(1, 64)).shape == (1, 32)
    linear.close()
    linear.close()
    gc.collect()
    assert alive() is None


# ---------------------------------------------------------------------- linears
@isas
@pytest.mark.parametrize(
    ("target", "n", "k"),
    [
        *((target, n, k) for target in (Target.BF16, Target.INT8) for n, k in SHAPES),
        *((Target.INT4, n, k) for n, k in SHAPES if k % 32 == 0),
    ],
)
def test_a_linear_computes_what_torch_does(isa: str, target: Target, n: int, k: int) -> None:
    weight, bias, x = normal(n, k, seed=1), normal(n, seed=2), normal(5, k, seed=3)
    linear = pack(machine(isa), float_rows(weight), target=target, bias=bias)
    expected = torch.nn.functional.linear(*map(torch.from_numpy, (x, weight, bias))).numpy()
    assert relative_error(linear.run(x), expected) < ERRORS[target]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("storage", [Storage.F32, *QUANTISED], ids=lambda storage: storage.name)
@pytest.mark.parametrize("target", Target, ids=lambda target: target.name)
def test_the_bytes_that_are_planned_are_the_bytes_that_are_taken(
    target: Target, storage: Storage, has_bias: bool
) -> None:
    if target is Target.AS_STORED and not storage.is_quantised:
        return
    n, k = 37, 2 * max(row_multiple(storage), 32)
    rows = rows_of(random_blocks(storage, n, k), storage, k) if storage.is_quantised else float_rows(normal(n, k))
    weights = LinearWeights([rows], np.arange(n, dtype=np.int32), normal(n) if has_bias else None, target)
    nowhere = LinearWeights([replace(rows, address=0, owner=None)], weights.row_order, weights.bias, target)
    assert library().packed_bytes(nowhere) == Linear(machine("generic"), weights).num_bytes


def test_what_makes_no_linear_has_no_size_but_a_sentence() -> None:
    rows = WeightRows(0, None, Storage.F32, 4, 8)
    with pytest.raises(KernelError, match="names a row"):
        library().packed_bytes(LinearWeights([rows], np.array([4], np.int32), None, Target.BF16))


@isas
@pytest.mark.parametrize("target", [Target.BF16, Target.INT8, Target.INT4])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_shows_in_its_row_and_only_there(isa: str, target: Target, damage: float) -> None:
    weight, x = normal(33, 96), normal(3, 96, seed=1)
    expected = pack(machine(isa), float_rows(weight), target=target).run(x)
    weight[5, 40] = damage
    found = pack(machine(isa), float_rows(weight), target=target).run(x)
    assert not np.isfinite(found[:, 5]).any()
    assert np.array_equal(np.delete(found, 5, axis=1), np.delete(expected, 5, axis=1))


@isas
@pytest.mark.parametrize("damage", [np.nan, np.inf])
def test_a_stored_scale_that_is_no_number_shows_in_its_row_and_only_there(isa: str, damage: float) -> None:
    blocks, x = random_blocks(Storage.Q4_0, 33, 96), normal(3, 96, seed=1)
    expected = pack(machine(isa), rows_of(blocks, Storage.Q4_0, 96), target=Target.AS_STORED).run(x)
    blocks[5, :2] = np.array([damage], np.float16).view(np.uint8)
    found = pack(machine(isa), rows_of(blocks, Storage.Q4_0, 96), target=Target.AS_STORED).run(x)
    assert not np.isfinite(found[:, 5]).any()
    assert np.array_equal(np.delete(found, 5, axis=1), np.delete(expected, 5, axis=1))


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bf16_keeps_what_bf16_can_hold(isa: str, dtype: torch.dtype) -> None:
    weight = torch.from_numpy(normal(40, 96)).to(dtype)
    linear = pack(machine(isa), WeightRows.of(weight))
    for index in range(40):
        assert np.array_equal(linear.row(index), weight[index].to(torch.bfloat16).float().numpy())


@isas
@pytest.mark.parametrize("storage", QUANTISED, ids=lambda storage: storage.name)
def test_stored_blocks_keep_their_values(isa: str, storage: Storage) -> None:
    n, k = 37, 2 * row_multiple(storage)
    blocks = random_blocks(storage, n, k)
    expected = dequantize(blocks, ggml_kind(storage))
    order = np.random.default_rng(5).permutation(n).astype(np.int32)
    linear = pack(machine(isa), rows_of(blocks, storage, k), target=Target.AS_STORED, order=order)
    found = np.stack([linear.row(index) for index in range(n)])
    np.testing.assert_allclose(found, expected[order], rtol=2e-6, atol=1e-7)


@isas
@pytest.mark.parametrize("target", [Target.AS_STORED, Target.BF16, Target.INT8], ids=lambda target: target.name)
@pytest.mark.parametrize("storage", QUANTISED, ids=lambda storage: storage.name)
def test_linears_of_stored_blocks(isa: str, storage: Storage, target: Target) -> None:
    n, k = 48, 2 * row_multiple(storage)
    blocks, x = random_blocks(storage, n, k, seed=1), normal(9, k, seed=2)
    weight = dequantize(blocks, ggml_kind(storage))
    linear = pack(machine(isa), rows_of(blocks, storage, k), target=target)
    assert relative_error(linear.run(x), x @ weight.T) < ERRORS[target]


@isas
def test_sources_are_stacked_and_rows_ordered(isa: str) -> None:
    gate, up, bias = normal(48, 64, seed=1), normal(48, 64, seed=2), normal(96, seed=3)
    order = gate_up_order(48)
    linear = pack(machine(isa), float_rows(gate), float_rows(up), order=order, bias=bias[order])
    x = normal(3, 64)
    expected = np.concatenate((x @ gate.T, x @ up.T), axis=1) + bias
    assert relative_error(linear.run(x), expected[:, order]) < ERRORS[Target.BF16]


def test_gate_and_up_alternate_by_16() -> None:
    order = gate_up_order(32).tolist()
    assert order == [*range(16), *range(32, 48), *range(16, 32), *range(48, 64)]
    assert gate_up_order(2).tolist() == [0, 1, *[-1] * 14, 2, 3, *[-1] * 14]


def test_a_linear_of_few_bits_is_small() -> None:
    sizes = [
        pack(machine(ISAS[0]), float_rows(normal(512, 512)), target=target).num_bytes for target in list(Target)[:3]
    ]
    assert sizes[0] >= 512 * 512 * 2 and sizes[1] < 0.55 * sizes[0] and sizes[2] < 0.32 * sizes[0]


@isas
@pytest.mark.parametrize("form", [*list(Target)[:3], *QUANTISED], ids=lambda form: form.name)
def test_a_rows_bits_do_not_depend_on_the_others_or_on_threads(isa: str, form: Target | Storage) -> None:
    n, k = 131, 512
    x = normal(70, k, seed=4)
    runs = []
    for num_threads in (1, 2, 3):
        if isinstance(form, Target):
            linear = pack(machine(isa, num_threads), float_rows(normal(n, k)), target=form, bias=normal(n, seed=9))
        else:
            source = rows_of(random_blocks(form, n, k), form, k)
            linear = pack(machine(isa, num_threads), source, target=Target.AS_STORED)
        runs.append(linear.run(x))
        for first, last in [(0, 1), (1, 3), (3, 8), (8, 24), (24, 41), (41, 70), (69, 70)]:
            assert np.array_equal(linear.run(x[first:last]), runs[0][first:last])
    assert np.array_equal(runs[0], runs[1]) and np.array_equal(runs[0], runs[2])
