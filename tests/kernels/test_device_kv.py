"""The device's page pool, on the CPU as its device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.device_kv import DeviceKV
from kernels.step import AttnSpec

# Layers need not be alike.
SPECS = (AttnSpec(4, 2, 64, 0.125), AttnSpec(6, 1, 128, 0.2, window_left=8), AttnSpec(4, 2, 64, 0.125))
DTYPES = (torch.bfloat16, torch.float16)
PAGE_SIZE = 4
NUM_PAGES = 7


def create_pool(dtype: torch.dtype, *, seed: int | None = 0) -> DeviceKV:
    kv = DeviceKV(SPECS, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=dtype, device=torch.device("cpu"))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for pages in kv.layers:
            pages.copy_(torch.randn(pages.shape, generator=generator))
    return kv


def assert_pages_equal(a: DeviceKV, page_a: int, b: DeviceKV, page_b: int) -> None:
    for left, right in zip(a.layers, b.layers, strict=True):
        assert torch.equal(left[page_a], right[page_b])


def test_a_layer_is_one_tensor_with_k_before_v_and_zero_at_first() -> None:
    kv = create_pool(torch.bfloat16, seed=None)
    assert [tuple(pages.shape) for pages in kv.layers] == [(7, 2, 4, 2, 64), (7, 2, 4, 1, 128), (7, 2, 4, 2, 64)]
    assert all(pages.is_contiguous() and not pages.any() for pages in kv.layers)
    assert kv.kinds == SPECS[:2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_page_bytes_counts_k_and_v_of_all_layers(dtype: torch.dtype) -> None:
    kv = create_pool(dtype)
    assert kv.page_bytes == sum(pages[0].nbytes for pages in kv.layers) == 2 * 4 * (128 + 128 + 128) * dtype.itemsize


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


@pytest.mark.parametrize("method", [DeviceKV.read_page, DeviceKV.write_page])
@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_buffer_of_another_length_is_refused(
    method: Callable[[DeviceKV, int, memoryview], None], off_by: int
) -> None:
    kv = create_pool(torch.float16)
    with pytest.raises(ValueError, match=f"{kv.page_bytes} bytes long, the buffer {kv.page_bytes + off_by}"):
        method(kv, 0, memoryview(bytearray(kv.page_bytes + off_by)))


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_pages_are_written_in_inference_mode_and_outside(made: bool, written: bool) -> None:
    with torch.inference_mode(made):
        kv = create_pool(torch.bfloat16)
    with torch.inference_mode(written):
        kv.copy_pages(np.array([1], dtype=np.int32), np.array([4], dtype=np.int32))
        kv.write_page(6, memoryview(bytes(kv.page_bytes)))
    assert torch.equal(kv.layers[0][4], kv.layers[0][1])
    assert not kv.layers[0][6].any()
