"""From a checkpoint to a decoder: read, convert, fuse and pack tensor by tensor, so that memory holds one copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine_core.model.arch import ArchSpec
from engine_core.model.checkpoint import Checkpoint
from engine_core.model.decoder import Decoder, DecoderWeights, LayerWeights
from engine_core.model.weights import WeightSource
from kernels.backend import Backend


def load_decoder(
    checkpoint: Checkpoint, backend: Backend, dtype: torch.dtype, on_progress: Callable[[float, str], None]
) -> Decoder:
    """Load every weight and return the decoder.

    Args:
        checkpoint: Opened, hence known to be complete.
        backend: Where the weights go.
        dtype: Of the weights and of what flows through the decoder.
        on_progress: Called with the share done, 0..1, and what is being done.

    Raises:
        CheckpointError: A tensor's bytes cannot be read.
    """
    loader = _Loader(checkpoint.arch, checkpoint.weights, backend, dtype)
    num_steps = checkpoint.arch.num_layers + 1
    layers = []
    for index in range(checkpoint.arch.num_layers):
        on_progress(index / num_steps, f"layer {index + 1} of {checkpoint.arch.num_layers}")
        layers.append(loader.layer(index))
    on_progress(checkpoint.arch.num_layers / num_steps, "embedding and head")
    decoder = Decoder(checkpoint.arch, backend, loader.decoder(layers))
    on_progress(1.0, "loaded")
    return decoder


def measure_decoder(checkpoint: Checkpoint, backend: Backend, dtype: torch.dtype) -> int:
    """Return the memory that load_decoder() would take for the weights, from their headers alone."""
    loader = _Measure(checkpoint.arch, checkpoint.weights, backend, dtype)
    layers = [loader.layer(index) for index in range(checkpoint.arch.num_layers)]
    return loader.decoder(layers).num_bytes


class _Loader:
    def __init__(self, arch: ArchSpec, weights: WeightSource, backend: Backend, dtype: torch.dtype) -> None:
        self._arch = arch
        self._weights = weights
        self._backend = backend
        self._dtype = dtype
        self._num_bytes = 0

    def layer(self, index: int) -> LayerWeights:
        arch, prefix = self._arch, f"model.layers.{index}"
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        post = f"{prefix}.post_attention_layernorm"  # Gemma's second norm of four, everyone else's before the MLP
        return LayerWeights(
            input_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._linear([f"{attn}.{name}_proj" for name in "qkv"], has_bias=arch.qkv_bias),
            q_norm=self._norm(f"{attn}.q_norm") if arch.qk_norm else None,
            k_norm=self._norm(f"{attn}.k_norm") if arch.qk_norm else None,
            o=self._linear([f"{attn}.o_proj"], has_bias=arch.o_bias),
            attn_post_norm=self._norm(post) if arch.post_norms else None,
            mlp_norm=self._norm(f"{prefix}.pre_feedforward_layernorm" if arch.post_norms else post),
            gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], has_bias=arch.mlp_bias),
            down=self._linear([f"{mlp}.down_proj"], has_bias=arch.mlp_bias),
            mlp_post_norm=self._norm(f"{prefix}.post_feedforward_layernorm") if arch.post_norms else None,
        )

    def decoder(self, layers: list[LayerWeights]) -> DecoderWeights:
        embedding = self._copy("model.embed_tokens.weight")
        self._num_bytes += embedding.nbytes
        is_tied = self._arch.tie_word_embeddings
        head = embedding if is_tied else self._copy("lm_head.weight")
        if not (is_tied and _keeps_weights(self._backend)):
            self._count(head, None)
        return DecoderWeights(
            embedding=embedding,
            layers=layers,
            final_norm=self._norm("model.norm"),
            lm_head=self._into_backend(head, None),
            num_bytes=self._num_bytes,
        )

    def _linear(self, names: list[str], *, has_bias: bool) -> Any:
        """Pack linears that share their input as one, their rows stacked in order."""
        weight = self._stacked([f"{name}.weight" for name in names])
        bias = self._stacked([f"{name}.bias" for name in names]) if has_bias else None
        return self._pack(weight, bias)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        self._count(weight, bias)
        return self._into_backend(weight, bias)

    def _into_backend(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return self._backend.pack_linear(weight, bias)

    def _count(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._num_bytes += weight.nbytes + (0 if bias is None else bias.nbytes)

    def _stacked(self, names: list[str]) -> torch.Tensor:
        return self._copy(names[0]) if len(names) == 1 else torch.cat([self._read(name) for name in names])

    def _copy(self, name: str) -> torch.Tensor:
        """Read into memory of our own: what a source returns may be a view of its mapped file."""
        weight = self._weights.read(name)
        return weight.to(device=self._backend.device, dtype=self._dtype, copy=True)

    def _read(self, name: str) -> torch.Tensor:
        return self._weights.read(name).to(device=self._backend.device, dtype=self._dtype)

    def _norm(self, name: str) -> torch.Tensor:
        """Gemma's norms stay in fp32, where its +1 loses no bits; the others take the dtype, as transformers does."""
        if not self._arch.norm_unit_offset:
            return self._copy(f"{name}.weight")
        weight = self._weights.read(f"{name}.weight")
        return weight.to(device=self._backend.device, dtype=torch.float32, copy=True).add_(1.0)


class _Measure(_Loader):
    """The same loader over tensors that have a shape and no numbers."""

    def _into_backend(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return None

    def _copy(self, name: str) -> torch.Tensor:
        return torch.empty(self._weights.shapes[name], dtype=self._dtype, device="meta")

    def _stacked(self, names: list[str]) -> torch.Tensor:
        # Not torch.cat: of such tensors it imports torch's compiler, two seconds of it.
        shapes = [self._weights.shapes[name] for name in names]
        num_rows = sum(shape[0] for shape in shapes)
        return torch.empty((num_rows, *shapes[0][1:]), dtype=self._dtype, device="meta")

    def _norm(self, name: str) -> torch.Tensor:
        return self._copy(f"{name}.weight")


def _keeps_weights(backend: Backend) -> bool:
    """A card's linears are the tensors as they come: a tied head takes no memory of its own."""
    return hasattr(backend, "accelerator")
