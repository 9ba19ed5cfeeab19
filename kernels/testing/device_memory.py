"""Memory that outlives, or does not outlive, the tensors that look at it: what a captured graph holds addresses of."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Span(NamedTuple):
    """Bytes that a tensor reaches from its first element to its last: ``[start, end)`` of one memory."""

    memory_id: int
    start: int
    end: int

    def overlaps(self, other: Span) -> bool:
        """Return whether the two have a byte in common."""
        return self.memory_id == other.memory_id and self.start < other.end and other.start < self.end


class Memory:
    """One allocation, known by an id that stays its own as long as this object lives.

    Args:
        storage: The allocation.
        owned: Keep it alive.

    Attributes:
        is_owned: As asked for.
    """

    def __init__(self, storage: torch.UntypedStorage, *, owned: bool) -> None:
        self._weak: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._strong = storage if owned else None
        self.is_owned = owned

    def storage(self) -> torch.UntypedStorage | None:
        """Return it, or None where it has been freed."""
        if self._strong is not None:
            return self._strong
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return storage


class TensorRef:
    """What a kernel is given of a tensor: an address, a dtype and a shape. Keeps nothing alive that it does not own.

    Args:
        tensor: Where it is now.
        memory: Its allocation.
    """

    def __init__(self, tensor: torch.Tensor, memory: Memory) -> None:
        self.memory = memory
        self.shape = tuple(tensor.shape)
        self.span = span_of(tensor)
        self._dtype = tensor.dtype
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._made: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """Return a tensor over that memory, which must be alive."""
        if self._made is not None:
            return self._made
        storage = self.memory.storage()
        assert storage is not None
        made = torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self.shape, self._stride)
        if self.memory.is_owned:
            self._made = made
        return made


def memory_id(tensor: torch.Tensor) -> int:
    """Return what tells a living tensor's allocation from all others."""
    return int(tensor.untyped_storage()._cdata)


def span_of(tensor: torch.Tensor) -> Span:
    """Return the bytes that a tensor reaches; none, if it has no elements."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return Span(memory_id(tensor), start, start)
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(memory_id(tensor), start, start + (last + 1) * tensor.element_size())


def fill_with_garbage(tensor: torch.Tensor) -> None:
    """Write what nobody could take for a result: NaN, or an integer far out of any range."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(0x5A5A5A5A5A5A5A5A & torch.iinfo(tensor.dtype).max)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold the same bits."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
