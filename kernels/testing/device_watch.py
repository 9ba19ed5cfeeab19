"""Looks at eager work as it is queued: how much memory it holds at once, and whether it waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kernels.testing.call_arguments import tensors_in
from kernels.testing.device_calls import watching
from kernels.testing.device_memory import memory_id
from kernels.testing.host_waits import FakeCudaError, waiting_function, waiting_op
from kernels.testing.watched_ops import WatchedFunctions, WatchedOps

T = TypeVar("T")

# What torch's sort of several rows takes meanwhile for each element, beside its results: (row, column) twice, the keys
# once more, and keys and pairs for the radix sort to go to and fro. Shorter rows are sorted in place.
_SORT_SCRATCH_BYTES = 8 + 8 + 4 + 12
_MAX_IN_PLACE = 4096


class MemoryWatcher:
    """Measures what is allocated around it: results, and what a sort needs meanwhile; of no other kernel it is much.

    Attributes:
        peak_bytes: The most that was alive at once.
    """

    is_capture = False

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Watch this thread's operations."""
        with watching(self), WatchedOps(self):
            yield

    def on_function(self, func: Any, args: Any) -> None:
        """Let it pass: its operations tell."""

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation and count its results."""
        return self._count(func, args, kwargs, _scratch_bytes(func, args))

    def on_call(self, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        """Run an opaque kernel and count its results."""
        made: T = self._count(fn, args, {})
        return made

    def _count(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], scratch_bytes: int = 0) -> Any:
        given = {memory_id(tensor) for tensor in tensors_in((args, kwargs))}
        made = fn(*args, **kwargs)
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            if memory_id(tensor) not in given:
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._alive.setdefault(memory_id(tensor), (weak, storage.nbytes()))
        alive_bytes = sum(num_bytes for _, num_bytes in self._alive.values())
        self.peak_bytes = max(self.peak_bytes, alive_bytes + scratch_bytes)
        return made


def _scratch_bytes(func: Any, args: Any) -> int:
    """Return what an operation on fp32 takes while it runs. Source: torch, SortStable.cu and cub."""
    if func.overloadpacket.__name__ != "sort" or args[0].shape[-1] <= _MAX_IN_PLACE:
        return 0
    num_elements: int = args[0].numel()
    return _SORT_SCRATCH_BYTES * num_elements


class WaitGuard:
    """Refuses what waits for the device, while refusing().

    Args:
        is_host: Whether a tensor lies in pinned host memory, which may be read at any time.
    """

    is_capture = False

    def __init__(self, is_host: Callable[[torch.Tensor], bool]) -> None:
        self._is_host = is_host

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Watch this thread's operations."""
        with watching(self), WatchedFunctions(self), WatchedOps(self):
            yield

    def on_function(self, func: Any, args: Any) -> None:
        """Refuse what the dispatcher would not show."""
        if (name := waiting_function(func)) and not self._is_host(args[0]):
            raise _waits(name)

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that does not wait."""
        if (name := waiting_op(func, args, kwargs)) and not self._is_host(args[0]):
            raise _waits(name)
        return func(*args, **kwargs)

    def on_call(self, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        """Run an opaque kernel."""
        return fn(*args)


def _waits(name: str) -> FakeCudaError:
    return FakeCudaError(f"{name} waits for the device, where nobody may: keep the value there")
