"""The C++ library's handles as objects: each is destroyed once, after everything that was made of it; errors raise."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu_abi import Layer, LinearConfig, ModelConfig, Source, Step, load_functions
from kernels.fused import FloatArray, FusedLayer, FusedWeights, HeadRows, LinearWeights, ModelSpec
from kernels.step import IntArray, StepMeta

ISAS = ("amx", "avx512", "avx512_vnni", "avx2", "generic")
KV_KINDS = {"bf16": 0, "int8": 1}
PHASES = ("qkv", "attention", "o", "gate_up", "down", "head", "other")
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class KernelError(RuntimeError):
    """The library refused or failed; the message is its own sentence."""


class _Handle:
    """Something of the library's. It goes when nobody refers to it any more, but never before what was made of it."""

    def __init__(self, library: Library, address: int | None, destroy: str, *needs: object) -> None:
        self._library = library
        self._functions = library.functions
        if not address:
            raise library.last_error()
        self.address: int = address
        # The finaliser holds what this needs, so whatever order the collector takes, that goes later.
        finalizer = weakref.finalize(self, _destroy, getattr(library.functions, destroy), address, needs)
        # A process that ends gives all back at once, and a step may still run on a daemon thread.
        finalizer.atexit = False
        self.close: Callable[[], object] = finalizer

    def _check(self, status: int) -> None:
        if status:
            raise self._library.last_error()


def _destroy(function: Callable[[int], None], address: int, needs: tuple[object, ...]) -> None:
    function(address)


class Library:
    """The loaded library.

    Args:
        path: Of the file.

    Raises:
        OSError: It cannot be loaded, or is of other sources.
    """

    def __init__(self, path: Path) -> None:
        self.functions = load_functions(path)

    @property
    def cpu_name(self) -> str:
        """What the CPU calls itself."""
        name: bytes = self.functions.pm_cpu_name()
        return name.decode(errors="replace")

    @property
    def best_isa(self) -> str:
        """The quickest instruction set that this CPU runs and this library has."""
        name: bytes = self.functions.pm_best_isa()
        return name.decode()

    def runnable_isas(self) -> tuple[str, ...]:
        """Return those that this CPU runs and this library has, quickest first."""
        return tuple(isa for isa in ISAS if self.functions.pm_can_run(isa.encode()))

    def packed_bytes(self, weights: LinearWeights) -> int:
        """Return the bytes that a Linear of these weights would take, without reading them.

        Raises:
            KernelError: They make no linear.
        """
        config, _owners = _linear_config(weights)
        num_bytes = int(self.functions.pm_planned_bytes(ctypes.byref(config)))
        if num_bytes < 0:
            raise self.last_error()
        return num_bytes

    def page_bytes(self, spec: ModelSpec, page_size: int, kind: int) -> int:
        """Return the bytes of one page over all layers of a model."""
        attention = spec.layer_specs[0]
        shape = (len(spec.layer_specs), attention.num_kv_heads, attention.head_dim)
        return int(self.functions.pm_page_bytes(*shape, page_size, kind))

    def last_error(self) -> KernelError:
        """Return what the last failed call has to say."""
        said: bytes | None = self.functions.pm_last_error()
        return KernelError(said.decode(errors="replace") if said else "the CPU kernels failed without a word")


class Machine(_Handle):
    """An instruction set and a pool of threads, of which the caller is one."""

    def __init__(self, library: Library, isa: str, num_threads: int) -> None:
        address = library.functions.pm_machine_create(isa.encode(), num_threads)
        super().__init__(library, address, "pm_machine_destroy")
        self.library = library
        self.isa = isa
        self.num_threads = num_threads


class Linear(_Handle):
    """A packed weight."""

    def __init__(self, machine: Machine, weights: LinearWeights) -> None:
        config, _owners = _linear_config(weights)
        address = machine.library.functions.pm_linear_create(machine.address, ctypes.byref(config))
        super().__init__(machine.library, address, "pm_linear_destroy", machine)
        self.num_inputs = int(config.k)
        self.num_outputs = int(config.n)

    @property
    def num_bytes(self) -> int:
        """Memory that the packed weight takes."""
        return int(self._functions.pm_linear_bytes(self.address))

    def run(self, x: FloatArray) -> FloatArray:
        """Return ``x @ weight.T + bias`` as the model computes it: [T, inputs] -> [T, outputs]."""
        x = np.ascontiguousarray(x, np.float32)
        assert x.shape[1] == self.num_inputs
        out = np.empty((len(x), self.num_outputs), np.float32)
        self._check(self._functions.pm_linear_run(self.address, _address(x), len(x), _address(out)))
        return out

    def row(self, index: int) -> FloatArray:
        """Return the weights of one output, as values: [inputs]."""
        assert 0 <= index < self.num_outputs
        out = np.empty(self.num_inputs, np.float32)
        self._functions.pm_linear_row(self.address, index, _address(out))
        return out


