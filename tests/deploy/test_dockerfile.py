"""The Dockerfile against what it speaks of: files, flags, versions, locks, and what is kept away from a build."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from server.config import field_names

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each on one line: ("FROM", "${BASE} AS packages"), ..."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def read_stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions by stage, in order; those before the first FROM are left out."""
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for word, rest in read_instructions():
        if word == "FROM":
            current = stages.setdefault(rest.split(" AS ")[1], [])
        current.append((word, rest))
    return stages


def read_copies() -> list[str]:
    """What is copied from the working copy."""
    copies = [rest.split()[:-1] for word, rest in read_instructions() if word == "COPY" and "--from" not in rest]
    return [source for sources in copies for source in sources]


# ---------------------------------------------------------------------- stages
def test_cpu_is_what_a_plain_build_makes_and_cuda_is_there() -> None:
    stages = list(read_stages())
    assert stages[-1] == "cpu"
    assert "cuda" in stages


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_is_nobody_in_particular_and_brings_no_build_stage_along(target: str) -> None:
    stages = read_stages()
    assert stages[target][0] == ("FROM", f"runtime AS {target}")
    assert stages[target][-1] == ("USER", "10001:0")
    assert [rest for word, rest in stages[target] if word == "COPY"] == [
        f"--from={target}-build /opt/pointsman /opt/pointsman"
    ]
    assert stages["runtime"][0] == ("FROM", "${BASE} AS runtime")
    # Arguments and secrets of a build stay where they are thrown away.
    assert {rest.split("=")[0] for word, rest in stages["runtime"] if word == "ARG"} == {"VERSION", "REVISION"}


def test_its_entry_points_exist() -> None:
    runtime = dict(read_stages()["runtime"])
    script = PurePosixPath(json.loads(runtime["ENTRYPOINT"])[0]).name
    assert script in PROJECT["scripts"]
    assert runtime["STOPSIGNAL"] == "SIGTERM"
    command = json.loads(runtime["HEALTHCHECK"].partition(" CMD ")[2])
    assert command[1:3] == ["-I", "-m"]
    assert importlib.util.find_spec(command[3]) is not None


def test_its_variables_are_flags() -> None:
    (variables,) = (rest for word, rest in read_stages()["runtime"] if word == "ENV")
    named = set(re.findall(r"POINTSMAN_([A-Z_]+)=", variables))
    assert named == {"HOST", "PORT", "CACHE_DIR"}
    assert {name.lower() for name in named} <= field_names()


def test_its_version_is_the_projects() -> None:
    assert ("ARG", f"VERSION={PROJECT['version']}") in read_stages()["runtime"]
    assert f'org.opencontainers.image.licenses="{PROJECT["license"]}"' in dict(read_stages()["runtime"])["LABEL"]


# ---------------------------------------------------------------------- locks
def test_the_images_lock_is_the_lock_with_hashes() -> None:
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    pins = {line for line in lock if not line.startswith("#")}
    entries = re.findall(r"^(\S+==\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", read_image_lock(), re.MULTILINE)
    assert {pin for pin, _ in entries} == {normalize(pin) for pin in pins if not pin.startswith("torch==")}
    assert [pin for pin, hashes in entries if not hashes] == []


def read_image_lock() -> str:
    return (ROOT / "requirements-image.lock").read_text()


def normalize(pin: str) -> str:
    name, _, version = pin.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


# ---------------------------------------------------------------------- the cuda image's modules
def test_the_cuda_image_has_modules_compiled_in_and_compiles_nothing_itself() -> None:
    stages = read_stages()
    assert "FLASHINFER_DISABLE_JIT=1" in dict(stages["cuda"])["ENV"]
    run = next(rest for word, rest in stages["cuda-modules"] if word == "RUN")
    assert '--models "$FLASHINFER_MODELS" --out /modules' in run
    built = next(rest for word, rest in stages["cuda-build"] if word == "RUN")
    assert "--mount=type=bind,from=cuda-modules,source=/modules,target=/modules" in built
    assert "--modules /modules" in built
    for stage in ("cuda-modules", "cuda-build"):
        assert stages[stage][0] == ("FROM", f"cuda-packages AS {stage}")


def test_every_file_of_the_cuda_image_but_torch_is_checked_against_a_hash() -> None:
    stages = read_stages()
    runs = [rest for stage in ("cuda-packages", "cuda-modules") for word, rest in stages[stage] if word == "RUN"]
    commands = [command for rest in runs for command in re.findall(r"pip install [^;&]*", rest)]
    assert len(commands) == 3
    for command in commands:
        assert "--require-hashes" in command or "'^torch=='" in command, command


def test_flashinfer_is_the_version_that_the_project_asks_for() -> None:
    (asked,) = PROJECT["optional-dependencies"]["cuda"]
    assert f"\n{asked} " in (ROOT / "deploy" / "image" / "requirements-cuda.lock").read_text()


# ---------------------------------------------------------------------- what a build gets to see
def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file through: the last pattern that matches it, or a folder above it, decides."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    candidates = [path, *(str(parent) for parent in PurePosixPath(path).parents)][:-1]
    sent = True
    for pattern in (line for line in lines if line and not line.startswith("#")):
        bare = pattern.removeprefix("!")
        if any(matches(candidate, bare) for candidate in candidates):
            sent = pattern.startswith("!")
    return sent


def matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(part, pattern[3:]) for part in path.split("/"))
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


@pytest.mark.parametrize(
    "path",
    [
        *(".venv/bin/python", ".git/config", ".env", "deploy/secrets/api-keys", "tests/conftest.py", "out.jsonl"),
        *(
            "server/__pycache__/app.cpython-311.pyc",
            "kernels/csrc/built/libpointsman_cpu.so",
            "build/lib/server/app.py",
        ),
    ],
)
def test_nothing_private_or_stale_gets_near_a_build(path: str) -> None:
    assert not is_sent(path)


def test_everything_that_is_copied_is_there_and_gets_there() -> None:
    for source in read_copies():
        assert (ROOT / source).exists(), source
        files = [path for path in (ROOT / source).rglob("*") if path.is_file()] or [ROOT / source]
        wanted = [
            str(path.relative_to(ROOT)) for path in files if path.suffix in {".py", ".cpp", ".h", ".lock", ".toml"}
        ]
        kept = [path for path in wanted if "__pycache__" not in path]
        assert [path for path in kept if not is_sent(path)] == []


def test_what_the_package_is_built_from_is_copied() -> None:
    copied = set(read_copies())
    packages = {"server", "engine_core", "kernels"}
    assert packages | {"pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]} <= copied
