"""The C++ kernels on every instruction set that this CPU runs, and weights in every form that they take."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from kernels.cpu_build import find_library
from kernels.cpu_library import Library, Linear, Machine
from kernels.fused import FloatArray, IntArray, LinearWeights, Storage, Target, WeightRows

Bytes = NDArray[np.uint8]

QUANTISED = tuple(storage for storage in Storage if storage.is_quantised)
# Where a block's fp16 scales lie, as (offset, count): random bytes make any other part of a block.
_SCALES = {
    Storage.Q8_0: (0, 1),
    Storage.Q4_0: (0, 1),
    Storage.Q4_1: (0, 2),
    Storage.Q5_0: (0, 1),
    Storage.Q5_1: (0, 2),
    Storage.Q4_K: (0, 2),
    Storage.Q5_K: (0, 2),
    Storage.Q6_K: (208, 1),
}


@cache
def library() -> Library:
    found = find_library()
    assert found.path is not None, found.reason
    return Library(found.path)


ISAS = library().runnable_isas()


@cache
def machine(isa: str, num_threads: int = 1) -> Machine:
    return Machine(library(), isa, num_threads)


def ggml_kind(storage: Storage) -> GGMLQuantizationType:
    return GGMLQuantizationType[storage.name]


def row_multiple(storage: Storage) -> int:
    """Columns must be whole blocks of so many."""
    size: int = GGML_QUANT_SIZES[ggml_kind(storage)][0]
    return size if storage.is_quantised else 1


def random_blocks(
    storage: Storage, num_rows: int, num_columns: int, *, seed: int = 0, spread: float | None = None
) -> Bytes:
    """Blocks of any content: [num_rows, bytes of a row]; their values' deviation is ``spread`` where it is given."""
    elements, num_bytes = GGML_QUANT_SIZES[ggml_kind(storage)]
    random = np.random.default_rng(seed)
    num_blocks = num_rows * num_columns // elements
    blocks = random.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    offset, count = _SCALES[storage]
    scales = random.uniform(0.001, 0.01, (num_blocks, count)).astype(np.float16)
    blocks[:, offset : offset + 2 * count] = scales.view(np.uint8)
    if spread is not None:
        scales *= np.float16(spread / dequantize(blocks, ggml_kind(storage)).std())
        if count == 2 and not storage.name.endswith("_K"):
            scales[:, 1] = -scales[:, 0] * (7.5 if storage is Storage.Q4_1 else 15.5)  # around 0, as weights are
        blocks[:, offset : offset + 2 * count] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def rows_of(data: NDArray[Any], storage: Storage, num_columns: int) -> WeightRows:
    address: int = data.__array_interface__["data"][0]
    return WeightRows(address, data, storage, len(data), num_columns)


def float_rows(weight: FloatArray) -> WeightRows:
    return rows_of(np.ascontiguousarray(weight, np.float32), Storage.F32, weight.shape[1])


def pack(
    where: Machine,
    *sources: WeightRows,
    target: Target = Target.BF16,
    order: IntArray | None = None,
    bias: FloatArray | None = None,
) -> Linear:
    num_rows = sum(source.num_rows for source in sources)
    order = np.arange(num_rows, dtype=np.int32) if order is None else order
    return Linear(where, LinearWeights(sources, order, bias, target))