class Model(_Handle):
    """Linears and norms, put together."""

    def __init__(self, machine: Machine, spec: ModelSpec, weights: FusedWeights) -> None:
        pointers = _Pointers()
        layers = _layers(spec, weights.layers, pointers)
        config = _model_config(spec, weights, layers, pointers)
        address = machine.library.functions.pm_model_create(machine.address, ctypes.byref(config))
        super().__init__(machine.library, address, "pm_model_destroy", machine, pointers.owners)
        self._spec = spec
        self._vocab_size = spec.vocab_size
        self._hidden_size = spec.hidden_size
        self._ropes: dict[int, FloatArray] = {}
        self._num_rows = 0

    def set_rope(self, rope: int, cos_sin: FloatArray) -> None:
        """Give a rotary table: [num_positions, head_dim]."""
        table = np.ascontiguousarray(cos_sin, np.float32)
        self._functions.pm_model_set_rope(self.address, rope, _address(table), len(table))
        self._ropes[rope] = table  # after the call: until then the one before is read

    def page_bytes(self, page_size: int, kind: int) -> int:
        """Return the bytes of one page over all layers."""
        return self._library.page_bytes(self._spec, page_size, kind)

    def forward(self, meta: StepMeta, pages: Pages) -> None:
        """Compute a step up to the last hidden states."""
        step = Step(
            num_reqs=meta.num_reqs,
            num_tokens=meta.num_tokens,
            qo_indptr=_address(meta.qo_indptr),
            kv_indptr=_address(meta.kv_indptr),
            kv_indices=_address(meta.kv_indices),
            kv_lens=_address(meta.kv_lens),
            token_ids=_address(meta.token_ids),
            positions=_address(meta.positions),
            slot_mapping=_address(meta.slot_mapping),
            logit_rows=_address(meta.logit_rows),
            num_logit_rows=len(meta.logit_rows),
            num_common_pages=meta.num_common_pages,
        )
        self._check(self._functions.pm_model_forward(self.address, pages.address, ctypes.byref(step)))
        self._num_rows = len(meta.logit_rows)

    def head(self, first: int, num: int, num_token_ids: int, want_logits: bool) -> HeadRows:
        """Apply the head to rows of the last forward()."""
        assert 0 <= first <= first + num <= self._num_rows
        ids = np.empty(num, np.int32)
        is_finite = np.empty(num, np.bool_)
        logits = np.empty((num, self._vocab_size), np.float32) if want_logits else None
        arguments = (first, num, num_token_ids, _address(logits), _address(ids), _address(is_finite))
        self._check(self._functions.pm_model_head(self.address, *arguments))
        return HeadRows(ids, is_finite, logits)

    def hidden(self) -> FloatArray:
        """Return the last forward's hidden states: [R, H]."""
        out = np.empty((self._num_rows, self._hidden_size), np.float32)
        self._functions.pm_model_hidden(self.address, _address(out))
        return out

    def take_times(self) -> dict[str, float]:
        """Return the seconds spent in each phase since the last call."""
        seconds = np.zeros(len(PHASES), np.float64)
        self._functions.pm_model_take_times(self.address, _address(seconds))
        return dict(zip(PHASES, seconds.tolist(), strict=True))


