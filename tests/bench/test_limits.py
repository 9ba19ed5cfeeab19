"""How steps are laid out for the limits bench, and what is concluded from their times."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.limits_cases import CASES, Case, ModelSize, Span, build_meta
from tests.bench.limits_report import (
    Limits,
    Rate,
    StepTime,
    build_figures,
    build_limits_table,
    build_steps_table,
    check_bars,
    judge,
)

LIMITS = Limits(2, 20e9, 1 << 28, {"bf16": Rate("tdpbf16ps", 4e12), "int8": Rate("tdpbssd", 8e12)})
SIZE = ModelSize(weight_bytes=200_000_000, num_layer_params=80_000_000, num_head_params=20_000_000)
STREAM, PREFILL = CASES[0], CASES[-1]


def lay_out(spans: list[Span], pages_per_request: int = 3) -> dict[str, list[int]]:
    meta = build_meta(spans, pages_per_request=pages_per_request, page_size=32, vocab_size=100)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "kv_lens", "positions", "logit_rows")
    return {name: getattr(meta, name).tolist() for name in names}


def test_a_decode_step_has_a_row_a_request_and_pages_of_its_own() -> None:
    assert lay_out([Span(0, 64, 65), Span(1, 64, 65)]) == {
        "qo_indptr": [0, 1, 2],
        "kv_indptr": [0, 3, 6],
        "kv_indices": [0, 1, 2, 3, 4, 5],
        "last_page_len": [1, 1],
        "kv_lens": [65, 65],
        "positions": [64, 64],
        "logit_rows": [0, 1],
    }


def test_a_chunk_of_a_prompt_ends_in_its_last_page() -> None:
    found = lay_out([Span(1, 32, 64)])
    assert found["kv_indices"] == [3, 4] and found["last_page_len"] == [32]
    assert found["positions"] == list(range(32, 64)) and found["logit_rows"] == [31]


def test_tokens_go_to_the_slots_of_their_requests_pages() -> None:
    meta = build_meta([Span(0, 30, 33), Span(2, 64, 65)], pages_per_request=3, page_size=32, vocab_size=100)
    slots = meta.slot_mapping
    assert slots.tolist() == [30, 31, 32, 6 * 32 + 64]
    for slot, request, position in zip(slots, (0, 0, 0, 1), meta.positions, strict=True):
        pages = meta.kv_indices[meta.kv_indptr[request] :]
        assert slot == pages[position // 32] * 32 + position % 32
    assert meta.num_decodes == 1 and meta.max_q_len == 3 and meta.max_kv_len == 65


def test_all_arrays_are_what_kernels_read() -> None:
    for case in CASES:
        meta = build_meta(case.spans(), pages_per_request=case.pages_per_request(64), page_size=64, vocab_size=49152)
        arrays = [value for name in meta.__slots__ if isinstance(value := getattr(meta, name), np.ndarray)]
        assert len(arrays) == 9 and all(array.dtype == np.int32 for array in arrays)
        assert meta.num_tokens == case.num_tokens == len(meta.token_ids)


def test_the_context_is_computed_in_steps_that_the_engine_would_take() -> None:
    fills = list(Case("", num_requests=2, context=1000).fills())
    assert fills == [[Span(0, 0, 512)], [Span(0, 512, 1000)], [Span(1, 0, 512)], [Span(1, 512, 1000)]]
    assert list(PREFILL.fills()) == []


def test_only_a_requests_last_row_goes_through_the_head() -> None:
    assert SIZE.operations(STREAM) == 2 * 100_000_000
    assert SIZE.operations(PREFILL) == 2 * (512 * 80_000_000 + 20_000_000)


def test_shares_are_of_the_time_that_reading_or_multiplying_alone_would_take() -> None:
    stream, prefill = judge(LIMITS, SIZE, {STREAM: StepTime(0.0125), PREFILL: StepTime(0.05)})
    assert stream.read_share == pytest.approx(0.01 / 0.0125)
    assert prefill.rate_share == pytest.approx(SIZE.operations(PREFILL) / 4e12 / 0.05)


def test_bars_are_of_one_stream_and_of_a_prompt() -> None:
    bars = check_bars(judge(LIMITS, SIZE, {STREAM: StepTime(0.0125), PREFILL: StepTime(0.03)}))
    assert bars["read_share_of_one_row"] == {"reached": pytest.approx(0.8), "required": 0.85, "is_met": False}
    assert bars["rate_share_of_prefill"]["is_met"] and bars["rate_share_of_prefill"]["goal"] == 0.6
    assert check_bars([]) == {}


def test_the_better_of_two_probes_counts_figure_by_figure() -> None:
    other = Limits(2, 25e9, 0, {"bf16": Rate("tdpbf16ps", 3e12), "int8": Rate("tdpbssd", 9e12)})
    best = LIMITS.best_of(other)
    assert best.read_bytes_per_s == 25e9 and best.huge_page_bytes == 1 << 28
    assert [rate.operations_per_s for rate in best.rates.values()] == [4e12, 9e12]


def test_the_probe_may_have_no_int8() -> None:
    found = {
        "num_threads": 1,
        "read_bytes_per_s": 1e10,
        "huge_page_bytes": 0,
        "bf16": {"instruction": "fp32 mul and add", "operations_per_s": 6e10},
        "int8": None,
    }
    limits = Limits.of(found)
    assert list(limits.rates) == ["bf16"]
    assert (
        build_limits_table(limits).to_markdown().splitlines()[-1] == "| multiply bf16 | fp32 mul and add | 0.06 T/s |"
    )


def test_a_step_is_shown_with_its_shares_and_phases() -> None:
    verdicts = judge(LIMITS, SIZE, {STREAM: StepTime(0.0125, {"qkv": 0.002, "head": 0.003})})
    assert build_steps_table(verdicts).to_markdown().splitlines()[2] == (
        "| 1 row, context 64 | 12.50 | 80% | 0% | 2.00 | 3.00 |"
    )
    figures = build_figures(LIMITS, SIZE, verdicts)
    assert figures["steps"][STREAM.name]["phase_seconds"] == {"qkv": 0.002, "head": 0.003}
    assert figures["limits"]["bf16"] == {"instruction": "tdpbf16ps", "operations_per_s": 4e12}
