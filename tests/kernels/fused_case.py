"""Small models with random weights, for the C++ kernels and, layer by layer in fp32, for the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize

from engine_core.model.arch import ArchSpec
from engine_core.model.checkpoint import Checkpoint, expected_shapes
from engine_core.model.decoder import LanguageModel
from engine_core.model.fused_decoder import FusedDecoder
from engine_core.model.fused_loader import load_fused
from engine_core.model.loader import load_decoder
from engine_core.model.rope import RopeSpec
from engine_core.model.weights import GenerationDefaults, StoredMatrix
from kernels.backend import KVPool, StepMeta
from kernels.cpu_backend import CpuKernels
from kernels.fused import HeadRows, Storage, WeightRows
from kernels.torch_backend import TorchBackend
from tests.kernels.cpu_machines import Bytes, ggml_kind, library, random_blocks, rows_of

_PLAIN = ArchSpec(
    architecture="Test",
    vocab_size=203,
    hidden_size=96,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=144,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    activation="silu",
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    norm_unit_offset=False,
    post_norms=False,
    embed_scale=1.0,
    sm_scale=32**-0.5,
    attn_soft_cap=0.0,
    final_soft_cap=0.0,
    windows=(-1, -1),
    rope=RopeSpec(10_000.0),
    local_rope=None,
)


def create_arch(**overrides: Any) -> ArchSpec:
    """A two-layer model; sm_scale goes with head_dim."""
    arch = replace(_PLAIN, **overrides)
    return arch if "sm_scale" in overrides else replace(arch, sm_scale=arch.head_dim**-0.5)


@dataclass
class MemorySource:
    """A WeightSource of tensors that bf16 holds exactly, some of them as stored blocks."""

    shapes: Mapping[str, tuple[int, ...]]
    blocks: dict[str, tuple[Bytes, Storage]] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def read(self, name: str) -> torch.Tensor:
        if name in self.blocks:
            data, storage = self.blocks[name]
            return torch.from_numpy(dequantize(data, ggml_kind(storage)))
        return self.tensors[name]

    def read_stored(self, name: str) -> StoredMatrix:
        if name in self.blocks:
            data, storage = self.blocks[name]
            return StoredMatrix(rows_of(data, storage, self.shapes[name][1]))
        return StoredMatrix(WeightRows.of(self.tensors[name]))


def create_checkpoint(
    arch: ArchSpec, *, storage: Storage | Sequence[Storage] | None = None, seed: int = 0
) -> Checkpoint:
    """Random weights; matrices are stored blocks where a storage is given, of several kinds in turn."""
    shapes = expected_shapes(arch)
    source = MemorySource(shapes)
    kinds = [storage] if isinstance(storage, Storage) else list(storage or ())
    generator = torch.Generator().manual_seed(seed)
    for index, (name, shape) in enumerate(shapes.items()):
        if kinds and len(shape) == 2:
            kind = kinds[index % len(kinds)]
            source.blocks[name] = (random_blocks(kind, *shape, seed=seed + index, spread=_spread(name, shape)), kind)
            continue
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            tensor = noise * _spread(name, shape)
        elif name.endswith("norm.weight"):
            tensor = 0.2 * noise + (0.0 if arch.norm_unit_offset else 1.0)
        else:
            tensor = 0.3 * noise
        source.tensors[name] = tensor.to(torch.bfloat16)
    return Checkpoint(Path("random"), arch, source, GenerationDefaults())


def _spread(name: str, shape: tuple[int, ...]) -> float:
    return 0.05 if "embed" in name else 1.5 / shape[1] ** 0.5


def load_kernels(
    checkpoint: Checkpoint, isa: str, *, num_threads: int = 1, quantization: str = "auto", kv_dtype: str = "bf16"
) -> FusedDecoder:
    kernels = CpuKernels(library(), isa=isa, num_threads=num_threads)
    return load_fused(checkpoint, kernels, quantization=quantization, kv_dtype=kv_dtype, on_progress=lambda *_: None)


def load_reference(checkpoint: Checkpoint) -> LanguageModel:
    return load_decoder(checkpoint, TorchBackend(), torch.float32, lambda *_: None)


@dataclass(eq=False)
class Prompt:
    """A request: its tokens, its pages, and how many tokens the pages hold."""

    token_ids: list[int]
    pages: list[int]
    num_computed: int = 0


class Run:
    """A model over pages of its own, driven step by step."""

    def __init__(self, model: LanguageModel, *, page_size: int = 32, num_pages: int = 64) -> None:
        self.model = model
        self.page_size = page_size
        self.kv: KVPool = model.alloc_kv(num_pages=num_pages, page_size=page_size)
        self._free = np.random.default_rng(3).permutation(num_pages).tolist()
        if model.arch.head_dim % 32 == 0:  # else pages have padding, which nobody ever writes and which stays zero
            _poison(self.kv)

    def sequence(self, token_ids: Sequence[int], shared: Prompt | None = None, num_shared_pages: int = 0) -> Prompt:
        """A request with pages for all its tokens; the first may be another's."""
        pages = [] if shared is None else shared.pages[:num_shared_pages]
        num_pages = -(-len(token_ids) // self.page_size)
        pages = pages + [self._free.pop() for _ in range(num_pages - len(pages))]
        return Prompt(list(token_ids), pages, num_shared_pages * self.page_size)

    def step(self, work: Sequence[tuple[Prompt, int]], *, num_common_pages: int = 0) -> list[np.ndarray[Any, Any]]:
        """Compute each request's next tokens; return all their logits, [count, vocab] by request."""
        meta = self.meta(work)
        meta.num_common_pages = num_common_pages
        rows = self.head(meta)
        assert rows.logits is not None
        assert np.array_equal(rows.greedy_ids, rows.logits.argmax(axis=1))
        assert rows.is_finite.all()
        bounds = np.cumsum([count for _, count in work])[:-1]
        for sequence, count in work:
            sequence.num_computed += count
        return np.split(rows.logits, bounds)

    def head(self, meta: StepMeta, *, needs_logits: bool = True, num_token_ids: int | None = None) -> HeadRows:
        wanted = np.full(len(meta.logit_rows), needs_logits)
        num_token_ids = num_token_ids or self.model.arch.vocab_size
        (rows,) = self.model.compute(meta, self.kv, needs_logits=wanted, num_token_ids=num_token_ids)
        logits = None if rows.logits is None else rows.logits.copy()
        return HeadRows(rows.greedy_ids, rows.is_finite, logits)

    def meta(self, work: Sequence[tuple[Prompt, int]]) -> StepMeta:
        q_lens = [count for _, count in work]
        kv_lens = [sequence.num_computed + count for sequence, count in work]
        tables = [
            sequence.pages[: -(-kv_len // self.page_size)] for (sequence, _), kv_len in zip(work, kv_lens, strict=True)
        ]
        places = [(each, at) for each, count in work for at in range(each.num_computed, each.num_computed + count)]
        slots = [each.pages[at // self.page_size] * self.page_size + at % self.page_size for each, at in places]
        return StepMeta(
            num_reqs=len(work),
            num_tokens=len(places),
            num_decodes=q_lens.count(1),
            max_q_len=max(q_lens),
            max_kv_len=max(kv_lens),
            qo_indptr=_int32([0, *np.cumsum(q_lens)]),
            kv_indptr=_int32([0, *np.cumsum([len(table) for table in tables])]),
            kv_indices=_int32([page for table in tables for page in table]),
            last_page_len=_int32([(kv_len - 1) % self.page_size + 1 for kv_len in kv_lens]),
            kv_lens=_int32(kv_lens),
            token_ids=_int32([each.token_ids[at] for each, at in places]),
            positions=_int32([at for _, at in places]),
            slot_mapping=_int32(slots),
            logit_rows=_int32(range(len(places))),
        )


def random_tokens(num: int, *, seed: int = 0, vocab_size: int = 203) -> list[int]:
    token_ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, num).tolist()
    return token_ids


def _poison(kv: KVPool) -> None:
    """Fill all pages with what gives NaN, in any format, where a slot is read that nobody wrote."""
    nan = memoryview(b"\xff" * kv.page_bytes)
    for page in range(kv.num_pages):
        kv.write_page(page, nan)


def _int32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(list(values), np.int32)
