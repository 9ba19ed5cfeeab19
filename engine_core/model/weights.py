"""What a checkpoint of any format offers the loader: named tensors and generation defaults. Knows no file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.backend import IntArray
from kernels.fused import Storage, WeightRows


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix as its file holds it.

    Attributes:
        rows: Its numbers, in the file's own order.
        row_order: Which stored row is each row of the matrix; None = they are in order.
    """

    rows: WeightRows
    row_order: IntArray | None = None


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, such as ``model.layers.0.self_attn.q_proj.weight``.

    Attributes:
        shapes: Every tensor's shape, read from headers alone.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes by name."""

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, in the dtype it is stored in (fp32 where the stored one is a quantised block).

        Raises:
            CheckpointError: The bytes cannot be read.
            KeyError: No such tensor.
        """

    def read_stored(self, name: str) -> StoredMatrix:
        """Return a matrix as it is stored, quantised blocks as they are. Errors as for read()."""


class ImaginedSource:
    """A WeightSource of tensors that exist in name and shape only: matrices of bf16, as checkpoints have them.

    Args:
        shapes: By name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor without numbers."""
        return torch.empty(self.shapes[name], dtype=torch.bfloat16, device="meta")

    def read_stored(self, name: str) -> StoredMatrix:
        """Return a matrix that lies nowhere."""
        num_rows, num_columns = self.shapes[name]
        return StoredMatrix(WeightRows(0, None, Storage.BF16, num_rows, num_columns))


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the checkpoint says about generating.

    Attributes:
        eos_token_ids: Ids that end the output; empty if none is named.
        temperature: Sampling default, or None where the checkpoint has none.
        top_p: Likewise.
        top_k: Likewise; a count of tokens.
        min_p: Likewise.
        repetition_penalty: Likewise.
    """

    eos_token_ids: frozenset[int] = frozenset()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
