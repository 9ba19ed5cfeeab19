"""The CPU backend: whole steps in the C++ kernels where they can serve the model, else layer by layer in torch.

Owns the choice of instruction set and threads; the library is cpu_library's, how it comes about cpu_build's.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch

from kernels.backend import BackendOptions, NoKernelsError, NotFusableError, UnusableIsaError
from kernels.cpu_build import INSTALLED, FoundLibrary, find_library
from kernels.cpu_fallback import CpuFallback, supported_dtypes
from kernels.cpu_library import ISAS, KV_KINDS, KernelError, Library, Linear, Machine, Model, Pages
from kernels.cpu_threads import usable_threads
from kernels.fused import (
    FloatArray,
    FusedKernels,
    FusedWeights,
    HeadRows,
    LinearWeights,
    ModelSpec,
    weights_bytes,
)
from kernels.step import KVPool, StepMeta

logger = logging.getLogger(__name__)

_HEAD_DIMS = range(32, 257, 16)
_MAX_GROUP = 64  # query heads a KV head
# A start settles twice what computes, and where nothing can be kept a library takes 20 s each time.
_built_for_this_process: dict[tuple[Path | None, Path], Library] = {}


class CpuModel:
    """A FusedModel."""

    def __init__(self, machine: Machine, spec: ModelSpec, weights: FusedWeights, *, kv_dtype: str) -> None:
        self._model = Model(machine, spec, weights)
        self._kv_kind = KV_KINDS[kv_dtype]
        self.num_bytes = weights_bytes(weights)

    def kv_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers."""
        return self._model.page_bytes(page_size, self._kv_kind)

    def alloc_kv(self, *, num_pages: int, page_size: int) -> Pages:
        """Allocate pages for all layers."""
        return Pages(self._model, num_pages=num_pages, page_size=page_size, kind=self._kv_kind)

    def set_rope(self, rope: int, cos_sin: FloatArray) -> None:
        """Give one of the two rotary tables: [num_positions, head_dim]."""
        self._model.set_rope(rope, cos_sin)

    def forward(self, meta: StepMeta, kv: KVPool) -> None:
        """Compute a step up to the last hidden states of ``meta.logit_rows``, which stay until the next one."""
        assert isinstance(kv, Pages)
        self._model.forward(meta, kv)

    def head(self, first: int, num: int, num_token_ids: int, want_logits: bool) -> HeadRows:
        """Apply the head to ``num`` of the rows that forward() left, from ``first`` on; see FusedModel."""
        return self._model.head(first, num, num_token_ids, want_logits)

    def hidden(self) -> FloatArray:
        """Return the hidden states that forward() left: [R, H], normed."""
        return self._model.hidden()

    def take_times(self) -> dict[str, float]:
        """Return the seconds spent in each phase since the last call."""
        return self._model.take_times()


class CpuKernels:
    """FusedKernels of one instruction set. Its threads start with the first weight that is packed.

    Args:
        library: Loaded.
        isa: One of library.runnable_isas().
        num_threads: The caller's included.
    """

    def __init__(self, library: Library, *, isa: str, num_threads: int) -> None:
        self.isa = isa
        self.num_threads = num_threads
        self._library = library

    @cached_property
    def machine(self) -> Machine:
        return Machine(self._library, self.isa, self.num_threads)

    def pack(self, weights: LinearWeights) -> Linear:
        """Pack linears into one; the sources are not needed afterwards."""
        return Linear(self.machine, weights)

    def packed_bytes(self, weights: LinearWeights) -> int:
        """Return the bytes that pack() would take, reading no numbers."""
        return self._library.packed_bytes(weights)

    def kv_page_bytes(self, spec: ModelSpec, *, page_size: int, kv_dtype: str) -> int:
        """Return the bytes of one page over all layers of such a model."""
        return self._library.page_bytes(spec, page_size, KV_KINDS[kv_dtype])

    def build(self, spec: ModelSpec, weights: FusedWeights, *, kv_dtype: str) -> CpuModel:
        """Put packed linears and norms together; see FusedKernels."""
        return CpuModel(self.machine, spec, weights, kv_dtype=kv_dtype)


