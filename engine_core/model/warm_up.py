"""A step or two before the first request, for what a CPU's kernels do once."""

from __future__ import annotations

import numpy as np

from engine_core.model.decoder import LanguageModel
from kernels.backend import KVPool, StepMeta


def warm_up(model: LanguageModel, kv: KVPool) -> None:
    """Run every kernel path once, on the null page, before anybody waits for it."""
    for num_tokens in (1, kv.page_size):
        span = np.arange(num_tokens, dtype=np.int32)
        bounds = np.array([0, num_tokens], np.int32)
        meta = StepMeta(
            num_reqs=1,
            num_tokens=num_tokens,
            num_decodes=int(num_tokens == 1),
            max_q_len=num_tokens,
            max_kv_len=num_tokens,
            qo_indptr=bounds,
            kv_indptr=np.array([0, 1], np.int32),
            kv_indices=np.zeros(1, np.int32),
            last_page_len=bounds[1:],
            kv_lens=bounds[1:],
            token_ids=np.zeros(num_tokens, np.int32),
            positions=span,
            slot_mapping=span,
            logit_rows=span[-1:],
        )
        for needs_logits in (False, True):
            rows = model.compute(meta, kv, needs_logits=np.array([needs_logits]), num_token_ids=model.arch.vocab_size)
            list(rows)
