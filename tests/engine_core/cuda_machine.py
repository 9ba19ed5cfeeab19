"""A machine with a card, on which FlashInfer's and CUDA's stand-ins compute."""

from __future__ import annotations

from engine_core.model.compute import Machine
from engine_core.survey import CudaCard, CudaSurvey
from kernels.accelerator import DeviceMemory
from kernels.flashinfer_backend import FlashInferBackend
from kernels.testing.fake_cuda import FakeAccelerator
from kernels.testing.fake_flashinfer import FakeFlashInfer

GIB = 1 << 30
WORKSPACE_BYTES = 32 << 20  # the least that the stand-in takes
CARD = CudaCard("Fake GPU", (9, 0), GIB)
WITH_CARD = CudaSurvey("13.0", "580.65.06", (CARD,), "0.7.4")


def create_accelerator(*, total: int = GIB, taken: int = 0) -> FakeAccelerator:
    """A card with so much memory, in bytes, of which others have taken some."""
    return FakeAccelerator(memory=DeviceMemory(free=total - taken, total=total))


def create_machine(accelerator: FakeAccelerator | None = None, survey: CudaSurvey = WITH_CARD) -> Machine:
    """A machine whose every backend is the card's.

    Args:
        accelerator: The card; None = one of a GiB.
        survey: What is found when cards are looked for.
    """
    card = accelerator or create_accelerator()
    library = FakeFlashInfer(card)
    backend = FlashInferBackend(flashinfer=library, accelerator=card, num_workspace_bytes=WORKSPACE_BYTES)
    return Machine(survey_cuda=lambda: survey, create_backend=lambda name, options: backend)
