from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.testing.call_arguments import leaves, replaced, tensors_in


class Pair(NamedTuple):
    first: object
    second: object


def test_tensors_are_found_in_order_at_any_depth() -> None:
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(3)
    assert [len(x) for x in tensors_in([1, (a, {"x": b}), "s", Pair(None, c)])] == [1, 2, 3]
    assert [len(x) for x in tensors_in(torch.ones(4, 2).max(dim=1))] == [4, 4]
    assert list(tensors_in(None)) == []


def test_replacing_keeps_the_form() -> None:
    tree = [1, (2, {"x": 3.5}), Pair(4, "s"), torch.Size([5])]
    assert replaced(tree, int, lambda x: x * 10) == [10, (20, {"x": 3.5}), Pair(40, "s"), torch.Size([5])]
    assert list(leaves(tree, int)) == [1, 2, 4, 5]
