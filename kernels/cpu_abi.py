"""abi.h in ctypes: the structs and the functions of the C++ library, name by name. A test reads the header beside it.

Pointers are plain addresses here; whoever fills them in keeps alive what they point to.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

ABI_VERSION = 2


class Source(Structure):
    """pm_source."""

    _fields_ = (("data", c_void_p), ("storage", c_int32), ("num_rows", c_int32))


class LinearConfig(Structure):
    """pm_linear_config."""

    _fields_ = (
        ("sources", c_void_p),
        ("num_sources", c_int32),
        ("k", c_int32),
        ("n", c_int32),
        ("row_order", c_void_p),
        ("bias", c_void_p),
        ("target", c_int32),
    )


class Layer(Structure):
    """pm_layer."""

    _fields_ = (
        ("qkv", c_void_p * 3),
        ("o", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attn_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("window_left", c_int32),
        ("rope", c_int32),
    )


class ModelConfig(Structure):
    """pm_model_config."""

    _fields_ = (
        ("layers", c_void_p),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate_size", c_int32),
        ("vocab_size", c_int32),
        ("activation", c_int32),
        ("eps", c_float),
        ("embed_scale", c_float),
        ("sm_scale", c_float),
        ("attn_soft_cap", c_float),
        ("final_soft_cap", c_float),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", c_void_p),
    )


class Step(Structure):
    """pm_step."""

    _fields_ = (
        ("num_reqs", c_int32),
        ("num_tokens", c_int32),
        ("qo_indptr", c_void_p),
        ("kv_indptr", c_void_p),
        ("kv_indices", c_void_p),
        ("kv_lens", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("logit_rows", c_void_p),
        ("num_logit_rows", c_int32),
        ("num_common_pages", c_int32),
        ("embeddings", c_void_p),
    )


STRUCTS: dict[str, type[Structure]] = {
    "pm_source": Source,
    "pm_linear_config": LinearConfig,
    "pm_layer": Layer,
    "pm_model_config": ModelConfig,
    "pm_step": Step,
}

# What each function returns, then its arguments.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pm_abi_version": (c_int32, ()),
    "pm_last_error": (c_char_p, ()),
    "pm_cpu_name": (c_char_p, ()),
    "pm_best_isa": (c_char_p, ()),
    "pm_can_run": (c_int32, (c_char_p,)),
    "pm_machine_create": (c_void_p, (c_char_p, c_int32)),
    "pm_machine_destroy": (None, (c_void_p,)),
    "pm_linear_create": (c_void_p, (c_void_p, c_void_p)),
    "pm_linear_destroy": (None, (c_void_p,)),
    "pm_linear_bytes": (c_int64, (c_void_p,)),
    "pm_planned_bytes": (c_int64, (c_void_p,)),
    "pm_linear_run": (c_int32, (c_void_p, c_void_p, c_int32, c_void_p)),
    "pm_linear_row": (None, (c_void_p, c_int32, c_void_p)),
    "pm_model_create": (c_void_p, (c_void_p, c_void_p)),
    "pm_model_destroy": (None, (c_void_p,)),
    "pm_model_set_rope": (None, (c_void_p, c_int32, c_void_p, c_int32)),
    "pm_page_bytes": (c_int64, (c_int32, c_int32, c_int32, c_int32, c_int32)),
    "pm_pages_create": (c_void_p, (c_void_p, c_int32, c_int32, c_int32)),
    "pm_pages_destroy": (None, (c_void_p,)),
    "pm_pages_copy": (None, (c_void_p, c_void_p, c_void_p, c_int32)),
    "pm_pages_read": (None, (c_void_p, c_int32, c_void_p)),
    "pm_pages_write": (None, (c_void_p, c_int32, c_void_p)),
    "pm_model_forward": (c_int32, (c_void_p, c_void_p, c_void_p)),
    "pm_model_head": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p)),
    "pm_model_hidden": (None, (c_void_p, c_void_p)),
    "pm_model_take_times": (None, (c_void_p, c_void_p)),
}


def load_functions(path: Path) -> CDLL:
    """Load the library and tell ctypes what its functions take.

    Raises:
        OSError: It is no library for this machine, or of another version of the header.
    """
    library = CDLL(str(path))
    try:
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except AttributeError as error:
        raise OSError(f"{path} is not the library of these sources: {error}") from error
    if library.pm_abi_version() != ABI_VERSION:
        raise OSError(f"{path} is of version {library.pm_abi_version()} of its interface, not {ABI_VERSION}")
    return library
