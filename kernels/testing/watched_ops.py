"""Has an object see what torch queues on this thread, between a kernel's start and its end excepted."""

from __future__ import annotations

from typing import Any, Protocol

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.testing.device_calls import CallWatcher, current_watcher


class OpWatcher(CallWatcher, Protocol):
    """Sees aten operations, and the calls of torch's Python surface that lead to them."""

    def on_function(self, func: Any, args: Any) -> None:
        """Take note of a call, before it is made."""

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result."""


class WatchedFunctions(TorchFunctionMode):
    """Tells ``watcher`` of calls while it is the one who watches this thread's device calls."""

    def __init__(self, watcher: OpWatcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if current_watcher() is self._watcher:
            self._watcher.on_function(func, args)
        return func(*args, **(kwargs or {}))


class WatchedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives ``watcher`` the operations while it is the one who watches this thread's device calls."""

    def __init__(self, watcher: OpWatcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if current_watcher() is self._watcher:
            return self._watcher.on_op(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
