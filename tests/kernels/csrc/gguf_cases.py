"""Writes random GGUF blocks and, from the gguf package, the numbers that they stand for, for test_pack to compare."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# The number of a type in pack.h, and where a block keeps its halves: all else may be any bits.
TYPES = {
    "Q8_0": (3, (0,)),
    "Q4_0": (4, (0,)),
    "Q4_1": (5, (0, 2)),
    "Q5_0": (6, (0,)),
    "Q5_1": (7, (0, 2)),
    "Q4_K": (8, (0, 2)),
    "Q5_K": (9, (0, 2)),
    "Q6_K": (10, (208,)),
}
NUM_ROWS = 33
NUM_COLUMNS = 512


def write_cases(path: Path) -> None:
    """Write one case of every type to `path`: its header, blocks and values."""
    random = np.random.default_rng(11)
    with path.open("wb") as file:
        for name, (number, offsets) in TYPES.items():
            blocks = _random_blocks(name, offsets, random)
            values = dequantize(blocks, GGMLQuantizationType[name]).astype(np.float32)
            file.write(struct.pack("<4i", number, NUM_ROWS, NUM_COLUMNS, blocks.nbytes))
            file.write(blocks.tobytes() + values.tobytes())


def _random_blocks(name: str, offsets: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (NUM_ROWS, NUM_COLUMNS // block_values, block_bytes), dtype=np.uint8)
    for offset in offsets:
        halves = (random.standard_normal(blocks.shape[:2]) * 0.01).astype(np.float16)
        blocks[:, :, offset : offset + 2] = halves[:, :, None].view(np.uint8)
    return blocks.reshape(NUM_ROWS, -1)


if __name__ == "__main__":
    write_cases(Path(sys.argv[1]))
