from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.backend import AttnSpec
from kernels.paged_kv import PagedKV, page_bytes, to_index

# Layers need not be alike.
SPECS = (AttnSpec(4, 2, 16, 0.25), AttnSpec(6, 1, 24, 0.2, window_left=8))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE_SIZE = 4
NUM_PAGES = 7


def create_pool(dtype: torch.dtype, *, seed: int | None = 0) -> PagedKV:
    kv = PagedKV(SPECS, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=dtype)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        slots = torch.arange(NUM_PAGES * PAGE_SIZE)
        for layer, spec in enumerate(SPECS):
            shape = (len(slots), spec.num_kv_heads, spec.head_dim)
            k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            kv.append(layer, slots, k, v)
    return kv


def page_tensors(kv: PagedKV, page: int) -> list[torch.Tensor]:
    return [part for layer in range(len(SPECS)) for part in kv.gather(layer, torch.tensor([page]))]


def assert_pages_equal(a: PagedKV, page_a: int, b: PagedKV, page_b: int) -> None:
    for left, right in zip(page_tensors(a, page_a), page_tensors(b, page_b), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_page_bytes_counts_k_and_v_of_all_layers(dtype: torch.dtype) -> None:
    kv = create_pool(dtype)
    held = sum(part.nbytes for part in page_tensors(kv, 0))
    assert kv.page_bytes == page_bytes(SPECS, page_size=PAGE_SIZE, dtype=dtype) == held


def test_pages_start_as_zeros() -> None:
    kv = create_pool(torch.bfloat16, seed=None)
    assert all(not part.any() for page in range(NUM_PAGES) for part in page_tensors(kv, page))


def test_append_then_gather_returns_the_tokens_in_page_order() -> None:
    kv = create_pool(torch.float32, seed=None)
    k = torch.randn(6, 2, 16)
    v = torch.randn(6, 2, 16)
    # Six tokens over page 5, then the first half of page 2.
    kv.append(0, torch.tensor([20, 21, 22, 23, 8, 9]), k, v)
    keys, values = kv.gather(0, torch.tensor([5, 2]))
    assert torch.equal(keys[:6], k)
    assert torch.equal(values[:6], v)
    assert not keys[6:].any()
    assert all(not part.any() for part in kv.gather(1, torch.arange(NUM_PAGES)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_pages_copies_all_layers_and_nothing_else(dtype: torch.dtype) -> None:
    kv, before = create_pool(dtype), create_pool(dtype)
    kv.copy_pages(np.array([1, 6], dtype=np.int32), np.array([4, 0], dtype=np.int32))
    sources = {4: 1, 0: 6}
    for page in range(NUM_PAGES):
        assert_pages_equal(kv, page, before, sources.get(page, page))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_survives_the_way_through_bytes(dtype: torch.dtype) -> None:
    source, target, before = create_pool(dtype), create_pool(dtype, seed=1), create_pool(dtype, seed=1)
    buffer = bytearray(source.page_bytes)
    source.read_page(3, memoryview(buffer))
    target.write_page(5, memoryview(bytes(buffer)))  # read-only bytes do
    assert_pages_equal(target, 5, source, 3)
    for page in set(range(NUM_PAGES)) - {5}:
        assert_pages_equal(target, page, before, page)


def test_page_bytes_survive_bit_for_bit() -> None:
    kv = create_pool(torch.bfloat16)
    data = np.random.default_rng(0).integers(0, 256, kv.page_bytes, dtype=np.uint8).tobytes()  # NaNs included
    kv.write_page(6, memoryview(data))
    out = bytearray(kv.page_bytes)
    kv.read_page(6, memoryview(out))
    assert bytes(out) == data


@pytest.mark.parametrize("method", [PagedKV.read_page, PagedKV.write_page])
@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_buffer_of_another_length_is_refused(method: Callable[[PagedKV, int, memoryview], None], off_by: int) -> None:
    kv = create_pool(torch.float32)
    with pytest.raises(ValueError, match=f"{kv.page_bytes} bytes long, the buffer {kv.page_bytes + off_by}"):
        method(kv, 0, memoryview(bytearray(kv.page_bytes + off_by)))


def test_to_index_copies_so_that_the_caller_may_reuse_its_array() -> None:
    ids = np.array([3, 1], dtype=np.int32)
    index = to_index(ids)
    ids[:] = 0
    assert index.tolist() == [3, 1]
    assert index.dtype == torch.int64
