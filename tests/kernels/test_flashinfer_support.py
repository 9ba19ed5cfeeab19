"""What is refused, which batches are captured, and how much of a prefix is shared: plain rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.backend import UnsupportedModelError
from kernels.flashinfer_support import check_model, graph_sizes, num_shared_pages
from tests.kernels.attention_case import create_spec
from tests.kernels.step_builder import Request, build_step

BF16 = torch.bfloat16


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_there_are_kernels_for_is_let_in(head_dim: int, dtype: torch.dtype) -> None:
    check_model([create_spec(head_dim=head_dim, window_left=7, soft_cap=2.0)], dtype, (9, 0))


@pytest.mark.parametrize("head_dim", [80, 96, 512])
def test_other_heads_are_refused_with_those_that_work(head_dim: int) -> None:
    specs = [create_spec(), create_spec(head_dim=head_dim)]
    with pytest.raises(UnsupportedModelError, match=f"heads of 64, 128, 256, and this model's have {head_dim}"):
        check_model(specs, BF16, (9, 0))


def test_fp32_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="in bfloat16 or float16, not in float32"):
        check_model([create_spec()], torch.float32, (9, 0))


def test_bf16_needs_a_card_that_multiplies_it() -> None:
    check_model([create_spec()], torch.float16, (7, 5))
    check_model([create_spec()], BF16, (8, 0))
    with pytest.raises(UnsupportedModelError, match=r"bfloat16 needs a card of compute capability 8\.0, .* has 7\.5"):
        check_model([create_spec()], BF16, (7, 5))


def test_query_heads_must_divide_among_key_heads() -> None:
    with pytest.raises(UnsupportedModelError, match="5 query heads cannot share 2"):
        check_model([replace(create_spec(), num_q_heads=5)], BF16, (9, 0))


@pytest.mark.parametrize(
    ("max_num_reqs", "expected"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20)), (24, (1, 2, 4, 8, 16, 24))],
)
def test_graph_sizes_end_with_the_largest_batch(max_num_reqs: int, expected: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_reqs) == expected


def test_every_batch_fits_a_graph_of_at_most_seven_rows_more() -> None:
    sizes = graph_sizes(256)
    assert len(sizes) == 35
    assert all(min(size for size in sizes if size >= batch) - batch < 8 for batch in range(1, 257))


def count_shared(requests: list[Request], num_common_pages: int, *, window_left: int = -1, page_size: int = 16) -> int:
    tables = [list(range(100)) for _ in requests]
    meta = build_step(requests, tables, page_size=page_size)
    meta.num_common_pages = num_common_pages
    return num_shared_pages(meta, [create_spec(), create_spec(window_left=window_left)], page_size, 1 << 30)


def test_a_prefix_is_shared_from_256_tokens_and_eight_requests_on() -> None:
    assert count_shared([(1, 400)] * 8, 16) == 16
    assert count_shared([(1, 400)] * 7, 16) == 0
    assert count_shared([(1, 400)] * 8, 15) == 0
    assert count_shared([(1, 400)] * 8, 8, page_size=32) == 8


def test_no_prefix_is_shared_where_a_layer_has_a_window() -> None:
    assert count_shared([(1, 400)] * 8, 16, window_left=1000) == 0


@pytest.mark.parametrize(
    ("shortest", "expected"),
    # 320 tokens are 20 pages; the last one is the query's own from its first token on.
    [((1, 320), 19), ((1, 321), 20), ((64, 320), 16), ((63, 320), 16), ((65, 320), 0), ((320, 320), 0)],
)
def test_a_shared_page_lies_before_every_query(shortest: Request, expected: int) -> None:
    q_len, kv_len = shortest
    num_shared = count_shared([(1, 400)] * 7 + [shortest] if q_len > 1 else [shortest] + [(1, 400)] * 7, 25)
    assert num_shared == expected
    assert num_shared * 16 <= kv_len - q_len
    assert num_shared < -(-kv_len // 16)
