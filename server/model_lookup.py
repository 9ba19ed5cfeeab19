"""Where a model's files are, without fetching them, and how much is still to be fetched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._paths import filter_repo_objects

from server.model_resolver import (
    EMBEDDED_MODEL,
    UNWANTED,
    WANTED,
    EmbeddedModel,
    ModelResolveError,
    embedded_path,
    hub_errors_in_words,
    is_intact,
    resolve_local,
    split_hub_name,
)


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """A model and where it is.

    Attributes:
        served_name: What clients call it.
        path: A checkpoint directory or a .gguf file that is on disk; None = it must be downloaded.
        config_dir: Of one that must be: where its config.json is, if that could be had.
        download_bytes: What must be fetched; None = nothing, or nobody knows.
        problem: Why the download's size is not known, a sentence.
    """

    served_name: str
    path: Path | None
    config_dir: Path | None = None
    download_bytes: int | None = None
    problem: str = ""


def look_up_model(
    name: str | None,
    *,
    cache_dir: Path,
    hub_endpoint: str | None = None,
    hub_cache_dir: Path | None = None,
    embedded: EmbeddedModel = EMBEDDED_MODEL,
) -> ModelPlace:
    """Find a model; arguments as for resolve_model().

    Raises:
        ModelResolveError: It is no model's name, or the path holds none.
    """
    if not name:
        path = embedded_path(cache_dir, embedded)
        if is_intact(path, embedded):
            return ModelPlace(embedded.name, path)
        return ModelPlace(embedded.name, None, download_bytes=embedded.download_mb * 1_000_000)
    local = resolve_local(name)
    if local is not None:
        return ModelPlace(local.served_name, local.path)
    repo, file = split_hub_name(name)
    return _Hub(repo, file, hub_endpoint, hub_cache_dir).look_up(name)


@dataclass(frozen=True, slots=True)
class _Hub:
    repo: str
    file: str | None
    endpoint: str | None
    cache_dir: Path | None

    def look_up(self, name: str) -> ModelPlace:
        path = self._find_cached()
        if path is not None:
            return ModelPlace(name, path)
        try:
            with hub_errors_in_words(self.repo):
                num_bytes = sum(file.size for file in self._list_files())
        except ModelResolveError as error:
            if isinstance(error.__cause__, RepositoryNotFoundError):  # gated ones among them
                raise
            return ModelPlace(name, None, problem=str(error))
        if not num_bytes:
            raise ModelResolveError(
                f"{self.repo} holds {'no ' + self.file if self.file else 'no config.json with .safetensors files'}: "
                "check the name, or name a GGUF file in it as org/name:file.gguf."
            )
        return ModelPlace(name, None, config_dir=self._fetch_config(), download_bytes=num_bytes)

    def _find_cached(self) -> Path | None:
        try:
            snapshot = Path(
                snapshot_download(
                    self.repo,
                    allow_patterns=self._wanted,
                    ignore_patterns=UNWANTED,
                    endpoint=self.endpoint,
                    cache_dir=self.cache_dir,
                    local_files_only=True,
                )
            )
        except Exception:  # not in the cache, in whichever way the library says so
            return None
        if self.file is not None:
            return snapshot / self.file if (snapshot / self.file).is_file() else None
        # A download that was cut short leaves a folder without all its files.
        is_there = (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors"))
        return snapshot if is_there else None

    def _list_files(self) -> Iterable[RepoFile]:
        tree = HfApi(endpoint=self.endpoint).list_repo_tree(self.repo, recursive=True)
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
        return filter_repo_objects(
            files, allow_patterns=self._wanted, ignore_patterns=UNWANTED, key=lambda file: file.path
        )

    def _fetch_config(self) -> Path | None:
        """A few kilobytes, into the cache where the download will look for them too."""
        if self.file is not None:
            return None
        try:
            path = hf_hub_download(self.repo, "config.json", endpoint=self.endpoint, cache_dir=self.cache_dir)
        except Exception:
            return None
        return Path(path).parent

    @property
    def _wanted(self) -> list[str]:
        return WANTED if self.file is None else [self.file]
