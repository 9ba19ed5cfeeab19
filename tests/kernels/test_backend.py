from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels import flashinfer_backend
from kernels.backend import AttnSpec, Backend, UnavailableBackendError, backend_names, create_backend

HOST_BACKENDS = tuple(name for name in backend_names() if name != "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a card")
def test_the_cuda_backend_says_that_there_is_no_card() -> None:
    with pytest.raises(UnavailableBackendError, match="the cuda backend needs an NVIDIA card: "):
        create_backend("cuda")


@pytest.mark.parametrize("error", [ImportError("No module named 'tvm_ffi'"), OSError(30, "Read-only file system")])
def test_the_cuda_backend_says_why_flashinfer_is_not_imported(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "1")  # create_backend() sets it
    monkeypatch.setattr(flashinfer_backend, "CudaAccelerator", lambda: None)
    monkeypatch.setattr(flashinfer_backend, "importlib", SimpleNamespace(import_module=fail))
    with pytest.raises(UnavailableBackendError, match=r"needs flashinfer, and cannot import it: .*(tvm_ffi|Read-only)"):
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
