"""How much of a card's memory a step takes while it runs, reckoned from shapes. Pure.

The start measures it (device_start.py); this is what the forecast says before a weight is read, and what the start
sets aside for graphs, which can be captured only when the KV pool has taken the rest.
"""

from __future__ import annotations

from engine_core.model.arch import ArchSpec
from engine_core.model.decoder import MAX_LOGITS_BYTES, table_length

_BF16, _FP32 = 2, 4
# What the driver keeps for a batch size's graphs of some 500 kernels: their nodes and arguments.
_GRAPH_BYTES = 8 << 20
# Picking tokens by chance, device_sampler.py: logits, their weights and the noise's three; or, of the logits that are
# sorted at a time, what goes in and comes out, 16, and what torch's sort takes meanwhile.
_RACE_BYTES = 5 * _FP32
_SORT_BYTES, _MAX_SORTED_LOGITS = 16 + 32, 16 << 20


def estimate_step_bytes(arch: ArchSpec, *, num_tokens: int, num_rows: int) -> int:
    """Return the most that one step holds at once, beside weights and KV.

    In the MLP a token has its residual, its normed input, its attention's output (``q``), still q, k and v, the two
    halves of gate_up and their product: 2 * H + q + (q + 2 * kv) + 3 * I. Before it, the layer's q, k and v beside the
    last layer's: 2 * H + 2 * (q + 2 * kv). To either come its rows of the rotary tables, in fp32. At the end each row
    has logits, of which tokens are picked.

    Args:
        arch: The model.
        num_tokens: Of the step.
        num_rows: Tokens whose logits are wanted.
    """
    q, kv = arch.num_q_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    qkv, num_ropes = q + 2 * kv, 1 if arch.local_rope is None else 2
    halves = 2 * arch.hidden_size + qkv + max(q + 3 * arch.intermediate_size, qkv)
    per_token = _BF16 * halves + _FP32 * arch.head_dim * num_ropes
    rows_at_once = min(num_rows, max(1, MAX_LOGITS_BYTES // (_FP32 * arch.vocab_size)))
    return max(num_tokens * per_token, _estimate_picking(rows_at_once * arch.vocab_size))


def _estimate_picking(num_logits: int) -> int:
    return max(_RACE_BYTES * num_logits, _FP32 * num_logits + _SORT_BYTES * min(num_logits, _MAX_SORTED_LOGITS))


def count_table_bytes(arch: ArchSpec, num_positions: int) -> int:
    """Return what the rotary tables take once they reach so far."""
    num_ropes = 1 if arch.local_rope is None else 2
    return num_ropes * table_length(num_positions) * arch.head_dim * _FP32


def estimate_graph_bytes(arch: ArchSpec, graph_sizes: tuple[int, ...]) -> int:
    """Return what graphs of decoding steps keep: all share the memory of the largest one's step.

    Args:
        arch: The model.
        graph_sizes: Batch sizes that are captured; none = no graphs.
    """
    largest = max(graph_sizes, default=0)
    return estimate_step_bytes(arch, num_tokens=largest, num_rows=largest) + len(graph_sizes) * _GRAPH_BYTES
