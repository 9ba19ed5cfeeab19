"""The one forward pass, for every family: what to compute is ArchSpec's, how is the backend's.

Knows no files, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.model.arch import ArchSpec, attn_specs
from engine_core.model.rope import RopeSpec, build_cos_sin
from engine_core.model.sampler import are_finite
from kernels.backend import AttnSpec, Backend, IntArray, KVPool, StepMeta
from kernels.fused import HeadRows

_FIRST_TABLE_POSITIONS = 4096
# Logits that exist at once, in fp32: a step of 8,192 tokens whose prompt's logprobs are wanted has 5 GB over 152k ids.
MAX_LOGITS_BYTES = 256 << 20


class LanguageModel(Protocol):
    """What the runner and the engine need of a loaded model, whoever computes it."""

    arch: ArchSpec
    weights_bytes: int

    def kv_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers, without allocating."""

    def alloc_kv(self, *, num_pages: int, page_size: int) -> KVPool:
        """Allocate pages for all layers."""

    def compute(
        self, meta: StepMeta, kv: KVPool, *, needs_logits: NDArray[np.bool_], num_token_ids: int
    ) -> Iterator[HeadRows]:
        """Compute one step: append its tokens' K and V to the pages, and yield what the head says, in pieces.

        Args:
            meta: The batch.
            kv: From alloc_kv().
            needs_logits: [R], for each of ``meta.logit_rows``, whether somebody reads its logits.
            num_token_ids: Ids that may be picked; the rest of the vocabulary is padding.

        Yields:
            The rows in order: in one piece, unless their logits are very many. A piece's logits are there where one of
            its rows needs them, and gone when the next piece is asked for.
        """


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms: [H] or [head_dim], Gemma's in fp32 with its offset added; linears: packed by the backend.

    Attributes:
        input_norm: Before attention.
        qkv: q, k and v stacked: H -> (num_q_heads + 2 * num_kv_heads) * head_dim.
        q_norm: On each head of q, or None.
        k_norm: On each head of k, or None.
        o: Attention's output projection.
        attn_post_norm: On attention's output, or None.
        mlp_norm: Before the MLP.
        gate_up: Gate and up stacked: H -> 2 * I.
        down: I -> H.
        mlp_post_norm: On the MLP's output, or None.
    """

    input_norm: torch.Tensor
    qkv: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Any
    attn_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Any
    down: Any
    mlp_post_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder.

    Attributes:
        embedding: [vocab_size, H]; its dtype is the decoder's.
        layers: In order.
        final_norm: [H].
        lm_head: H -> vocab_size, packed.
        num_bytes: Memory that embedding and linears take; a tied head counts, since it is packed apart.
    """

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    lm_head: Any
    num_bytes: int


