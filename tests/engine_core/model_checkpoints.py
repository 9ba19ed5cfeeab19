"""Small random-weight checkpoints written by transformers, and requests driven through pages as the runner would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from engine_core.model.decoder import LanguageModel
from kernels.backend import StepMeta

VOCAB_SIZE = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_GEMMA3 = {
    "num_hidden_layers": 4,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 6.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}

# case -> the transformers family and what the case sets beyond SHAPE
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_scaled_biased": (
        "Llama",
        {"rope_parameters": _LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama_yarn_tied": ("Llama", {"rope_parameters": _YARN_ROPE, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 6, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": ("Gemma3", _GEMMA3),
    # transformers' class with vision forgets the soft cap; published checkpoints have none.
    "gemma3_vision": ("Gemma3Vision", {**_GEMMA3, "final_logit_softcapping": None}),
}


def save_checkpoint(directory: Path, case: str, *, head_dim: int | None = None, **save_options: Any) -> PreTrainedModel:
    """Write a checkpoint with random weights, large enough that a mistake shows. Returns the model as the oracle.

    Args:
        directory: Where.
        case: Which of CASES.
        head_dim: Instead of the case's own.
        save_options: For transformers.
    """
    model = _create_model(case, {} if head_dim is None else {"head_dim": head_dim})
    generator = torch.Generator().manual_seed(7)
    norms = {name for name, module in model.named_modules() if "norm" in type(module).__name__.lower()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.removesuffix(".weight") in norms:
                parameter.add_(0.3 * noise)  # 1 + noise, or Gemma's 0 + noise
            elif parameter.dim() == 2 and "embed" not in name:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(0.5 * noise)
    model.save_pretrained(directory, **save_options)
    return model.eval()


def _create_model(case: str, overrides: dict[str, Any]) -> PreTrainedModel:
    family, options = CASES[case]
    shape = {**SHAPE, **options, **overrides}
    if family == "Gemma3Vision":
        tokens = {"image_token_index": 96, "boi_token_index": 95, "eoi_token_index": 94, "mm_tokens_per_image": 4}
        config = transformers.Gemma3Config(
            text_config=shape, vision_config=_VISION, attn_implementation="eager", **tokens
        )
        return transformers.Gemma3ForConditionalGeneration(config)
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**shape, attn_implementation="eager")
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    return model


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits of every position: [len(token_ids), vocab]."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits


@dataclass(eq=False)
class PagedRequest:
    """One request: its tokens, its pages and how many of its tokens the pages already hold."""

    token_ids: list[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0


class PagedRun:
    """A decoder, a pool, and pages handed out in a shuffled order, so that a mixed-up table shows."""

    def __init__(self, decoder: LanguageModel, *, page_size: int, num_pages: int = 32) -> None:
        self._decoder = decoder
        self.page_size = page_size
        self._free = np.random.default_rng(3).permutation(num_pages).tolist()
        self._kv = decoder.alloc_kv(num_pages=num_pages, page_size=page_size)

    def share_prefix(self, owner: PagedRequest, token_ids: list[int]) -> PagedRequest:
        """Return a request that starts on those full pages of ``owner`` whose tokens it has, too."""
        num_pages = 0
        while (num_pages + 1) * self.page_size <= owner.num_computed and (
            owner.token_ids[: (num_pages + 1) * self.page_size] == token_ids[: (num_pages + 1) * self.page_size]
        ):
            num_pages += 1
        return PagedRequest(token_ids, owner.pages[:num_pages], num_pages * self.page_size)

    def step(
        self, work: Sequence[tuple[PagedRequest, int]], logit_rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Compute each request's next tokens in one batch; requests of one token must come first.

        Returns:
            Logits by request: of all its tokens of the step, or, with ``logit_rows``, one [R, vocab] for the batch.
        """
        for request, count in work:
            end = request.num_computed + count
            while len(request.pages) * self.page_size < end:
                request.pages.append(self._free.pop())
        meta = _build_meta(work, self.page_size, logit_rows)
        logits = self._logits(meta)
        for request, count in work:
            request.num_computed += count
        return [logits] if logit_rows is not None else list(logits.split([count for _, count in work]))

    def _logits(self, meta: StepMeta) -> torch.Tensor:
        vocab_size = self._decoder.arch.vocab_size
        logits = torch.empty(len(meta.logit_rows), vocab_size)
        first = 0
        needs_logits = np.ones(len(logits), np.bool_)
        for piece in self._decoder.compute(meta, self._kv, needs_logits=needs_logits, num_token_ids=vocab_size):
            assert piece.logits is not None
            rows = torch.from_numpy(piece.logits)
            assert torch.equal(torch.from_numpy(piece.greedy_ids).long(), rows.argmax(dim=1))
            assert piece.is_finite.all()
            logits[first : first + len(rows)] = rows
            first += len(rows)
        assert first == len(logits)
        return logits


def _build_meta(work: Sequence[tuple[PagedRequest, int]], page_size: int, logit_rows: Sequence[int] | None) -> StepMeta:
    q_lens = [count for _, count in work]
    kv_lens = [request.num_computed + count for request, count in work]
    pages = [request.pages[: -(-kv_len // page_size)] for (request, _), kv_len in zip(work, kv_lens, strict=True)]
    places = [
        (request, at) for request, count in work for at in range(request.num_computed, request.num_computed + count)
    ]
    return StepMeta(
        num_reqs=len(work),
        num_tokens=sum(q_lens),
        num_decodes=q_lens.count(1),
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        qo_indptr=_int32([0, *np.cumsum(q_lens)]),
        kv_indptr=_int32([0, *np.cumsum([len(table) for table in pages])]),
        kv_indices=_int32([page for table in pages for page in table]),
        last_page_len=_int32(
            [kv_len - (len(table) - 1) * page_size for kv_len, table in zip(kv_lens, pages, strict=True)]
        ),
        kv_lens=_int32(kv_lens),
        token_ids=_int32([request.token_ids[at] for request, at in places]),
        positions=_int32([at for _, at in places]),
        slot_mapping=_int32([request.pages[at // page_size] * page_size + at % page_size for request, at in places]),
        logit_rows=_int32(range(sum(q_lens)) if logit_rows is None else logit_rows),
    )


def _int32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(list(values), np.int32)
