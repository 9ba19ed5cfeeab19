"""Tensors, or what stands for them, inside the arguments and results of calls: lists, tuples and dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def leaves(tree: Any, kind: type[T]) -> Iterator[T]:
    """Yield what is of a type, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value, kind)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value, kind)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors."""
    return leaves(tree, torch.Tensor)


def replaced(tree: Any, kind: type[T], fn: Callable[[T], object]) -> Any:
    """Return the same with ``fn`` of whatever is of a type. (torch's own pytree takes half a replay's time.)"""
    if isinstance(tree, kind):
        return fn(tree)
    if type(tree) is dict:
        return {key: replaced(value, kind, fn) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([replaced(value, kind, fn) for value in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[replaced(value, kind, fn) for value in tree])
    return tree
