"""Weights in a directory of safetensors files: which files, which tensors, one at a time. Knows no architecture."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from engine_core.errors import CheckpointError
from engine_core.model.weights import StoredMatrix
from kernels.fused import WeightRows

INDEX_NAME = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

# The decoder's tensors carry one of these prefixes, depending on what was saved: the bare decoder, the causal model,
# or a model with vision (old and new style).
_DECODER_NAME = re.compile(
    r"(?:language_model\.model\.|model\.language_model\.|model\.)?((?:embed_tokens|layers|norm)\..+)"
)
_HEAD_NAME = re.compile(r"(?:language_model\.)?(lm_head\..+)")


class SafetensorsSource:
    """A WeightSource over safetensors files, mapped into memory. Opening reads headers alone.

    Args:
        files: The files. Together they hold each tensor once.

    Attributes:
        dtypes: How each tensor is stored, in safetensors' words, such as ``BF16``.

    Raises:
        CheckpointError: A file is missing, truncated or otherwise unreadable, or two tensors share a name.
    """

    def __init__(self, files: list[Path]) -> None:
        self._handles: dict[str, tuple[Any, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for path in files:
            self._add(path)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        handle, stored_name = self._handles[name]
        try:
            return cast(torch.Tensor, handle.get_tensor(stored_name))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"The tensor {stored_name} cannot be read: {error}.") from error

    def read_stored(self, name: str) -> StoredMatrix:
        return StoredMatrix(WeightRows.of(self.read(name)))

    def _add(self, path: Path) -> None:
        try:
            handle: Any = safe_open(path, framework="pt")
            for stored_name in handle.keys():  # noqa: SIM118 - not a dict, and not iterable
                self._add_tensor(handle, stored_name, path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path.name} is no readable safetensors file ({error}); it may be truncated: fetch it again."
            ) from error

    def _add_tensor(self, handle: Any, stored_name: str, path: Path) -> None:
        name = canonical_name(stored_name)
        if name in self._handles:
            raise CheckpointError(f"{path.name} holds {stored_name}, which another tensor already stands for.")
        view = handle.get_slice(stored_name)
        self._handles[name] = (handle, stored_name)
        self._shapes[name] = tuple(view.get_shape())
        self.dtypes[name] = str(view.get_dtype())


def canonical_name(stored_name: str) -> str:
    """Return the causal model's name for a tensor, ``model.layers...``, whichever prefix it was saved under."""
    if match := _DECODER_NAME.fullmatch(stored_name):
        return f"model.{match[1]}"
    if match := _HEAD_NAME.fullmatch(stored_name):
        return match[1]
    return stored_name


def find_safetensors(directory: Path) -> list[Path]:
    """Return the files that make up a directory's weights: what its index names, or the single file.

    Raises:
        CheckpointError: There are none, only pickles, several without an index, or the index is broken.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        return _files_of_index(index)
    found = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    single = [path for path in found if path.name == "model.safetensors"] or found
    if len(single) == 1:
        return single
    if found:
        raise CheckpointError(f"{directory} has {len(found)} .safetensors files but no {INDEX_NAME} to join them.")
    if any(path.suffix in _PICKLE_SUFFIXES for path in directory.iterdir()):
        raise CheckpointError(
            f"{directory} has its weights only as pickles (.bin, .pt, .pth), which can run code when they are opened, "
            "so they are not read; convert the checkpoint to safetensors."
        )
    raise CheckpointError(f"{directory} holds no .safetensors file.")


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        outside = [name for name in names if _leaves_directory(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index.name} is no index of safetensors files ({error!r}); fetch it again.") from error
    if outside:
        raise CheckpointError(f"{index.name} points outside the checkpoint's directory: {outside[0]}.")
    if not names:
        raise CheckpointError(f"{index.name} names no files; fetch it again.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(names)} files that {index.name} names are missing: "
            f"{', '.join(missing[:5])}; the download is not complete."
        )
    return [index.parent / name for name in names]


def _leaves_directory(name: str) -> bool:
    # By the name alone: a hub cache's files are links to elsewhere.
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or ":" in name
