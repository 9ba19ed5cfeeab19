"""Model files from anybody: sizes and offsets that lie, counts that overflow, and code that asks to be run."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file

from engine_core.errors import CheckpointError
from engine_core.model.checkpoint import open_checkpoint
from engine_core.model.gguf_file import open_container
from engine_core.model.gguf_source import open_gguf
from engine_core.model.safetensors_source import SafetensorsSource
from tests.engine_core.model.test_checkpoint import CONFIG, SHAPES

_UINT32, _STRING, _ARRAY = 4, 8, 9
_F32 = int(GGMLQuantizationType.F32)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def gguf(*parts: bytes, num_tensors: int, num_keys: int = 0, data: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(parts)
    return head + bytes(-len(head) % 32) + data


# CVE-2025-49847, CVE-2025-52566, CVE-2025-53630: sums and products of sizes that wrap around in 64 bits, and counts
# that are believed. CVE-2026-7482: a tensor that claims more bytes than the file has.
FORGED = {
    "a tensor longer than the file": gguf(tensor("t", (1024,), _F32, 0), num_tensors=1, data=bytes(64)),
    "a tensor that starts behind the file": gguf(tensor("t", (4,), _F32, 1 << 40), num_tensors=1, data=bytes(64)),
    "offset plus size wraps to a small number": gguf(
        tensor("t", (16,), _F32, (1 << 64) - 32), num_tensors=1, data=bytes(64)
    ),
    "elements times bytes wraps to 0": gguf(tensor("t", (1 << 62,), _F32, 0), num_tensors=1, data=bytes(64)),
    "the product of the dimensions wraps to 0": gguf(
        tensor("t", (1 << 32, 1 << 32), _F32, 0), num_tensors=1, data=bytes(64)
    ),
    "dimensions of all ones": gguf(tensor("t", ((1 << 64) - 1,) * 4, _F32, 0), num_tensors=1, data=bytes(64)),
    "too many dimensions": gguf(text("t") + struct.pack("<I", 1 << 31), num_tensors=1, data=bytes(64)),
    "more tensors than there are": gguf(num_tensors=(1 << 64) - 1, data=bytes(64)),
    "more keys than there are": gguf(num_tensors=0, num_keys=(1 << 64) - 1, data=bytes(64)),
    "a key longer than the file": gguf(struct.pack("<Q", (1 << 64) - 8), num_tensors=0, num_keys=1),
    "a text longer than the file": gguf(
        text("k") + struct.pack("<IQ", _STRING, 1 << 63), num_tensors=0, num_keys=1, data=bytes(64)
    ),
    "an array longer than the file": gguf(
        text("k") + struct.pack("<IIQ", _ARRAY, _UINT32, (1 << 62) + 1), num_tensors=0, num_keys=1, data=bytes(64)
    ),
    "an array of texts longer than the file": gguf(
        text("k") + struct.pack("<IIQ", _ARRAY, _STRING, 1 << 61), num_tensors=0, num_keys=1, data=bytes(64)
    ),
    "arrays within arrays": gguf(
        text("k") + struct.pack("<I", _ARRAY) + struct.pack("<IQ", _ARRAY, 1) * 50_000, num_tensors=0, num_keys=1
    ),
    "an alignment of half the address space": gguf(
        text("general.alignment") + struct.pack("<IQ", 10, 1 << 62),
        tensor("t", (4,), _F32, 0),
        num_tensors=1,
        num_keys=1,
        data=bytes(64),
    ),
    "an alignment of 0": gguf(
        text("general.alignment") + struct.pack("<II", _UINT32, 0),
        tensor("t", (4,), _F32, 0),
        num_tensors=1,
        num_keys=1,
        data=bytes(64),
    ),
    "a row that is no whole block": gguf(
        tensor("t", (33,), int(GGMLQuantizationType.Q8_0), 0), num_tensors=1, data=bytes(64)
    ),
    "a type that nobody knows": gguf(tensor("t", (4,), 1 << 31, 0), num_tensors=1, data=bytes(64)),
}


@pytest.mark.parametrize("what", FORGED)
def test_cve_2026_7482_cve_2025_53630_a_gguf_that_lies_is_refused_before_anything_is_read(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "forged.gguf"
    path.write_bytes(FORGED[what])
    with pytest.raises(CheckpointError, match=r"forged\.gguf cannot be used"):
        open_container(path)


def test_the_forger_can_also_write_a_good_file(tmp_path: Path) -> None:
    """Else the files above might be refused for another reason."""
    path = tmp_path / "good.gguf"
    values = np.arange(16, dtype=np.float32)
    path.write_bytes(gguf(tensor("t", (16,), _F32, 0), num_tensors=1, data=values.tobytes()))
    container = open_container(path)
    assert np.array_equal(container.raw(container.tensors["t"]).view(np.float32), values)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_rotary_divisors_of_a_strange_shape_are_a_sentence(tmp_path: Path, kind: str) -> None:
    number = int(GGMLQuantizationType[kind])
    for shape in ((), (0,), (32, 32)):
        path = tmp_path / "m.gguf"
        keys = text("general.architecture") + struct.pack("<I", _STRING) + text("llama")
        path.write_bytes(
            gguf(keys, tensor("rope_freqs.weight", shape, number, 0), num_tensors=1, num_keys=1, data=bytes(1 << 13))
        )
        with pytest.raises(CheckpointError):
            open_gguf(path)


def forge_safetensors(path: Path, header: Any, data: bytes = bytes(64), length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"t": entry([16], 0, 64)}, (1 << 64) - 1),
        ({"t": entry([16], 0, 64)}, 1 << 40),
        ({"t": entry([1024], 0, 4096)}, None),
        ({"t": entry([16], 1 << 40, (1 << 40) + 64)}, None),
        ({"t": entry([16], 64, 0)}, None),
        ({"t": entry([1 << 62], 0, 0)}, None),
        ({"t": entry([1 << 32, 1 << 32], 0, 0)}, None),
        ({"t": entry([-16], 0, 64)}, None),
        ({"t": entry([16], -64, 0)}, None),
        ({"t": entry([8], 0, 64)}, None),
        ({"a": entry([16], 0, 64), "b": entry([8], 32, 64)}, None),
        ({"t": entry([16], 0, 64, "PICKLE")}, None),
        ({"t": {"dtype": "F32"}}, None),
        (b"[" * 100_000, None),
        (b'{"t": ' * 100_000, None),
        (b"\xff" * 64, None),
    ],
)
def test_cve_2026_7482_a_safetensors_file_that_lies_is_refused(tmp_path: Path, header: Any, length: int | None) -> None:
    path = forge_safetensors(tmp_path / "model.safetensors", header, length=length)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no readable safetensors file"):
        SafetensorsSource([path])


def test_the_forger_can_write_a_good_safetensors_file_too(tmp_path: Path) -> None:
    path = forge_safetensors(tmp_path / "model.safetensors", {"t": entry([16], 0, 64)})
    assert SafetensorsSource([path]).read("t").shape == (16,)


def test_cve_2025_66448_cve_2026_22807_cve_2026_27893_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    """auto_map names a class in a file beside the weights; other servers imported it."""
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    code = {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.T"},
        "trust_remote_code": True,
        "custom_pipelines": {"text": {"impl": "evil.Pipeline"}},
        "quantization_config": {},
    }
    config = {**CONFIG, **{name: value for name, value in code.items() if name != "quantization_config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code))
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.arch.architecture == "Qwen3ForCausalLM"
    assert not (tmp_path / "ran").exists()
    assert not any("evil" in name for name in sys.modules)
