"""A machine with a card, on which FlashInfer's and CUDA's stand-ins compute."""

from __future__ import annotations

from typing import Any

from engine_core.model.compute import Machine
from engine_core.survey import CudaCard, CudaSurvey
from kernels.accelerator import DeviceMemory
from kernels.flashinfer_backend import FlashInferBackend
from kernels.testing.fake_cuda import FakeAccelerator

GIB = 1 << 30
CARD = CudaCard("Fake GPU", (9, 0), GIB)
WITH_CARD = CudaSurvey("13.0", "580.65.06", (CARD,), "0.7.4")


def create_accelerator(*, total: int = GIB, taken: int = 0) -> FakeAccelerator:
    """A card with so much memory, in bytes, of which others have taken some."""
    return FakeAccelerator(memory=DeviceMemory(free=total - taken, total=total))


def create_machine(
    library: Any = None, *, accelerator: FakeAccelerator | None = None, survey: CudaSurvey = WITH_CARD
) -> Machine:
    """A machine whose every backend is the card's.

    Args:
        library: FlashInfer's stand-in; None = nothing is computed.
        accelerator: The card; None = one of a GiB.
        survey: What is found when cards are looked for.
    """
    card = accelerator or create_accelerator()
    backend = FlashInferBackend(flashinfer=library, accelerator=card, num_workspace_bytes=1 << 20)
    return Machine(survey_cuda=lambda: survey, create_backend=lambda name, options: backend)
