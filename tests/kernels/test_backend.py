from __future__ import annotations

import pytest
import torch

from kernels.backend import AttnSpec, Backend, UnavailableBackendError, backend_names, create_backend

HOST_BACKENDS = tuple(name for name in backend_names() if name != "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a card")
def test_the_cuda_backend_says_that_there_is_no_card() -> None:
    with pytest.raises(UnavailableBackendError, match="the cuda backend needs an NVIDIA card: "):
        create_backend("cuda")


@pytest.mark.parametrize("name", HOST_BACKENDS)
def test_a_backend_is_created_by_its_name(name: str) -> None:
    backend: Backend = create_backend(name)
    assert backend.name == name
    assert backend.page_sizes
    assert backend.default_dtype in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name", HOST_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_bytes_are_known_before_a_pool_is_allocated(name: str, dtype: torch.dtype) -> None:
    backend = create_backend(name)
    specs = [AttnSpec(9, 3, 64, 0.125), AttnSpec(4, 1, 256, 0.0625)]
    for page_size in backend.page_sizes:
        kv = backend.alloc_kv(specs, num_pages=2, page_size=page_size, dtype=dtype)
        assert (kv.page_size, kv.num_pages) == (page_size, 2)
        assert kv.page_bytes == backend.kv_page_bytes(specs, page_size=page_size, dtype=dtype)
        assert kv.page_bytes == 2 * page_size * (3 * 64 + 256) * dtype.itemsize


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown backend 'tpu'; known: torch, cpu, cuda"):
        create_backend("tpu")
