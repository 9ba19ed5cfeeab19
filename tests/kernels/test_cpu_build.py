"""Building the C++ kernels with compilers that are shell scripts: what may go wrong, and who waits for whom."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cache_dir import default_cache_dir
from kernels.cpu_backend import load_library
from kernels.cpu_build import LIBRARY_NAME, FoundLibrary, find_library, install_library
from kernels.cpu_compiler import UNITS, Host

# Writes "built" wherever -o points, and a line into the log for every call that compiles or links.
FAKE = """#!/bin/sh
case "$*" in *--version*) echo "fake 1.0"; exit 0 ;; esac
{extra}
target=; previous=
for argument; do [ "$previous" = -o ] && target=$argument; previous=$argument; done
[ -z "$target" ] && exit 0
echo "$*" >> {log}
echo built > "$target"
"""
NOTHING = Path("/nonexistent")


class FakeToolchain:
    """A compiler on a PATH of its own, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.cache, self.log = folder / "bin", folder / "cache", folder / "log"
        self.bin.mkdir()
        self.lines: list[str] = []

    def add(self, name: str, extra: str = "") -> None:
        path = self.bin / name
        path.write_text(FAKE.format(extra=extra, log=self.log))
        path.chmod(0o755)

    def host(self, *, cpu_flags: str = "sse2", compile_s: float = 60.0, **environment: str) -> Host:
        # Shell scripts need a shell's tools; no compiler may come from there.
        return Host("Linux", "x86_64", cpu_flags, {"PATH": str(self.bin), **environment}, compile_s)

    def find(self, host: Host | None = None, installed: Path = NOTHING) -> FoundLibrary:
        return find_library(
            cache_dir=self.cache, progress=self.lines.append, host=host or self.host(), installed=installed
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def tools(tmp_path: Path) -> FakeToolchain:
    return FakeToolchain(tmp_path)


def test_the_first_use_builds_and_the_next_finds(tools: FakeToolchain) -> None:
    tools.add("g++")
    found = tools.find()
    assert found.path is not None, found.reason
    assert found.path.read_text() == "built\n"
    assert found.path.is_relative_to(tools.cache)
    assert [line.split()[0] for line in tools.lines] == ["Building", "Built"]
    num_calls = len(tools.calls())
    assert tools.find() == found
    assert len(tools.calls()) == num_calls
    assert list(found.path.parent.glob(".build-*")) == []


@pytest.mark.parametrize("change", ["compiler", "cpu"])
def test_another_compiler_or_cpu_builds_another(tools: FakeToolchain, change: str) -> None:
    tools.add("g++")
    first = tools.find()
    if change == "compiler":
        tools.add("c++")
    other = tools.find(tools.host(cpu_flags="avx2") if change == "cpu" else None)
    assert other.path is not None and other.path != first.path


def test_cxx_comes_first_and_may_have_arguments(tools: FakeToolchain) -> None:
    tools.add("c++", "exit 1")
    tools.add("mine")
    assert tools.find(tools.host(CXX=f"{tools.bin / 'mine'} -fast")).path is not None
    assert all(call.startswith("-fast ") for call in tools.calls())


@pytest.mark.parametrize(
    ("name", "extra", "environment", "reason"),
    [
        ("cc", "", {}, "there is no C\\+\\+ compiler .*install one"),
        ("c++", "", {"CXX": "nowhere"}, "CXX names nowhere, .*unset it"),
        ("c++", "", {"CXX": "c++ '-DX"}, "CXX is .*no shell can read .*unset it"),
        ("c++", "exit 0", {}, "says that it built the library, but there is none"),
        ("c++", "echo 'a.cpp:1: error: no' >&2; exit 1", {}, "does not build .*: a.cpp:1: error: no"),
        ("c++", "kill $$", {}, "does not build .*: it ended with status -15"),
    ],
)
def test_what_goes_wrong_is_told(
    tools: FakeToolchain, name: str, extra: str, environment: dict[str, str], reason: str
) -> None:
    tools.add(name, extra)
    found = tools.find(tools.host(**environment))
    assert found.path is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.reason)


