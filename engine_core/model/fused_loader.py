"""From a checkpoint to a decoder of whole-step kernels: each matrix from the file into its packed form, one by one.

Quantised blocks are handed over as they lie in the file; nothing is dequantised on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_core.model.arch import ArchSpec, attn_specs
from engine_core.model.checkpoint import Checkpoint
from engine_core.model.fused_decoder import FusedDecoder
from engine_core.model.weights import StoredMatrix, WeightSource
from kernels.backend import IntArray
from kernels.fused import (
    FloatArray,
    FusedKernels,
    FusedLayer,
    FusedWeights,
    LinearWeights,
    ModelSpec,
    Storage,
    Target,
    gate_up_order,
    weights_bytes,
)

_GROUP = 32  # inputs that share a scale in int4
_ASKED_TARGETS = {"none": Target.BF16, "int8": Target.INT8, "int4": Target.INT4}


def model_spec(arch: ArchSpec) -> ModelSpec:
    """Return what kernels need to know of a model."""
    has_local = arch.local_rope is not None
    return ModelSpec(
        layer_specs=attn_specs(arch),
        rope_of_layer=tuple(int(has_local and window >= 0) for window in arch.windows),
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        vocab_size=arch.vocab_size,
        activation=arch.activation,
        eps=arch.rms_norm_eps,
        # Rounded to the dtype that multiplies, as Gemma was trained: in bf16 sqrt(640) is 25.25.
        embed_scale=torch.tensor(arch.embed_scale).to(torch.bfloat16).item(),
        final_soft_cap=arch.final_soft_cap,
    )


def load_fused(
    checkpoint: Checkpoint,
    kernels: FusedKernels,
    *,
    quantization: str,
    kv_dtype: str,
    on_progress: Callable[[float, str], None],
) -> FusedDecoder:
    """Pack every weight and return the decoder.

    Args:
        checkpoint: Opened, hence known to be complete.
        kernels: Made for this model.
        quantization: Of ModelConfig: auto, none, int8 or int4.
        kv_dtype: bf16 or int8.
        on_progress: Called with the share done, 0..1, and what is being done.

    Raises:
        CheckpointError: A tensor's bytes cannot be read.
    """
    loader = _Loader(checkpoint.arch, checkpoint.weights, kernels, quantization)
    num_layers = checkpoint.arch.num_layers
    layers = []
    for index in range(num_layers):
        on_progress(index / (num_layers + 1), f"layer {index + 1} of {num_layers}")
        layers.append(loader.layer(index))
    on_progress(num_layers / (num_layers + 1), "embedding and head")
    weights = loader.weights(layers)
    decoder = FusedDecoder(checkpoint.arch, kernels.build(model_spec(checkpoint.arch), weights, kv_dtype=kv_dtype))
    on_progress(1.0, "loaded")
    return decoder


def measure_fused(checkpoint: Checkpoint, kernels: FusedKernels, *, quantization: str) -> int:
    """Return the memory that load_fused() would take for the weights, from their headers alone.

    Args:
        checkpoint: Opened.
        kernels: Made for this model.
        quantization: As for load_fused().
    """
    loader = _Measure(checkpoint.arch, checkpoint.weights, kernels, quantization)
    layers = [loader.layer(index) for index in range(checkpoint.arch.num_layers)]
    return weights_bytes(loader.weights(layers))


class _Loader:
    def __init__(self, arch: ArchSpec, weights: WeightSource, kernels: FusedKernels, quantization: str) -> None:
        self._arch = arch
        self._weights = weights
        self._kernels = kernels
        self._quantization = quantization
        self._has_split_qkv = self._needs_split_qkv()

    def layer(self, index: int) -> FusedLayer:
        arch, prefix = self._arch, f"model.layers.{index}"
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        post = f"{prefix}.post_attention_layernorm"  # Gemma's second norm of four, everyone else's before the MLP
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        return FusedLayer(
            qkv=self._qkv(index),
            o=self._linear([f"{attn}.o_proj"], has_bias=arch.o_bias),
            gate_up=self._linear(gate_up, has_bias=arch.mlp_bias, order=gate_up_order(arch.intermediate_size)),
            down=self._linear([f"{mlp}.down_proj"], has_bias=arch.mlp_bias),
            input_norm=self._norm(f"{prefix}.input_layernorm"),
            mlp_norm=self._norm(f"{prefix}.pre_feedforward_layernorm" if arch.post_norms else post),
            q_norm=self._norm(f"{attn}.q_norm") if arch.qk_norm else None,
            k_norm=self._norm(f"{attn}.k_norm") if arch.qk_norm else None,
            attn_post_norm=self._norm(post) if arch.post_norms else None,
            mlp_post_norm=self._norm(f"{prefix}.post_feedforward_layernorm") if arch.post_norms else None,
        )

    def weights(self, layers: list[FusedLayer]) -> FusedWeights:
        is_tied = self._arch.tie_word_embeddings
        name = "model.embed_tokens" if is_tied else "lm_head"
        target = self._target([self._stored(name)])
        # A head of int8 has lost the embedding's values.
        has_table = not is_tied or target in (Target.INT8, Target.INT4)
        return FusedWeights(
            layers=layers,
            final_norm=self._norm("model.norm"),
            head=self._linear([name], has_bias=False),
            embedding=self._table("model.embed_tokens.weight") if has_table else None,
        )

    def _qkv(self, index: int) -> tuple[object, ...]:
        """Stack q, k and v, or pack the three apart: all layers alike, and all three in the same kind of numbers."""
        names = _qkv_names(index)
        target = self._qkv_target(index)
        groups = [[name] for name in names] if self._has_split_qkv else [names]
        return tuple(self._linear(group, has_bias=self._arch.qkv_bias, target=target) for group in groups)

    def _qkv_target(self, index: int) -> Target:
        if self._quantization == "auto" and all(kind.is_quantised for kind in self._qkv_kinds(index)):
            return Target.AS_STORED
        return self._target([self._stored(name) for name in _qkv_names(index)])

    def _qkv_kinds(self, index: int) -> set[Storage]:
        return {self._stored(name).rows.storage for name in _qkv_names(index)}

    def _needs_split_qkv(self) -> bool:
        """Blocks of different kinds only stay what they are apart."""
        layers = [self._qkv_kinds(index) for index in range(self._arch.num_layers)]
        return self._quantization == "auto" and any(
            len(kinds) > 1 and all(kind.is_quantised for kind in kinds) for kinds in layers
        )

    def _stored(self, name: str) -> StoredMatrix:
        return self._weights.read_stored(f"{name}.weight")

    def _linear(
        self, names: list[str], *, has_bias: bool, order: IntArray | None = None, target: Target | None = None
    ) -> object:
        """Pack linears that share their input as one: their rows stacked, then in ``order`` where there is one."""
        stored = [self._stored(name) for name in names]
        rows = _stacked_order(stored)
        bias = self._bias(names) if has_bias else None
        if order is not None:
            rows = np.where(order < 0, np.int32(-1), rows[order])
            bias = None if bias is None else np.where(order < 0, np.float32(0.0), bias[order])
        sources = [matrix.rows for matrix in stored]
        target = self._target(stored) if target is None else target
        return self._pack(LinearWeights(sources, rows, bias, target))

    def _pack(self, weights: LinearWeights) -> object:
        return self._kernels.pack(weights)

    def _target(self, stored: Sequence[StoredMatrix]) -> Target:
        if self._quantization == "int4" and stored[0].rows.num_columns % _GROUP:
            return Target.INT8  # its last group would be cut short
        if self._quantization != "auto":
            return _ASKED_TARGETS[self._quantization]
        kinds = {matrix.rows.storage for matrix in stored}
        return Target.AS_STORED if len(kinds) == 1 and kinds.pop().is_quantised else Target.BF16

    def _bias(self, names: list[str]) -> FloatArray:
        return np.concatenate([self._floats(f"{name}.bias") for name in names])

    def _norm(self, name: str) -> FloatArray:
        weight = self._floats(f"{name}.weight")
        return weight + np.float32(1.0) if self._arch.norm_unit_offset else weight

    def _floats(self, name: str) -> FloatArray:
        values: FloatArray = self._weights.read(name).float().numpy()
        return values

    def _table(self, name: str) -> torch.Tensor:
        # A copy: what a source returns may be a view of its mapped file.
        return self._weights.read(name).to(torch.bfloat16, copy=True).contiguous()


@dataclass(frozen=True, slots=True)
class _PlannedLinear:
    num_bytes: int


class _Measure(_Loader):
    """The same loader, but nothing is read and nothing packed."""

    def _pack(self, weights: LinearWeights) -> object:
        return _PlannedLinear(self._kernels.packed_bytes(weights))

    def _floats(self, name: str) -> FloatArray:
        return np.zeros(self._weights.shapes[name], np.float32)

    def _table(self, name: str) -> torch.Tensor:
        return torch.empty(self._weights.shapes[name], dtype=torch.bfloat16, device="meta")


def _qkv_names(index: int) -> list[str]:
    return [f"model.layers.{index}.self_attn.{name}_proj" for name in "qkv"]


def _stacked_order(stored: Sequence[StoredMatrix]) -> IntArray:
    """Return which stored row, counted through all matrices, is each row of the stack."""
    parts, first = [], 0
    for matrix in stored:
        num_rows = matrix.rows.num_rows
        order = np.arange(num_rows, dtype=np.int32) if matrix.row_order is None else matrix.row_order
        parts.append(order + np.int32(first))
        first += num_rows
    return np.concatenate(parts)
