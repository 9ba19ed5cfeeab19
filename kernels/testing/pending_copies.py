"""Copies between pinned and device memory that a program has queued and not yet waited for, and what breaks them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.testing.device_memory import Span, fill_with_garbage, is_same, span_of
from kernels.testing.host_waits import FakeCudaError


@dataclass(frozen=True, slots=True)
class Upload:
    """A copy to the device.

    Attributes:
        tick: Its place on the compute stream.
        source: Pinned.
        value: What lay there when it was queued.
    """

    tick: int
    source: torch.Tensor
    value: torch.Tensor

    def check(self) -> None:
        """Check that the device will read what was meant."""
        if not is_same(self.source, self.value):
            raise FakeCudaError(
                "pinned memory was written while an upload still read it: wait for the upload's event before"
            )


@dataclass(frozen=True, slots=True)
class Download:
    """A copy from the device.

    Attributes:
        tick: Its place on the side stream.
        source: Device memory.
        target: Pinned. Garbage until the copy is waited for.
        value: What will be there.
        garbage: What is there until then.
    """

    tick: int
    source: torch.Tensor
    target: torch.Tensor
    value: torch.Tensor
    garbage: torch.Tensor

    def check(self) -> None:
        """Check that nobody has written either side."""
        if not is_same(self.source, self.value):
            raise _overwritten()
        if not is_same(self.target, self.garbage):
            raise FakeCudaError("pinned memory was written while a download wrote it: wait for the download's event")


class PendingCopies:
    """What is under way."""

    def __init__(self) -> None:
        self._uploads: list[Upload] = []
        self._downloads: list[Download] = []

    def __len__(self) -> int:
        return len(self._uploads) + len(self._downloads)

    def upload(self, tick: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin a copy. Device memory changes at once: all that reads it comes later on the same stream.

        Raises:
            FakeCudaError: A download under way writes the source, or reads the target.
        """
        if any(span_of(source).overlaps(span_of(download.target)) for download in self._downloads):
            raise FakeCudaError("an upload reads memory that a download still writes: wait for the download's event")
        self.check_write(span_of(target))
        target.copy_(source)
        self._uploads.append(Upload(tick, source, source.clone()))

    def download(self, tick: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin a copy, and hide its target until finish().

        Raises:
            FakeCudaError: Another copy under way uses the target.
        """
        in_use = [copy.source for copy in self._uploads] + [copy.target for copy in self._downloads]
        if any(span_of(target).overlaps(span_of(other)) for other in in_use):
            raise FakeCudaError("a download writes memory that another copy under way uses: wait for its event")
        fill_with_garbage(target)
        self._downloads.append(Download(tick, source, target, source.clone(), target.clone()))

    def check(self) -> None:
        """Check each copy.

        Raises:
            FakeCudaError: Memory has been written under it. All are forgotten.
        """
        try:
            for upload in self._uploads:
                upload.check()
            for download in self._downloads:
                download.check()
        except FakeCudaError:
            self._uploads, self._downloads = [], []
            raise

    def check_write(self, span: Span) -> None:
        """Check that device work may write these bytes.

        Raises:
            FakeCudaError: A download still reads them.
        """
        if any(span.overlaps(span_of(download.source)) for download in self._downloads):
            raise _overwritten()

    def sources(self) -> list[Span]:
        """Return the device memory that downloads read."""
        return [span_of(download.source) for download in self._downloads]

    def finish(self, compute_tick: int, side_tick: int) -> None:
        """Bring both streams to these places."""
        self._uploads = [copy for copy in self._uploads if copy.tick > compute_tick]
        for copy in self._downloads:
            if copy.tick <= side_tick:
                copy.target.copy_(copy.value)
        self._downloads = [copy for copy in self._downloads if copy.tick > side_tick]


def _overwritten() -> FakeCudaError:
    return FakeCudaError(
        "device memory is written while a download still reads it: wait for its event, or download from a copy"
    )
