"""A CUDA graph on the CPU: the operations that a function called, to be run again on the same memory without it.

As on a device, capturing computes nothing: what was written meanwhile is put back, and what was allocated is garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from kernels.testing.call_arguments import leaves, replaced, tensors_in
from kernels.testing.device_calls import watching
from kernels.testing.device_memory import Memory, Span, TensorRef, fill_with_garbage, is_same, memory_id, span_of
from kernels.testing.host_waits import FakeCudaError, host_data_function, waiting_function, waiting_op
from kernels.testing.watched_ops import WatchedFunctions, WatchedOps

T = TypeVar("T")


class RecordedCall:
    """One kernel: a function, the tensors and values it was called with, and where its results go.

    Args:
        name: For messages.
        fn: What to call.
        given: Its args and kwargs, whose tensors are references.
        results: Where each of its result tensors is copied to; None for one that is an argument, or a view of one.
    """

    def __init__(
        self, name: str, fn: Callable[..., Any], given: tuple[Any, dict[str, Any]], results: list[TensorRef | None]
    ) -> None:
        self.name = name
        self._fn = fn
        self._given = given
        self._results = results

    def refs(self) -> Iterator[TensorRef]:
        """Yield what it was given."""
        yield from leaves(self._given, TensorRef)

    def run(self) -> None:
        """Compute it, on the memory that it was recorded with."""
        args, kwargs = replaced(self._given, TensorRef, TensorRef.tensor)
        made = self._fn(*args, **kwargs)
        for result, ref in zip(tensors_in(made), self._results, strict=True):
            if ref is not None:
                if tuple(result.shape) != ref.shape:
                    raise FakeCudaError(f"{self.name} gave {list(ref.shape)} at capture and {list(result.shape)} now")
                ref.tensor().copy_(result)


class RecordedGraph:
    """What has been captured.

    Args:
        calls: In order.
        writes: The memory that they write.
    """

    def __init__(self, calls: list[RecordedCall], writes: list[Span]) -> None:
        self._calls = calls
        self._writes = writes

    def writes(self, span: Span) -> bool:
        """Return whether replaying writes any of these bytes."""
        return any(span.overlaps(written) for written in self._writes)

    def run(self) -> None:
        """Compute it all again.

        Raises:
            FakeCudaError: Memory that it takes as given has been freed since.
        """
        for call in self._calls:
            for ref in call.refs():
                if ref.memory.storage() is None:
                    raise FakeCudaError(
                        f"a graph's {call.name} reads a tensor of shape {list(ref.shape)} that has been freed since "
                        "the capture: keep what a graph takes as given"
                    )
        with torch.inference_mode(), watching(None):
            for call in self._calls:
                call.run()


class Recorder:
    """Records what a function queues, until recording() ends; then finish() gives the graph.

    Args:
        is_host: Whether a tensor lies in pinned host memory.
    """

    is_capture = True

    def __init__(self, is_host: Callable[[torch.Tensor], bool]) -> None:
        self._is_host = is_host
        self._memories: dict[int, Memory] = {}
        self._made: list[TensorRef] = []  # what was allocated while recording
        self._before: dict[int, tuple[Memory, torch.UntypedStorage]] = {}  # copies of what was written
        self._calls: list[RecordedCall] = []
        self._writes: list[Span] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record this thread's operations, and undo them at the end."""
        try:
            with watching(self), WatchedFunctions(self), WatchedOps(self):
                yield
        finally:
            self._undo()

    def finish(self) -> RecordedGraph:
        """Return what has been recorded."""
        return RecordedGraph(self._calls, self._writes)

    # ------------------------------------------------------------------ what the modes and device_call() tell

    def on_function(self, func: Any, args: Any) -> None:
        """Refuse what a capture may not contain and the dispatcher would not show."""
        if name := waiting_function(func):
            raise _waits(name)
        if name := host_data_function(func):
            raise _host_data(name)

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an aten operation and record it, if it computes anything."""
        name: str = func.overloadpacket.__name__
        if waiting := waiting_op(func, args, kwargs):
            raise _waits(waiting)
        if name == "lift_fresh":
            return self._constant(args[0])
        if torch.Tag.inplace_view in func.tags:  # changes how a tensor looks at memory, and no memory
            return func(*args, **kwargs)
        given = self._refs((args, kwargs))
        for tensor in _written(func, args, kwargs):
            self._save(tensor)
            self._writes.append(span_of(tensor))
        made = func(*args, **kwargs)
        results = self._results(made, given)
        if name.startswith(("empty", "new_empty")):
            self._calls.append(RecordedCall(name, _fill_all, ((results,), {}), []))
        elif func._schema.is_mutable or any(results):
            self._calls.append(RecordedCall(name, func, given, results))
        return made

    def on_call(self, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        """Run an opaque kernel and record it. What it writes of its arguments shows only in their values."""
        given = self._refs((args, {}))
        before = [(ref, ref.tensor().clone()) for ref in leaves(given, TensorRef)]
        for tensor in tensors_in(args):
            self._save(tensor)
        made = fn(*args)
        self._writes += [ref.span for ref, value in before if not is_same(ref.tensor(), value)]
        name = getattr(fn, "__qualname__", repr(fn))
        self._calls.append(RecordedCall(name, fn, given, self._results(made, given)))
        return made

    # ------------------------------------------------------------------ own

    def _refs(self, tree: Any) -> Any:
        return replaced(tree, torch.Tensor, self._given)

    def _given(self, tensor: torch.Tensor) -> TensorRef:
        if self._is_host(tensor):
            raise FakeCudaError("a capture takes no pinned host memory: upload it before the replay")
        return TensorRef(tensor, self._memory(tensor, owned=False))

    def _memory(self, tensor: torch.Tensor, *, owned: bool) -> Memory:
        key = memory_id(tensor)
        if key not in self._memories:
            self._memories[key] = Memory(tensor.untyped_storage(), owned=owned)
        return self._memories[key]

    def _results(self, made: Any, given: Any) -> list[TensorRef | None]:
        """Return references to new memory; None for a result that is memory which the call was given."""
        known = {ref.span.memory_id for ref in leaves(given, TensorRef)}
        results = [
            None if memory_id(tensor) in known else TensorRef(tensor, self._memory(tensor, owned=True))
            for tensor in tensors_in(made)
        ]
        made_here = [ref for ref in results if ref is not None]
        self._made += made_here
        self._writes += [ref.span for ref in made_here]
        return results

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a number that the kernel is launched with pass; arrays would have to be copied from the host."""
        if tensor.dim() > 0:
            raise _host_data("torch.from_numpy(), or indexing with a list")
        self._memory(tensor, owned=True)
        return tensor

    def _save(self, tensor: torch.Tensor) -> None:
        if memory_id(tensor) not in self._before:
            memory = self._memory(tensor, owned=False)
            self._before[memory_id(tensor)] = (memory, _copy_of(tensor.untyped_storage()))

    def _undo(self) -> None:
        for memory, saved in self._before.values():
            storage = memory.storage()
            if storage is not None:
                storage.copy_(saved)
        with torch.inference_mode():
            for ref in self._made:
                fill_with_garbage(ref.tensor())


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copy


def _fill_all(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        fill_with_garbage(tensor)


def _waits(name: str) -> FakeCudaError:
    return FakeCudaError(f"a capture may not wait for the device, as {name} does: keep the value on the device")


def _host_data(name: str) -> FakeCudaError:
    return FakeCudaError(f"a capture may not copy from the host, as {name} does: make the tensor before, and keep it")