def test_a_compiler_that_hangs_is_given_up(tools: FakeToolchain) -> None:
    tools.add("c++", 'case "$*" in *" -c "*) exec /bin/sleep 60 ;; esac')
    found = tools.find(tools.host(compile_s=0.05))
    assert found.path is None and "does not end within 0 s" in found.reason


def test_a_compiler_that_cannot_be_called_is_told(tools: FakeToolchain) -> None:
    (tools.bin / "c++").write_text("no program")
    (tools.bin / "c++").chmod(0o755)
    assert "cannot be called" in tools.find().reason


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(tools: FakeToolchain) -> None:
    tools.add("c++", 'case "$*" in *-mamx-int8*|*-mavx512bf16*) exit 1 ;; esac')
    assert tools.find().path is not None
    amx, avx512 = (next(unit for unit in UNITS if unit.source == f"isa_{isa}.cpp") for isa in ("amx", "avx512"))
    compiled = [call for call in tools.calls() if " -c " in call]
    assert not any(unit.source in call for unit in (amx, avx512) for call in compiled)
    plain = [call for call in compiled if "isa_" not in call]
    assert plain, "files for any x86-64"
    assert all(f"-D{amx.macro}" in call and f"-D{avx512.macro}" in call for call in plain)
    assert not any(f"-D{UNITS[1].macro}" in call for call in plain)


@pytest.mark.parametrize(("system", "machine"), [("Linux", "aarch64"), ("Darwin", "x86_64")])
def test_other_machines_are_not_tried(tools: FakeToolchain, system: str, machine: str) -> None:
    tools.add("c++")
    found = tools.find(Host(system, machine, "", {"PATH": str(tools.bin)}))
    assert found.path is None and machine in found.reason and system in found.reason
    assert tools.calls() == []


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:2])


def lose_digest(path: Path) -> None:
    (path.parent / "sha256").unlink()


@pytest.mark.parametrize("break_entry", [damage, lose_digest, Path.unlink])
def test_a_broken_entry_is_built_anew(tools: FakeToolchain, break_entry: Callable[[Path], None]) -> None:
    tools.add("c++")
    first = tools.find()
    assert first.path is not None
    break_entry(first.path)
    again = tools.find()
    assert again == first
    assert first.path.read_text() == "built\n"


def test_what_a_killed_build_left_goes_with_the_next(tools: FakeToolchain) -> None:
    tools.add("c++")
    first = tools.find()
    assert first.path is not None
    folder = first.path.parent
    (folder / ".build-killed").mkdir()
    (folder / ".build-killed" / "api.o").touch()
    first.path.unlink()
    assert tools.find() == first
    assert not list(folder.glob(".build-*"))


def test_of_two_who_need_it_one_builds(tools: FakeToolchain) -> None:
    # Linking waits until the other one says that it waits too.
    tools.add("c++", f'case "$*" in *-shared*) while ! [ -e {tools.cache}/go ]; do :; done ;; esac')

    def find() -> tuple[FoundLibrary, list[str]]:
        lines: list[str] = []

        def hear(line: str) -> None:
            lines.append(line)
            if "waiting" in line:
                (tools.cache / "go").touch()

        return find_library(cache_dir=tools.cache, progress=hear, host=tools.host(), installed=NOTHING), lines

    with ThreadPoolExecutor(2) as pool:
        results = [future.result() for future in [pool.submit(find), pool.submit(find)]]
    assert results[0][0] == results[1][0] and results[0][0].path is not None
    assert sorted(lines[0].split()[0] for _, lines in results) == ["Another", "Building"]
    assert sum("-shared" in call for call in tools.calls()) == 1


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_a_cache_that_cannot_be_written_to_is_no_obstacle(tools: FakeToolchain, obstacle: str) -> None:
    tools.add("c++")
    if obstacle == "file":
        tools.cache.write_text("")
    else:
        tools.cache.mkdir()
        tools.cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
        if os.geteuid() == 0:  # root writes where it likes: a folder that nobody can make stands for it
            tools.cache = Path("/proc/pointsman")
    found = tools.find()
    assert found.path is not None and found.is_temporary, found.reason
    assert found.path.read_text() == "built\n"
    assert any("cannot be written to" in line for line in tools.lines)
    shutil.rmtree(found.path.parent)