class CpuBackend(CpuFallback):
    """A Backend whose ``fuse`` gives the C++ kernels.

    Args:
        prepacked_dtypes: See CpuFallback.
        kernels: None where there are none.
        reason: Why not, as the end of a sentence.
    """

    def __init__(
        self, *, prepacked_dtypes: Iterable[torch.dtype], kernels: CpuKernels | None = None, reason: str = ""
    ) -> None:
        super().__init__(prepacked_dtypes=prepacked_dtypes)
        self._kernels = kernels
        self._reason = reason

    def fuse(self, spec: ModelSpec) -> FusedKernels:
        """Return the C++ kernels.

        Raises:
            NotFusableError: They are not there, or not made for such a model.
        """
        if self._kernels is None:
            raise NoKernelsError(self._reason)
        shapes = {(layer.num_q_heads, layer.num_kv_heads, layer.head_dim) for layer in spec.layer_specs}
        head_dims = {head_dim for _, _, head_dim in shapes}
        if len(shapes) != 1:
            raise NotFusableError("the layers' attention is not all of one shape")
        if not head_dims <= set(_HEAD_DIMS):
            raise NotFusableError(f"its head_dim {head_dims.pop()} is not a multiple of 16 from 32 to 256")
        if any(num_q_heads > _MAX_GROUP * num_kv_heads for num_q_heads, num_kv_heads, _ in shapes):
            raise NotFusableError(f"more than {_MAX_GROUP} of its query heads share a KV head")
        return self._kernels


def create_backend(options: BackendOptions) -> CpuBackend:
    """Create the CPU backend for this machine.

    Raises:
        UnusableIsaError: ``options.cpu_isa`` cannot be used here.
    """
    if options.cpu_isa == "torch":
        return CpuBackend(prepacked_dtypes=supported_dtypes(), reason="torch was asked for")
    library, reason = load_library(options.cache_dir)
    kernels = None if library is None else _choose_kernels(library, options)
    if kernels is None:
        if options.cpu_isa != "auto":
            raise UnusableIsaError(
                f"{options.cpu_isa} cannot be used, for there are no C++ kernels: {reason}; torch can, or auto"
            )
        logger.warning("There are no C++ kernels, so torch computes, several times more slowly: %s", reason)
    return CpuBackend(prepacked_dtypes=supported_dtypes(), kernels=kernels, reason=reason)


def runnable_isas() -> tuple[str, ...]:
    """Return the instruction sets whose kernels run here, quickest first; none where there is no library."""
    library, _ = load_library()
    return () if library is None else library.runnable_isas()


def load_library(cache_dir: Path | None = None, *, installed: Path = INSTALLED) -> tuple[Library | None, str]:
    """Load the library, built first where need be; else say why not, as the end of a sentence.

    Args:
        cache_dir: Where it is built; None = the user's cache.
        installed: Where an installed one would be. One that does not load, built for another system, is passed over.
    """
    kept = _built_for_this_process.get((cache_dir, installed))
    if kept is not None:
        return kept, ""
    found = find_library(cache_dir=cache_dir, progress=logger.info, installed=installed)
    library, reason = _load(found)
    if library is not None and found.is_temporary:
        _built_for_this_process[cache_dir, installed] = library
    if library is None and found.path is not None and found.path.parent == installed:
        return _load(find_library(cache_dir=cache_dir, progress=logger.info, installed=Path(os.devnull)))
    return library, reason


def _load(found: FoundLibrary) -> tuple[Library | None, str]:
    if found.path is None:
        return None, found.reason
    try:
        return Library(found.path), ""
    except (OSError, KernelError) as error:
        return None, f"the library does not load: {error}"
    finally:
        if found.is_temporary:  # what is loaded stays
            shutil.rmtree(found.path.parent, ignore_errors=True)


def _choose_kernels(library: Library, options: BackendOptions) -> CpuKernels:
    isa = library.best_isa if options.cpu_isa == "auto" else options.cpu_isa
    runnable = library.runnable_isas()
    if isa not in runnable:
        known = "not an instruction set" if isa not in ISAS else "not one that this CPU and this build have"
        raise UnusableIsaError(f"{isa} is {known}; {', '.join(runnable)} and torch can be used, or auto")
    return CpuKernels(library, isa=isa, num_threads=options.num_threads or usable_threads())
