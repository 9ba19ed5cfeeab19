"""Which compiler builds the C++ kernels, with which flags, and the build itself. Needs the standard library alone."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-w")
_CANDIDATES = ("c++", "g++", "clang++")
_AVX512_VNNI = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX512_VNNI, "-mavx512bf16")
_PROBE_S = 60.0


@dataclass(frozen=True, slots=True)
class Unit:
    """The source file of one instruction set, compiled with flags of its own.

    Attributes:
        source: File name. Whatever other .cpp file there is, is compiled for any x86-64.
        flags: Not every compiler knows them.
        macro: Tells the other files that it had to be left out.
    """

    source: str
    flags: tuple[str, ...]
    macro: str


UNITS = (
    Unit("isa_generic.cpp", (), "PM_NO_GENERIC"),
    Unit("isa_avx2.cpp", ("-mavx2", "-mfma", "-mf16c"), "PM_NO_AVX2"),
    Unit("isa_avx512_vnni.cpp", _AVX512_VNNI, "PM_NO_AVX512_VNNI"),
    Unit("isa_avx512.cpp", _AVX512, "PM_NO_AVX512"),
    Unit("isa_amx.cpp", (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), "PM_NO_AMX"),
)


class BuildError(Exception):
    """The library cannot be built; says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the library is built on and for.

    Attributes:
        system: As platform.system().
        machine: As platform.machine().
        cpu_flags: What the CPU says that it can do.
        environment: Where CXX and PATH are looked up.
        compile_s: After so long, a compiler is taken to hang.
    """

    system: str
    machine: str
    cpu_flags: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    compile_s: float = 600.0

    @classmethod
    def this(cls) -> Host:
        """Describe this machine."""
        return cls(platform.system(), platform.machine(), _read_cpu_flags(), os.environ)

    @property
    def is_supported(self) -> bool:
        """Whether the sources are written for it."""
        return self.system == "Linux" and self.machine in ("x86_64", "AMD64") and sys.maxsize > 2**32


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that answers.

    Attributes:
        command: How it is called.
        version: All that --version says.
        host: Where.
    """

    command: tuple[str, ...]
    version: str
    host: Host

    @property
    def name(self) -> str:
        return self.version.splitlines()[0] if self.version else shlex.join(self.command)

    def run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Call it; nothing on its standard input.

        Raises:
            BuildError: It cannot be called, or hangs.
        """
        return _run((*self.command, *arguments), self.host, timeout_s)

    def takes(self, flags: tuple[str, ...]) -> bool:
        """Whether it knows the flags."""
        if not flags:
            return True
        return self.run(*flags, "-fsyntax-only", "-x", "c++", os.devnull, timeout_s=_PROBE_S).returncode == 0


def find_compiler(host: Host) -> Compiler:
    """Return what $CXX names, or else the first of c++, g++ and clang++ that there is.

    Raises:
        BuildError: There is none, CXX makes no sense, or it does not even say its version.
    """
    named = _split_cxx(host.environment.get("CXX", ""))
    path = host.environment.get("PATH")
    if named:
        if shutil.which(named[0], path=path) is None:
            raise BuildError(f"CXX names {named[0]}, which is no program here: correct it, or unset it")
        return _answering(tuple(named), host)
    for name in _CANDIDATES:
        if (found := shutil.which(name, path=path)) is not None:
            return _answering((found,), host)
    raise BuildError("there is no C++ compiler (c++, g++ or clang++): install one, such as Debian's g++")


def _split_cxx(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:  # an open quote
        raise BuildError(f"CXX is {text!r}, which no shell can read ({error}): correct it, or unset it") from error


def compile_library(compiler: Compiler, folder: Path) -> Path:
    """Compile all sources, as many at once as there are cores, and link them.

    Args:
        compiler: Whose flags are tried first: an instruction set that it does not know is left out.
        folder: Gets the object files and the library.

    Raises:
        BuildError: A file does not compile, or nothing comes of it.
    """
    known = [unit for unit in UNITS if (SOURCES / unit.source).exists() and compiler.takes(unit.flags)]
    left_out = tuple(f"-D{unit.macro}" for unit in UNITS if unit not in known)
    own_flags = {unit.source: unit.flags for unit in known}
    skipped = {unit.source for unit in UNITS} - own_flags.keys()
    sources = sorted(path for path in SOURCES.glob("*.cpp") if path.name not in skipped)
    if not sources:
        raise BuildError(f"{SOURCES} holds no sources")

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        flags = own_flags.get(source.name, left_out)
        _check(compiler, source.name, *COMMON_FLAGS, *flags, "-c", str(source), "-o", target)
        return target

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sources))
    library = folder / "library.so"
    _check(compiler, "the library", "-shared", "-pthread", *objects, "-o", str(library))
    if not library.exists():
        raise BuildError(f"{shlex.join(compiler.command)} says that it built the library, but there is none")
    return library


def _check(compiler: Compiler, what: str, *arguments: str) -> None:
    result = compiler.run(*arguments, timeout_s=compiler.host.compile_s)
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if "error" in line.lower()] or result.stderr.splitlines()
        detail = said[0].strip() if said else f"it ended with status {result.returncode}"
        raise BuildError(f"{shlex.join(compiler.command)} does not build {what}: {detail}")


def _answering(command: tuple[str, ...], host: Host) -> Compiler:
    result = _run((*command, "--version"), host, _PROBE_S)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)} --version ends with status {result.returncode}, so it is no compiler")
    return Compiler(command, result.stdout.strip(), host)


def _run(command: tuple[str, ...], host: Host, timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=dict(host.environment),
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be called: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{shlex.join(command)} does not end within {timeout_s:.0f} s") from error


def _read_cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")