def test_what_others_could_have_written_is_not_run(tools: FakeToolchain) -> None:
    tools.add("c++")
    first = tools.find()
    assert first.path is not None
    folder, num_calls = first.path.parent, len(tools.calls())
    folder.chmod(0o775)
    assert tools.find() == first
    assert len(tools.calls()) == 2 * num_calls, "built anew"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert tools.find() == first and len(tools.calls()) == 2 * num_calls


def test_another_users_library_is_not_run(tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    tools.add("c++")
    first = tools.find()
    assert first.path is not None
    if os.geteuid() == 0:
        os.chown(first.path.parent, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    found = tools.find()
    assert found.path is not None and found.is_temporary and found.path != first.path
    assert any("belongs to another user" in line for line in tools.lines)
    found.path.unlink()


def test_a_user_without_a_home_is_told(tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    tools.add("c++")
    for name in ("HOME", "XDG_CACHE_HOME", "POINTSMAN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987654321)
    found = find_library(host=tools.host(), installed=NOTHING)
    assert found.path is None and "no home directory: name a folder" in found.reason


def test_an_installed_library_is_taken_while_its_sources_stay(tools: FakeToolchain, tmp_path: Path) -> None:
    tools.add("c++")
    installed = tmp_path / "built"
    assert install_library(installed, host=tools.host()) == ""
    found = tools.find(tools.host(PATH="/nonexistent"), installed)
    assert found == FoundLibrary(installed / LIBRARY_NAME)
    (installed / "sha256").write_text((installed / "sha256").read_text() + "0")
    assert tools.find(installed=installed).path != found.path


def test_an_installed_library_that_does_not_load_is_passed_over(tools: FakeToolchain, tmp_path: Path) -> None:
    tools.add("c++")
    assert install_library(tmp_path / "built", host=tools.host()) == ""
    assert tools.find(installed=tmp_path / "built").path == tmp_path / "built" / LIBRARY_NAME
    library, reason = load_library(installed=tmp_path / "built")
    assert library is not None, reason
    assert "generic" in library.runnable_isas()


def test_installing_says_why_it_did_not_build(tools: FakeToolchain, tmp_path: Path) -> None:
    assert "no C++ compiler" in install_library(tmp_path / "built", host=tools.host())
    assert "aarch64" in install_library(tmp_path / "built", host=Host("Linux", "aarch64"))


def test_the_cache_is_the_users() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/pointsman")
    assert default_cache_dir({"XDG_CACHE_HOME": "/c", "POINTSMAN_CACHE_DIR": "/d"}) == Path("/d")


def test_only_looking_builds_nothing_and_finds_what_was_built(tools: FakeToolchain) -> None:
    tools.add("c++")

    def look() -> FoundLibrary:
        return find_library(cache_dir=tools.cache, host=tools.host(), installed=NOTHING, may_build=False)

    assert look().path is None and "the first start builds them with fake 1.0" in look().reason
    assert not tools.cache.exists() and tools.calls() == []
    built = tools.find()
    assert built.path is not None and look() == built


def test_a_cache_without_room_is_built_beside_for_this_process_alone(
    tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.add("c++")
    usage = shutil.disk_usage(tools.bin)._replace(free=1 << 20)
    monkeypatch.setattr("kernels.cpu_build.shutil.disk_usage", lambda path: usage)
    found = tools.find()
    assert found.path is not None and found.is_temporary
    assert "No space left on device" in tools.lines[0] and "the next start builds again" in tools.lines[0]
    shutil.rmtree(found.path.parent)
