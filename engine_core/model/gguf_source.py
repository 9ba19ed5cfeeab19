"""A .gguf file as a Hugging Face checkpoint: the same config, tensor names, row order and norms. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from engine_core.errors import CheckpointError
from engine_core.model.gguf_config import build_config, find_eos_ids
from engine_core.model.gguf_file import Container, TensorInfo, open_container
from engine_core.model.gguf_names import FAMILIES, GGUFFamily, hf_name
from engine_core.model.weights import GenerationDefaults, StoredMatrix, WeightSource
from kernels.fused import Storage, WeightRows

# Elements dequantised at a time: the temporaries stay in cache. 5x faster than a whole tensor at once.
_CHUNK_ELEMENTS = 131_072
_ROPE_FREQS = "rope_freqs.weight"
_FLOATS = {"F32": (np.float32, torch.float32), "F16": (np.int16, torch.float16), "BF16": (np.int16, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A model in one file.

    Attributes:
        config: What the model's config.json would say.
        weights: The tensors, in Hugging Face's names and meaning.
        generation: What ends an output.
        metadata: Every key of the file as plain Python values; the tokenizer is among them.
    """

    config: dict[str, Any]
    weights: WeightSource
    generation: GenerationDefaults
    metadata: dict[str, Any]


class GGUFWeights:
    """A WeightSource over a GGUF's tensors.

    Args:
        container: The open file.
        family: Its architecture's habits.
        names: Hugging Face name to GGUF name, of every tensor.
        num_heads: Query heads and key heads, to undo their row order.
    """

    def __init__(
        self, container: Container, family: GGUFFamily, names: Mapping[str, str], num_heads: tuple[int, int]
    ) -> None:
        self._container = container
        self._family = family
        self._names = names
        self._num_q_heads, self._num_kv_heads = num_heads
        self._shapes = _shapes(container, names)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        tensor = read_tensor(self._container, self._container.tensors[self._names[name]])
        if self._family.has_folded_norms and name.endswith("norm.weight"):
            return tensor.float() - 1.0
        num_heads = self._num_permuted_heads(name)
        return tensor if num_heads == 0 else _unpermute(name, tensor, num_heads)

    def read_stored(self, name: str) -> StoredMatrix:
        info = self._container.tensors[self._names[name]]
        raw = self._container.raw(info)
        num_rows, num_columns = info.shape
        address: int = raw.__array_interface__["data"][0]
        rows = WeightRows(address, raw, Storage[info.kind.name], num_rows, num_columns)
        num_heads = self._num_permuted_heads(name)
        if num_heads == 0:
            return StoredMatrix(rows)
        order = _unpermute(name, torch.arange(num_rows, dtype=torch.int32), num_heads)
        return StoredMatrix(rows, order.numpy())

    def _num_permuted_heads(self, name: str) -> int:
        """Return the heads whose rows are reordered; 0 = they are not."""
        if self._family.has_permuted_qk and ".q_proj." in name:
            return self._num_q_heads
        return self._num_kv_heads if self._family.has_permuted_qk and ".k_proj." in name else 0


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file. Only its header is read, and Llama 3's few rotary divisors.

    Raises:
        CheckpointError: The file is damaged, of an architecture or tensor type that is not supported, or lacks a key.
    """
    container = open_container(path)
    family = _family(container)
    names = _names(container, family)
    rope_freqs = None
    if _ROPE_FREQS in container.tensors:
        rope_freqs = read_tensor(container, container.tensors[_ROPE_FREQS]).float().numpy()
    config = build_config(container.metadata, family, _shapes(container, names), rope_freqs, path.name)
    num_heads = (config["num_attention_heads"], config["num_key_value_heads"])
    return GGUFFile(
        config=config,
        weights=GGUFWeights(container, family, names, num_heads),
        generation=GenerationDefaults(eos_token_ids=find_eos_ids(container.metadata)),
        metadata=container.metadata,
    )


def read_tensor(container: Container, info: TensorInfo) -> torch.Tensor:
    """Read one tensor as stored; quantised blocks become fp32.

    Returns:
        A tensor of ``info.shape`` that owns its memory.
    """
    raw = container.raw(info)
    if info.kind.name in _FLOATS:
        numpy_type, torch_type = _FLOATS[info.kind.name]
        # Torch has no view of read-only memory, and numpy no bf16: copy, then reinterpret.
        return torch.from_numpy(raw.view(numpy_type).copy()).view(torch_type).reshape(info.shape)
    return torch.from_numpy(_dequantise(raw, info)).reshape(info.shape)


def _dequantise(raw: np.ndarray[Any, np.dtype[np.uint8]], info: TensorInfo) -> np.ndarray[Any, np.dtype[np.float32]]:
    block_elements, block_bytes = GGML_QUANT_SIZES[info.kind]
    num_blocks = raw.size // block_bytes
    step = _CHUNK_ELEMENTS // block_elements
    out = np.empty(num_blocks * block_elements, np.float32)
    for first in range(0, num_blocks, step):
        last = min(first + step, num_blocks)
        blocks = raw[first * block_bytes : last * block_bytes].reshape(1, -1)
        out[first * block_elements : last * block_elements] = dequantize(blocks, info.kind).reshape(-1)
    return out


def _unpermute(name: str, tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put rotated pairs back into a head's two halves.

    A head's rows lie as a0 b0 a1 b1 ..., where pair i is (ai, bi); the decoder wants a0 a1 ... b0 b1 ...

    Source: LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py, inverted.
    """
    rows = tensor.shape[0]
    if rows % (2 * num_heads):
        raise CheckpointError(f"{name} has {rows} rows, which {num_heads} heads of even width do not make up.")
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _family(container: Container) -> GGUFFamily:
    name = container.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"{container.path} is of architecture {name!r}; supported in GGUF are {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def _names(container: Container, family: GGUFFamily) -> dict[str, str]:
    names: dict[str, str] = {}
    for gguf_name in container.tensors:
        if gguf_name == _ROPE_FREQS:
            continue
        name = hf_name(family, gguf_name)
        if name is None:
            raise CheckpointError(f"{container.path} has a tensor {gguf_name}, which {family.architecture} lacks.")
        names[name] = gguf_name
    return names


def _shapes(container: Container, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    return {name: container.tensors[gguf_name].shape for name, gguf_name in names.items()}