class Decoder:
    """A loaded model.

    Args:
        arch: What it is.
        backend: What computes.
        weights: Packed by the same backend.

    Attributes:
        arch: As given.
        layer_specs: What the KV pool must be allocated for, layer by layer.
        dtype: Of the hidden states, hence of the KV pool.
        weights_bytes: Memory that the weights take.
    """

    def __init__(self, arch: ArchSpec, backend: Backend, weights: DecoderWeights) -> None:
        self.arch = arch
        self.layer_specs: tuple[AttnSpec, ...] = attn_specs(arch)
        self.dtype = weights.embedding.dtype
        self.weights_bytes = weights.num_bytes
        self._backend = backend
        self._weights = weights
        self._heads = (arch.num_q_heads, arch.num_kv_heads, arch.num_kv_heads)
        # Rounded to the dtype that multiplies, as Gemma was trained: in bf16 sqrt(640) is 25.25.
        self._embed_scale = torch.tensor(arch.embed_scale).to(self.dtype).item()
        has_local = arch.local_rope is not None
        ropes = (arch.rope,) if arch.local_rope is None else (arch.rope, arch.local_rope)
        self._rope_of_layer = [int(has_local and window >= 0) for window in arch.windows]
        self._cos_sin = [CosSinTable(rope, arch.head_dim, backend.device) for rope in ropes]

    def kv_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers, without allocating."""
        return self._backend.kv_page_bytes(self.layer_specs, page_size=page_size, dtype=self.dtype)

    def alloc_kv(self, *, num_pages: int, page_size: int) -> KVPool:
        """Allocate pages for all layers."""
        return self._backend.alloc_kv(self.layer_specs, num_pages=num_pages, page_size=page_size, dtype=self.dtype)

    def compute(
        self, meta: StepMeta, kv: KVPool, *, needs_logits: NDArray[np.bool_], num_token_ids: int
    ) -> Iterator[HeadRows]:
        """Compute one step; see LanguageModel. Logits are there for every row: the head gives nothing less."""
        for padded in self.iter_logits(self.forward(meta, kv)):
            logits: NDArray[np.float32] = padded.cpu().contiguous().numpy()
            del padded
            known = logits[:, :num_token_ids]
            yield HeadRows(known.argmax(axis=1).astype(np.int32), are_finite(known), logits)
            del logits, known  # the next ones take their place

    @torch.inference_mode()
    def forward(self, meta: StepMeta, kv: KVPool) -> torch.Tensor:
        """Compute one step: append its tokens' K and V to the pages, return the last hidden states that are wanted.

        Args:
            meta: The batch.
            kv: Pages allocated by the decoder's backend for ``layer_specs`` in ``dtype``.

        Returns:
            [R, H], for ``meta.logit_rows``: what iter_logits() takes.
        """
        self.reserve_positions(meta.max_kv_len)
        return self.hidden(
            self._to_device(meta.token_ids),
            self._to_device(meta.positions),
            self._to_device(meta.logit_rows),
            self._backend.plan(meta, kv),
            kv,
        )

    def reserve_positions(self, num_positions: int) -> None:
        """Have the rotary tables reach so far. A captured step reads the ones that were there when it was captured."""
        for table in self._cos_sin:
            table.grow(num_positions)

    @torch.inference_mode()
    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, plan: Any, kv: KVPool
    ) -> torch.Tensor:
        """Compute one step from what is on the device already, without waiting for it.

        Args:
            token_ids: [T].
            positions: [T], within reserve_positions().
            logit_rows: [R].
            plan: The backend's, of this step.
            kv: See forward().

        Returns:
            [R, H]; see forward().
        """
        backend, arch, weights = self._backend, self.arch, self._weights
        eps = arch.rms_norm_eps
        cos_sin = [table.values.index_select(0, positions) for table in self._cos_sin]
        residual = weights.embedding.index_select(0, token_ids)
        if arch.embed_scale != 1.0:
            residual.mul_(self._embed_scale)
        x = backend.rmsnorm(residual, weights.layers[0].input_norm, eps)
        for index, layer in enumerate(weights.layers):
            if index > 0:
                backend.add_rmsnorm_(x, residual, layer.input_norm, eps)
            q, k, v = self._qkv(layer, x, cos_sin[self._rope_of_layer[index]])
            x = backend.attention(plan, index, q, k, v, kv)
            if index == arch.num_layers - 1:
                # Every token's K and V are stored now; the rest is computed only for rows that someone reads.
                x, residual = x.index_select(0, logit_rows), residual.index_select(0, logit_rows)
                if len(x) == 0:
                    return residual
            x = self._mlp(layer, x, residual)
        backend.add_rmsnorm_(x, residual, weights.final_norm, eps)
        return x

    @torch.inference_mode()
    def iter_logits(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits of all rows, [n, vocab_size] fp32 at a time: in one piece, unless they are very many.

        Args:
            hidden: [R, H], from forward().
        """
        max_rows = max(1, MAX_LOGITS_BYTES // (4 * self.arch.vocab_size))
        for first in range(0, len(hidden), max_rows):
            yield self.logits(hidden[first : first + max_rows])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the head to rows of forward(): [n, H] -> [n, vocab_size] fp32."""
        logits = self._backend.linear(hidden, self._weights.lm_head).float()
        cap = self.arch.final_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _qkv(
        self, layer: LayerWeights, x: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v, views of one [T, num_q_heads + 2 * num_kv_heads, head_dim]; q and k normed and rotated."""
        qkv = self._backend.linear(x, layer.qkv)
        q, k, v = qkv.view(len(x), -1, self.arch.head_dim).split_with_sizes(self._heads, 1)
        self._backend.qk_norm_rope_(q, k, layer.q_norm, layer.k_norm, cos_sin, self.arch.rms_norm_eps)
        return q, k, v

    def _mlp(self, layer: LayerWeights, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Project attention's output into ``residual`` and return what the MLP adds to it, [T, H]."""
        backend, eps = self._backend, self.arch.rms_norm_eps
        x = backend.linear(x, layer.o)
        if layer.attn_post_norm is not None:
            x = backend.rmsnorm(x, layer.attn_post_norm, eps)
        backend.add_rmsnorm_(x, residual, layer.mlp_norm, eps)
        x = backend.linear(backend.act_mul(backend.linear(x, layer.gate_up), self.arch.activation), layer.down)
        if layer.mlp_post_norm is not None:
            x = backend.rmsnorm(x, layer.mlp_post_norm, eps)
        return x

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._backend.device)


def table_length(num_positions: int) -> int:
    """Return how many positions a rope's table has once it reaches so far."""
    return max(_FIRST_TABLE_POSITIONS, 1 << (num_positions - 1).bit_length())


class CosSinTable:
    """One rope's table, grown to the longest context seen: a 128k context would cost 64 MiB and more at load.

    Attributes:
        values: [num_positions, head_dim] fp32.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, device: str = "cpu") -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._device = device
        self.values = self._build(_FIRST_TABLE_POSITIONS)

    def grow(self, num_positions: int) -> bool:
        """Make room for so many positions; return whether the table is another one now."""
        if num_positions <= len(self.values):
            return False
        self.values = self._build(table_length(num_positions))
        return True

    def _build(self, num_positions: int) -> torch.Tensor:
        return build_cos_sin(self._rope, self._head_dim, num_positions).to(self._device)
