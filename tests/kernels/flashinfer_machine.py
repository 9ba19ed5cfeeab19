"""The cuda backend on a machine made of the two fakes."""

from __future__ import annotations

from kernels.flashinfer_backend import FlashInferBackend
from kernels.testing.fake_cuda import FakeAccelerator
from kernels.testing.fake_flashinfer import FakeFlashInfer

# What the fake demands for the shapes of these tests; the real backend's 128 MiB would be zeroed for each test.
WORKSPACE_BYTES = 32 << 20


def create_backend(*, capability: tuple[int, int] = (9, 0)) -> FlashInferBackend:
    accelerator = FakeAccelerator(capability=capability)
    return FlashInferBackend(
        flashinfer=FakeFlashInfer(accelerator), accelerator=accelerator, num_workspace_bytes=WORKSPACE_BYTES
    )
