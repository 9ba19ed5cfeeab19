"""Opaque kernels: what a fake library computes counts as one launch on the device, for whoever watches the launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


class CallWatcher(Protocol):
    """Sees the device calls of the thread that it watches: a graph's recorder, or who measures memory.

    Attributes:
        is_capture: It records a graph.
    """

    is_capture: bool

    def on_call(self, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        """Run ``fn(*args)`` once without looking into it, take note of it, and return its result."""


_watcher: ContextVar[CallWatcher | None] = ContextVar("watcher", default=None)


def device_call(fn: Callable[..., T], *args: object) -> T:
    """Run ``fn(*args)`` as one kernel and return its result: a tensor, a tuple or list of them, or None.

    Where a graph is being captured, ``fn`` runs once now, for its result's shape, and again at each replay, with
    the same arguments: tensors by their memory as it is then, all else as it is now. What it returns then is copied
    into the tensors returned now. So it reads each device buffer inside ``fn``, and through its arguments or its own
    object. Inside it may do what a kernel may not, such as asking a tensor for its values.
    """
    watcher = _watcher.get()
    if watcher is None:
        return fn(*args)
    with watching(None):
        return watcher.on_call(fn, args)


def current_watcher() -> CallWatcher | None:
    """Return who sees the caller's device calls; None inside of one."""
    return _watcher.get()


def is_capturing() -> bool:
    """Return whether the caller's work is recorded into a graph. Inside of a device call it is not."""
    watcher = _watcher.get()
    return watcher is not None and watcher.is_capture


@contextmanager
def watching(watcher: CallWatcher | None) -> Iterator[None]:
    """Have ``watcher`` see this thread's device calls; None: nobody."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
