"""system_fingerprint: a short name for everything that decides which tokens a seed gives."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from engine_core import CudaSurvey, EngineConfig

_SAMPLE_BYTES = 2**16
_WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def compute_fingerprint(config: EngineConfig, version: str, cuda: CudaSurvey | None = None) -> str:
    """Return ``fp_`` and 12 digits, equal for equal weights, number formats, kernels and version.

    Weights are told apart by their names, sizes, and the first and last 64 KiB of each file: reading gigabytes would
    double the time to start.

    Args:
        config: Resolved: says where the checkpoint lies and how it is computed.
        version: Of Pointsman.
        cuda: What computes, where a card does.
    """
    model, device = config.model, config.device
    kernels: list[object] = [device.backend, device.cpu_isa]
    if cuda is not None:
        kernels += [cuda.cards[0].capability, cuda.flashinfer]
    numbers = [model.dtype, model.quantization, config.cache.kv_cache_dtype]
    digest = hashlib.sha256(json.dumps([version, *kernels, *numbers]).encode())
    for file in _weight_files(config.model.path):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(_read_ends(file))
    return f"fp_{digest.hexdigest()[:12]}"


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES or file.name == "config.json")


def _read_ends(file: Path) -> bytes:
    with file.open("rb") as opened:
        head = opened.read(_SAMPLE_BYTES)
        opened.seek(max(0, file.stat().st_size - _SAMPLE_BYTES))
        return head + opened.read()