class Pages(_Handle):
    """A KVPool: the K and V of every layer of a model.

    Attributes:
        page_size: Tokens a page.
        num_pages: Pages in the pool.
        page_bytes: Bytes of one page over all layers, K and V.
    """

    def __init__(self, model: Model, *, num_pages: int, page_size: int, kind: int) -> None:
        address = model._functions.pm_pages_create(model.address, num_pages, page_size, kind)
        super().__init__(model._library, address, "pm_pages_destroy", model)
        self.page_size = page_size
        self.num_pages = num_pages
        self.page_bytes = model.page_bytes(page_size, kind)

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Copy whole pages, all layers. ``src`` and ``dst``: [n] page ids, disjoint."""
        assert len(src) == len(dst)
        self._check_ids(src)
        self._check_ids(dst)
        sources, targets = (np.ascontiguousarray(ids, np.int32) for ids in (src, dst))
        self._functions.pm_pages_copy(self.address, _address(sources), _address(targets), len(sources))

    def read_page(self, page: int, out: memoryview) -> None:
        """Write one page's native bytes into ``out``.

        Raises:
            ValueError: ``out`` is not ``page_bytes`` long.
        """
        buffer = self._page_buffer(page, out)
        assert buffer.flags.writeable, "bytes do not change"
        self._functions.pm_pages_read(self.address, page, _address(buffer))

    def write_page(self, page: int, data: memoryview) -> None:
        """Fill one page from bytes that ``read_page`` of a pool of the same shape gave.

        Raises:
            ValueError: ``data`` is not ``page_bytes`` long.
        """
        buffer = self._page_buffer(page, data)
        self._functions.pm_pages_write(self.address, page, _address(buffer))

    def _page_buffer(self, page: int, buffer: memoryview) -> NDArray[np.uint8]:
        self._check_ids(np.array([page]))
        if buffer.nbytes != self.page_bytes:
            raise ValueError(f"a page of this pool is {self.page_bytes} bytes long, the buffer {buffer.nbytes}")
        return np.frombuffer(buffer, np.uint8)

    def _check_ids(self, ids: NDArray[Any]) -> None:
        assert len(ids) == 0 or (ids.min() >= 0 and ids.max() < self.num_pages), "page ids of this pool"


# ---------------------------------------------------------------------- structs
class _Pointers:
    """Turns what a model is made of into addresses.

    Attributes:
        owners: What is read as long as the model lives.
        copied: What is read while the model is made.
    """

    def __init__(self) -> None:
        self.owners: list[object] = []
        self.copied: list[object] = []

    def linear(self, linear: Linear | None) -> int | None:
        self.owners.append(linear)
        return None if linear is None else linear.address

    def floats(self, values: FloatArray | None) -> int | None:
        if values is None:
            return None
        array = np.ascontiguousarray(values, np.float32)
        self.copied.append(array)
        return _address(array)


def _linear_config(weights: LinearWeights) -> tuple[LinearConfig, tuple[object, ...]]:
    """Return what the library is told, and what must live as long as that is read."""
    num_inputs = {rows.num_columns for rows in weights.sources}
    assert len(num_inputs) == 1, "the sources share their input"
    sources = (Source * len(weights.sources))(
        *(Source(rows.address, int(rows.storage), rows.num_rows) for rows in weights.sources)
    )
    order = np.ascontiguousarray(weights.row_order, np.int32)
    bias = None if weights.bias is None else np.ascontiguousarray(weights.bias, np.float32)
    assert bias is None or len(bias) == len(order)
    config = LinearConfig(
        sources=ctypes.addressof(sources),
        num_sources=len(sources),
        k=num_inputs.pop(),
        n=len(order),
        row_order=_address(order),
        bias=_address(bias),
        target=int(weights.target),
    )
    return config, (sources, order, bias)


def _layers(spec: ModelSpec, layers: Sequence[FusedLayer], pointers: _Pointers) -> ctypes.Array[Layer]:
    assert len(layers) == len(spec.layer_specs) == len(spec.rope_of_layer)
    packed = (Layer * len(layers))()
    for target, layer, attention, rope in zip(packed, layers, spec.layer_specs, spec.rope_of_layer, strict=True):
        for index, linear in enumerate(layer.qkv):
            target.qkv[index] = pointers.linear(linear)
        for name in ("o", "gate_up", "down"):
            setattr(target, name, pointers.linear(getattr(layer, name)))
        for name in ("input_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
            setattr(target, name, pointers.floats(getattr(layer, name)))
        target.window_left = attention.window_left
        target.rope = rope
    return packed


def _model_config(
    spec: ModelSpec, weights: FusedWeights, layers: ctypes.Array[Layer], pointers: _Pointers
) -> ModelConfig:
    attention = spec.layer_specs[0]
    embedding = weights.embedding
    if embedding is not None:
        assert embedding.dtype == torch.bfloat16 and embedding.is_contiguous()
        pointers.owners.append(embedding)
    return ModelConfig(
        layers=ctypes.addressof(layers),
        num_layers=len(layers),
        hidden_size=spec.hidden_size,
        num_q_heads=attention.num_q_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        activation=_ACTIVATIONS[spec.activation],
        eps=spec.eps,
        embed_scale=spec.embed_scale,
        sm_scale=attention.sm_scale,
        attn_soft_cap=attention.soft_cap,
        final_soft_cap=spec.final_soft_cap,
        embedding=None if embedding is None else embedding.data_ptr(),
        final_norm=pointers.floats(weights.final_norm),
        head=pointers.linear(weights.head),
    )


def _address(array: NDArray[Any] | None) -> int | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    # array.ctypes.data makes two objects more, for every array of every step.
    address: int = array.__array_interface__["data"][0]
    return address
