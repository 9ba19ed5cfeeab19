"""What FlashInfer's kernels can compute, and when sharing a prefix pays: rules over plain numbers, no library."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.backend import AttnSpec, StepMeta, UnsupportedModelError

# What its append, rope and attention kernels are all compiled for. Attention alone knows more, to no use.
HEAD_DIMS = (64, 128, 256)
# Compute capability that each dtype's tensor-core kernels need; in fp32 there are none.
_CAPABILITIES = {torch.bfloat16: (8, 0), torch.float16: (7, 5)}

# Below either, merging two partial results costs more than reading the prefix once saves.
MIN_SHARED_TOKENS = 256
MIN_SHARING_REQS = 8


def check_model(layer_specs: Sequence[AttnSpec], dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Refuse what there are no kernels for; see DeviceBackend.check.

    Args:
        layer_specs: One per layer.
        dtype: Of weights, hidden states and KV.
        capability: The card's.

    Raises:
        UnsupportedModelError: There are none.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in _CAPABILITIES:
        raise UnsupportedModelError(f"the cuda backend computes in bfloat16 or float16, not in {name}")
    if capability < _CAPABILITIES[dtype]:
        needed, found = (".".join(map(str, pair)) for pair in (_CAPABILITIES[dtype], capability))
        raise UnsupportedModelError(f"{name} needs a card of compute capability {needed}, and this one has {found}")
    for spec in layer_specs:
        if spec.head_dim not in HEAD_DIMS:
            known = ", ".join(map(str, HEAD_DIMS))
            raise UnsupportedModelError(
                f"the cuda backend's attention takes heads of {known}, and this model's have {spec.head_dim}"
            )
        if spec.num_q_heads % spec.num_kv_heads:
            raise UnsupportedModelError(
                f"{spec.num_q_heads} query heads cannot share {spec.num_kv_heads} key and value heads evenly"
            )


def why_no_kernels(error: BaseException) -> str:
    """Say why FlashInfer has no kernels, as the end of a sentence; empty = the error is another one.

    It compiles a module when it is first needed, unless that has been done. Its errors have no class of their own, but
    for the one that does not say which module is missing.
    """
    if type(error).__name__ == "MissingJITCacheError":
        module = getattr(getattr(error, "spec", None), "name", "of unknown name")
        return f"the module {module} is not compiled, and FLASHINFER_DISABLE_JIT forbids to compile it now"
    text = str(error)
    is_compiling = any(words in text for words in ("Could not find nvcc", "Ninja build failed", "'ninja'"))
    return f"a module is not compiled, and compiling it now fails: {text.splitlines()[0]}" if is_compiling else ""


def graph_sizes(max_num_reqs: int) -> tuple[int, ...]:
    """Return 1, 2, 4, then each eighth size, and the largest batch itself: a batch is padded by 7 rows at most."""
    sizes = [size for size in (1, 2, 4, *range(8, max_num_reqs, 8)) if size < max_num_reqs]
    return (*sizes, max_num_reqs)


def num_shared_pages(meta: StepMeta, layer_specs: Sequence[AttnSpec], page_size: int, num_workspace_bytes: int) -> int:
    """Return how many leading pages all requests may attend to at once.

    0 = too few tokens or requests, a window, or more requests than a graph has room for.

    A shared page is attended to without a causal mask, so all its tokens precede every query. That leaves each
    request a page of its own too: its first query's at the least::

        pages   | shared | shared | own    |        page_size 4, kv_len 11, q_len 2: at most 9 // 4 = 2 are shared
        tokens  | . . . .  . . . .  . q q

    Args:
        meta: The step. Its num_common_pages counts from the tables' start, once.
        layer_specs: One per layer.
        page_size: Tokens a page.
        num_workspace_bytes: For partial results.
    """
    if meta.num_reqs < MIN_SHARING_REQS or any(spec.window_left >= 0 for spec in layer_specs):
        return 0
    if any(_cascade_bytes(spec, meta.num_reqs) > num_workspace_bytes for spec in layer_specs):
        return 0
    num_computed = meta.kv_lens - (meta.qo_indptr[1:] - meta.qo_indptr[:-1])
    num_shared = min(meta.num_common_pages, int(num_computed.min()) // page_size)
    return num_shared if num_shared * page_size >= MIN_SHARED_TOKENS else 0


def _cascade_bytes(spec: AttnSpec, num_reqs: int) -> int:
    """Return what a captured cascade of decodes needs for the partial results of the requests' own pages, in fp32.

    A wrapper for graphs always cuts contexts into parts, and lays out a tile for each that there might be; the one for
    decodes stops at two for each processor.

    Source: FlashInfer, scheduler.cuh, PrefillPlanImpl.
    """
    group = spec.num_q_heads // spec.num_kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 or spec.head_dim >= 256 else 128
    num_tiles = -(-num_reqs * group // tile) + num_reqs - 1
    num_rows = -(-num_tiles * tile // group)
    return spec.num_q_heads * num_rows * (spec.head_dim + 1) * 4 + 2 * 16
