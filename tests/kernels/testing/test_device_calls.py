from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.testing.device_calls import current_watcher, device_call, is_capturing, watching


class Watcher:
    is_capture = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def on_call(self, fn: Callable[..., Any], args: tuple[object, ...]) -> Any:
        self.calls.append((fn.__name__, args))
        return fn(*args)


def add(a: int, b: int) -> int:
    return a + b


def add_twice(a: int, b: int) -> int:
    return device_call(add, device_call(add, a, b), b)


def test_a_device_call_is_the_function_where_nobody_watches() -> None:
    assert device_call(add, 1, 2) == 3
    assert current_watcher() is None
    assert not is_capturing()


def test_a_watcher_sees_each_call_once_and_none_inside_it() -> None:
    watcher = Watcher()
    with watching(watcher):
        assert current_watcher() is watcher
        assert is_capturing()
        assert device_call(add_twice, 1, 2) == 5
    device_call(add, 1, 2)
    assert watcher.calls == [("add_twice", (1, 2))]
