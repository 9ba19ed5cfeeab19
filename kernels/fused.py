"""The seam for a backend that computes a whole step in one call: what it is told of a model, and what it gives back.

Knows weights as rows of numbers in memory, however they are stored; knows no files and no architectures by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.step import Activation, AttnSpec, IntArray, KVPool, StepMeta

FloatArray = NDArray[np.float32]


class Storage(IntEnum):
    """How a row of weights lies in memory. From Q8_0 on: ggml's blocks, their own bytes."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q8_0 = 8
    Q4_0 = 9
    Q4_1 = 10
    Q5_0 = 11
    Q5_1 = 12
    Q4_K = 13
    Q5_K = 14
    Q6_K = 15

    @property
    def is_quantised(self) -> bool:
        """Whether the values are blocks with scales."""
        return self >= Storage.Q8_0


class Target(IntEnum):
    """What a linear computes in. AS_STORED keeps the values of quantised blocks, all of one kind."""

    BF16 = 0
    INT8 = 1
    INT4 = 2
    AS_STORED = 3


@dataclass(frozen=True, slots=True)
class WeightRows:
    """A matrix in memory, row after row.

    Attributes:
        address: Of its first byte.
        owner: Keeps the memory alive.
        storage: How the numbers are stored.
        num_rows: Outputs.
        num_columns: Inputs.
    """

    address: int
    owner: object
    storage: Storage
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> WeightRows:
        """Describe a tensor, [rows, columns]; one of other numbers than fp32, fp16 or bf16 becomes fp32."""
        dense = tensor.detach().contiguous()
        dense = dense if dense.dtype in _STORAGES else dense.float()
        return cls(dense.data_ptr(), dense, _STORAGES[dense.dtype], dense.shape[0], dense.shape[1])


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Linears that share their input, packed as one.

    Attributes:
        sources: Their matrices; rows are numbered through all of them.
        row_order: [outputs], which row becomes each output; -1 = none, its weights are 0.
        bias: [outputs], in the order of the outputs, or None.
        target: What to compute in.
    """

    sources: Sequence[WeightRows]
    row_order: IntArray
    bias: FloatArray | None
    target: Target


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer as far as its arithmetic goes.

    Attributes:
        layer_specs: Each layer's attention; all of one shape, windows may differ.
        rope_of_layer: Which of two rotary tables each layer uses.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        vocab_size: Outputs of the head.
        activation: Of the gated MLP.
        eps: Of every norm.
        embed_scale: Factor on the embedding's rows.
        final_soft_cap: Soft cap on the logits; 0 = off.
    """

    layer_specs: tuple[AttnSpec, ...]
    rope_of_layer: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    activation: Activation
    eps: float
    embed_scale: float = 1.0
    final_soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer's weights. Linears as FusedKernels.pack() returned them; norms are fp32, [H] or [head_dim].

    Attributes:
        qkv: One linear with q, k and v stacked, or the three.
        o: Attention's output projection.
        gate_up: In the row order of ``gate_up_order``.
        down: Of the MLP.
        input_norm: Before attention.
        mlp_norm: Before the MLP.
        q_norm: On each head of q, or None.
        k_norm: On each head of k, or None.
        attn_post_norm: On attention's output, or None.
        mlp_post_norm: On the MLP's output, or None.
    """

    qkv: tuple[Any, ...]
    o: Any
    gate_up: Any
    down: Any
    input_norm: FloatArray
    mlp_norm: FloatArray
    q_norm: FloatArray | None = None
    k_norm: FloatArray | None = None
    attn_post_norm: FloatArray | None = None
    mlp_post_norm: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """All weights of a model.

    Attributes:
        layers: In order.
        final_norm: [H].
        head: H -> vocab_size.
        embedding: [vocab_size, H] bf16; None = the head's rows.
    """

    layers: Sequence[FusedLayer]
    final_norm: FloatArray
    head: Any
    embedding: torch.Tensor | None = None


class HeadRows(NamedTuple):
    """What the head says about some of the rows of a step.

    greedy_ids: [n], each row's likeliest token; is_finite: [n], whether its logits are all finite;
    logits: [n, vocab_size], where they were asked for.
    """

    greedy_ids: IntArray
    is_finite: NDArray[np.bool_]
    logits: FloatArray | None


class FusedModel(Protocol):
    """A model that computes a step in one call. One thread at a time may use it."""

    @property
    def num_bytes(self) -> int:
        """Memory that the weights take."""

    def kv_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers."""

    def alloc_kv(self, *, num_pages: int, page_size: int) -> KVPool:
        """Allocate pages for all layers."""

    def set_rope(self, rope: int, cos_sin: FloatArray) -> None:
        """Give one of the two rotary tables: [num_positions, head_dim], as build_cos_sin() makes it."""

    def forward(self, meta: StepMeta, kv: KVPool) -> None:
        """Compute a step up to the last hidden states of ``meta.logit_rows``, which stay until the next one."""

    def head(self, first: int, num: int, num_token_ids: int, want_logits: bool) -> HeadRows:
        """Apply the head to ``num`` of the rows that forward() left, from ``first`` on.

        Args:
            first: Row.
            num: Rows.
            num_token_ids: Ids that may be picked; the rest of the vocabulary is padding.
            want_logits: Whether somebody reads them.
        """

    def hidden(self) -> FloatArray:
        """Return the hidden states that forward() left: [R, H], normed."""


class FusedKernels(Protocol):
    """Packs weights and puts models together."""

    isa: str
    num_threads: int

    def pack(self, weights: LinearWeights) -> Any:
        """Pack linears into one; the sources are not needed afterwards."""

    def packed_bytes(self, weights: LinearWeights) -> int:
        """Return the ``num_bytes`` of what pack() would return. The sources' numbers are not read."""

    def kv_page_bytes(self, spec: ModelSpec, *, page_size: int, kv_dtype: str) -> int:
        """Return the bytes of one page over all layers of a model that build() would return."""

    def build(self, spec: ModelSpec, weights: FusedWeights, *, kv_dtype: str) -> FusedModel:
        """Put packed linears and norms together.

        Args:
            spec: What they make up.
            weights: Packed by these kernels.
            kv_dtype: bf16 or int8.
        """


def weights_bytes(weights: FusedWeights) -> int:
    """Return the memory that a model's weights take: its linears' ``num_bytes`` and its embedding. Norms are nothing.

    Args:
        weights: Packed, or planned.
    """
    linears = [weights.head, *(linear for layer in weights.layers for linear in (*layer.qkv, layer.o))]
    linears += [linear for layer in weights.layers for linear in (layer.gate_up, layer.down)]
    embedding = 0 if weights.embedding is None else int(weights.embedding.nbytes)
    return embedding + sum(int(linear.num_bytes) for linear in linears)


def gate_up_order(intermediate_size: int) -> IntArray:
    """Return the order of rows in which gate and up are packed: 16 of the one and 16 of the other alternate.

    Args:
        intermediate_size: Rows of each; gate's come first in what is packed.

    Returns:
        [2 * intermediate_size, rounded up to 32], -1 where there is no row left.
    """
    gate = np.arange(-(-intermediate_size // 16) * 16, dtype=np.int32)
    up = gate + np.int32(intermediate_size)
    for half in (gate, up):
        half[intermediate_size:] = -1
    return np.stack((gate.reshape(-1, 16), up.reshape(-1, 16)), axis=1).reshape(-1)


_STORAGES = {torch.float32: Storage.F32, torch.float16: Storage.F16, torch.bfloat16: Storage.BF16}
