"""A stand-in for the module ``flashinfer`` (0.7.4) on CPU tensors: its signatures and semantics, and none of its mercy.

The names here are the real module's. What the real library would answer with wrong numbers, a fault or a hidden wait
raises MisuseError. FakeFlashInfer is the same as an object that keeps its calls, for one accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernels.accelerator import Accelerator
from kernels.testing.fake_cascade import MultiLevelCascadeAttentionWrapper
from kernels.testing.fake_checks import MisuseError
from kernels.testing.fake_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from kernels.testing.fake_merge import merge_state, merge_state_in_place
from kernels.testing.fake_ops import (
    append_paged_kv_cache,
    apply_rope_with_cos_sin_cache_inplace,
    fused_add_rmsnorm,
    gelu_tanh_and_mul,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    rmsnorm,
    silu_and_mul,
)
from kernels.testing.fake_prefill import BatchPrefillWithPagedKVCacheWrapper
from kernels.testing.fake_sampling import softmax, top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs

__version__ = "0.7.4"

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    append_paged_kv_cache,
    apply_rope_with_cos_sin_cache_inplace,
    fast_decode_plan,
    fused_add_rmsnorm,
    gelu_tanh_and_mul,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    merge_state,
    merge_state_in_place,
    rmsnorm,
    silu_and_mul,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
)
WRAPPERS: tuple[type, ...] = (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
METHODS = ("__init__", "plan", "reset_workspace_buffer", "run")

__all__ = [
    "FUNCTIONS",
    "METHODS",
    "WRAPPERS",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "Call",
    "FakeFlashInfer",
    "MisuseError",
    "MultiLevelCascadeAttentionWrapper",
    "TensorLike",
    "append_paged_kv_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "fast_decode_plan",
    "fused_add_rmsnorm",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "merge_state",
    "merge_state_in_place",
    "rmsnorm",
    "silu_and_mul",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_p_renorm_probs",
]


class TensorLike(NamedTuple):
    """What is kept of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A call as its caller made it; a method's name is that of its class, a dot, and its own.

    Attributes:
        name: Of a function, or "Class.method".
        args: Without self; tensors as TensorLike.
        kwargs: The same.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class FakeFlashInfer:
    """The module as an object. Its wrappers stage each plan through the accelerator's pinned memory, if there is one.

    Args:
        accelerator: Whose streams the wrappers use: a plan is one upload on it.

    Attributes:
        calls: All calls from outside, in order.
    """

    __version__ = __version__

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.calls: list[Call] = []
        for function in FUNCTIONS:
            setattr(self, function.__name__, self._recording(function.__name__, function))
        level = type("Level", (BatchPrefillWithPagedKVCacheWrapper,), {"accelerator": accelerator})
        for wrapper in WRAPPERS:
            members: dict[str, Any] = {"accelerator": accelerator, "_level_class": level}
            for method in METHODS:
                name = f"{wrapper.__name__}.{method}"
                members[method] = self._recording(name, getattr(wrapper, method), skip=1)
            setattr(self, wrapper.__name__, type(wrapper.__name__, (wrapper,), members))

    def __getattr__(self, name: str) -> Any:
        """Say which name the real module may have and the fake has not."""
        raise AttributeError(f"the fake FlashInfer has no {name!r}")

    def _recording(self, name: str, function: Callable[..., Any], *, skip: int = 0) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            kept = {key: _describe(value) for key, value in kwargs.items()}
            self.calls.append(Call(name, tuple(_describe(value) for value in args[skip:]), kept))
            return function(*args, **kwargs)

        return call


def _describe(value: Any) -> Any:
    """Keep no tensor alive: graphs tell whether their memory has been freed."""
    if isinstance(value, torch.Tensor):
        return TensorLike(tuple(value.shape), value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(_describe(item) for item in value)
    plain = value is None or isinstance(value, bool | int | float | str | torch.dtype)
    return value if plain else type(value).__name__
