"""Requests that decode side by side on the reference and on the cuda backend, token by token, over shuffled pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.backend import AttnSpec, Backend, KVPool, StepMeta
from kernels.flashinfer_backend import FlashInferBackend
from kernels.paged_kv import to_index
from kernels.torch_backend import TorchBackend
from tests.kernels.step_builder import Request, build_step

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v
NUM_MORE_TOKENS = 40
REFERENCE = TorchBackend()


class DecodingCase:
    """Contexts that grow by a token a step.

    Attributes:
        kv: The backend's pool, whose page 0 belongs to nobody.
        num_shared_pages: Leading pages that all requests have in common.
    """

    def __init__(
        self,
        backend: FlashInferBackend,
        specs: Sequence[AttnSpec],
        kv_lens: Sequence[int],
        *,
        num_shared_pages: int = 0,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._specs, self._dtype, self._page_size = tuple(specs), dtype, page_size
        self._kv_lens = list(kv_lens)
        self._generator = torch.Generator().manual_seed(0)
        self.num_shared_pages = num_shared_pages
        own = [-(-(length + NUM_MORE_TOKENS) // page_size) - num_shared_pages for length in kv_lens]
        num_pages = 1 + num_shared_pages + sum(own)
        free = (1 + np.random.default_rng(0).permutation(num_pages - 1)).tolist()
        shared = [free.pop() for _ in range(num_shared_pages)]
        self._tables = [shared + [free.pop() for _ in range(count)] for count in own]
        self.kv, self._other_kv = (
            each.alloc_kv(self._specs, num_pages=num_pages, page_size=page_size, dtype=dtype)
            for each in (backend, REFERENCE)
        )
        self._prefill()

    def next_step(self, q_lens: Sequence[int] = ()) -> tuple[StepMeta, list[Heads], list[torch.Tensor]]:
        """Return the next step, each layer's q, k and v, and what the reference makes of them.

        Args:
            q_lens: Each request's tokens, decodes first; none = one each.
        """
        more = q_lens or [1] * len(self._kv_lens)
        self._kv_lens = [length + added for length, added in zip(self._kv_lens, more, strict=True)]
        meta = self._meta(list(zip(more, self._kv_lens, strict=True)), self._tables)
        heads = self._random_heads(meta.num_tokens)
        return meta, heads, attend_layers(REFERENCE, meta, heads, self._other_kv)

    def _prefill(self) -> None:
        """Write random K and V where all contexts lie, the shared pages again for each request."""
        requests = [(length, length) for length in self._kv_lens]
        ones = sorted(range(len(requests)), key=lambda i: requests[i][0] > 1)  # decodes come first
        meta = self._meta([requests[i] for i in ones], [self._tables[i] for i in ones])
        slots = to_index(meta.slot_mapping)
        pages, places = slots // self._page_size, slots % self._page_size
        for layer, (_, k, v) in enumerate(self._random_heads(meta.num_tokens)):
            self.kv.layers[layer][pages, 0, places] = k
            self.kv.layers[layer][pages, 1, places] = v
            own = self.kv.layers[layer][pages, :, places]  # where a slot came twice, what stayed
            self._other_kv.append(layer, slots, own[:, 0], own[:, 1])

    def _meta(self, requests: list[Request], tables: list[list[int]]) -> StepMeta:
        meta = build_step(requests, tables, page_size=self._page_size)
        meta.num_common_pages = self.num_shared_pages
        return meta

    def _random_heads(self, num_tokens: int) -> list[Heads]:
        def random(num_heads: int, head_dim: int) -> torch.Tensor:
            return torch.randn(num_tokens, num_heads, head_dim, generator=self._generator).to(self._dtype)

        return [
            (
                random(spec.num_q_heads, spec.head_dim),
                random(spec.num_kv_heads, spec.head_dim),
                random(spec.num_kv_heads, spec.head_dim),
            )
            for spec in self._specs
        ]


def attend_layers(backend: Backend, meta: StepMeta, heads: Sequence[Heads], kv: KVPool) -> list[torch.Tensor]:
    """Each layer's attention of one step, [T, num_q_heads * head_dim]."""
    plan = backend.plan(meta, kv)
    return [backend.attention(plan, layer, q, k, v, kv) for layer, (q, k, v) in enumerate(heads)]
