"""Which operations of torch wait for the device, or bring host memory to it: on the CPU they look like any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class FakeCudaError(RuntimeError):
    """The program would fail, or race, on a CUDA device; says what it did and what to do instead."""


# Named by the aten packet. What they return depends on values, so the host must know those before it can go on.
_WAITING_OPS = frozenset(
    (
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "allclose",
        "argwhere",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "multinomial",  # asks the device whether its weights are valid
        "nonzero",
        "nonzero_numpy",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    )
)
_INDEXING_OPS = frozenset(
    ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_")
)
# These dispatch nothing on CPU tensors, or nothing that tells them apart.
_WAITING_FUNCTIONS: dict[Any, str] = {
    torch.Tensor.cpu: "cpu()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.__array__: "numpy.asarray()",
    torch.Tensor.__repr__: "repr()",
}
_HOST_DATA_FUNCTIONS: dict[Any, str] = {
    torch.tensor: "torch.tensor()",
    torch.as_tensor: "torch.as_tensor()",
    torch.Tensor.new_tensor: "new_tensor()",
}


def waiting_op(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return how to name an aten call that waits for the device; None = it does not."""
    name: str = func.overloadpacket.__name__
    if name in _WAITING_OPS:
        return name
    if name in _INDEXING_OPS and any(is_mask(index) for index in args[1]):
        return f"{name} by a mask (use where or masked_fill)"
    if name == "where" and len(args) == 1:
        return "where with a condition only"
    if name == "repeat_interleave" and kwargs.get("output_size") is None and _has_tensor_repeats(args):
        return "repeat_interleave without output_size"
    return None


def waiting_function(func: Any) -> str | None:
    """Return how to name a call of torch's Python surface that waits for the device; None = it does not."""
    return _WAITING_FUNCTIONS.get(func)


def host_data_function(func: Any) -> str | None:
    """Return how to name a call that makes a tensor of Python's data; None = it does not."""
    return _HOST_DATA_FUNCTIONS.get(func)


def is_mask(index: Any) -> bool:
    """Return whether an index is a mask, whose true places must be counted first."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _has_tensor_repeats(args: Sequence[Any]) -> bool:
    return isinstance(args[-1], torch.Tensor)
