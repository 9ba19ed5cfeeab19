"""Builds the C++ test programs and runs them: as they are, under a sanitizer, as another CPU, or under valgrind.

    python -m tests.kernels.csrc.run [--sanitize address|undefined|thread] [--qemu Haswell] [--valgrind] [--only linear]

qemu needs Debian's qemu-user, valgrind its valgrind. Where this CPU has no AMX, its kernels run on tiles in software.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu_compiler import COMMON_FLAGS, SOURCES, UNITS, Host, find_compiler

PROGRAMS = Path(__file__).parent
ISA_FLAGS = {unit.source.removeprefix("isa_").removesuffix(".cpp"): unit.flags for unit in UNITS}
EMULATE = "-DPM_EMULATE_AMX"
WITH_LIBRARY = ("forward", "linear", "pack", "pool")
ON_TILES = ("amx_tiles", "amx_linear", "amx_attend")
SANITIZERS = ("address", "undefined", "thread")


@dataclass(frozen=True, slots=True)
class Program:
    """A test program.

    Attributes:
        test: Its source is test_<test>.cpp.
        isa: Compiled for it, without the library; empty: links the library, and tests each of its tables.
        flags: Of the compiler, beyond the common ones.
        arguments: Of the program.
    """

    test: str
    isa: str
    flags: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.test, self.isa)))


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how programs are built and run.

    Attributes:
        folder: For object files and programs.
        flags: For all files, such as a sanitizer's.
        runner: What a program's command is put behind.
    """

    folder: Path
    flags: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()

    def compile(self, name: str, flags: Sequence[str], files: Sequence[Path]) -> Path:
        """Compile or link `files` to `name`.

        Raises:
            RuntimeError: The compiler refuses; what it said.
        """
        target = self.folder / name
        includes = (f"-I{SOURCES}", f"-I{PROGRAMS}")
        compiler = find_compiler(Host.this()).command
        command = [*compiler, *COMMON_FLAGS, *includes, *self.flags, *flags, *map(str, files), "-o", str(target)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{name} does not compile:\n{result.stderr[-4000:]}")
        return target

    def run(self, program: Path, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        return subprocess.run(
            [*self.runner, str(program), *arguments], capture_output=True, text=True, errors="replace", check=False
        )


def find_isas(bench: Bench) -> list[str]:
    """Return what the CPU that programs will run on can run."""
    probe = bench.compile("print_isas", (), [PROGRAMS / "print_isas.cpp", SOURCES / "cpu.cpp"])
    return bench.run(probe).stdout.split()


def list_programs(isas: Sequence[str], is_slow: bool) -> list[Program]:
    """Return the programs for a CPU that can run `isas`.

    Args:
        isas: As find_isas() returns them.
        is_slow: Programs that take a number of random cases get few.
    """
    few = ("20",) if is_slow else ()
    programs = [Program(test, "", ()) for test in WITH_LIBRARY]
    programs += [Program("attend", isa, ISA_FLAGS[isa], few) for isa in isas if isa != "amx"]
    if "avx512" in isas:
        emulated = (*ISA_FLAGS["avx512"], EMULATE)
        programs += [Program(test, "emulated", emulated, few if test == "amx_attend" else ()) for test in ON_TILES]
    if "amx" in isas:
        programs += [Program(test, "amx", ISA_FLAGS["amx"]) for test in ON_TILES]
    return programs


def compile_library(bench: Bench) -> dict[str, Path]:
    """Compile the library's sources, each instruction set's with its own flags; objects by the source's stem."""

    def compile_one(source: Path) -> Path:
        return bench.compile(f"{source.stem}.o", ("-c", *ISA_FLAGS.get(source.stem.removeprefix("isa_"), ())), [source])

    sources = sorted(SOURCES.glob("*.cpp"))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip((source.stem for source in sources), pool.map(compile_one, sources), strict=True))


def with_tiles(bench: Bench, library: dict[str, Path], isas: Sequence[str]) -> list[Path]:
    """Return the library's objects for a CPU that can run `isas`: without AMX, its tiles are software."""
    if "amx" in isas:
        return list(library.values())
    of_emulated = {"isa_amx": ISA_FLAGS["avx512"], "cpu": ()}
    emulated = {
        stem: bench.compile(f"{stem}-emulated.o", ("-c", EMULATE, *flags), [SOURCES / f"{stem}.cpp"])
        for stem, flags in of_emulated.items()
    }
    return list((library | emulated).values())


def build(bench: Bench, programs: Sequence[Program], objects: Sequence[Path]) -> dict[Program, Path]:
    """Compile programs; those that want the library link `objects`."""

    def build_one(program: Program) -> Path:
        others = [SOURCES / "cpu.cpp"] if program.isa else objects
        return bench.compile(program.name, program.flags, [PROGRAMS / f"test_{program.test}.cpp", *others])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(programs, pool.map(build_one, programs), strict=True))


def run_all(bench: Bench, only: str = "", *, is_slow: bool = False) -> Iterator[tuple[str, str]]:
    """Build and run the programs whose name holds `only`.

    Yields:
        A program's name, and why it failed, or nothing.
    """
    isas = find_isas(bench)
    programs = [program for program in list_programs(isas, is_slow) if only in program.name]
    wants_library = any(not program.isa for program in programs)
    objects = with_tiles(bench, compile_library(bench), isas) if wants_library else []
    for program, path in build(bench, programs, objects).items():
        yield program.name, failure_of(bench.run(path, program.arguments))


def failure_of(result: subprocess.CompletedProcess[str]) -> str:
    """Return how a program failed and what it said last; nothing if it did not."""
    said = f"{result.stdout[-4000:]}{result.stderr[-4000:]}"
    return f"status {result.returncode}:\n{said}" if result.returncode else ""


def main() -> int:
    """Run what the command line says; 1 if a program fails."""
    arguments = _parse_arguments()
    flags: tuple[str, ...] = ()
    if arguments.sanitize:
        flags = (f"-fsanitize={arguments.sanitize}", "-fno-sanitize-recover=all", "-O1", "-g")
    runner: tuple[str, ...] = ()
    if arguments.qemu:
        runner = ("qemu-x86_64", "-cpu", arguments.qemu)
    if arguments.valgrind:
        runner, flags = ("valgrind", "-q", "--error-exitcode=99"), ("-g",)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), flags, runner)
        print(f"runs: {', '.join(find_isas(bench))}", flush=True)
        since = time.monotonic()
        for name, failure in run_all(bench, arguments.only, is_slow=bool(runner or flags)):
            print(f"{name:24} {time.monotonic() - since:6.1f} s  {failure or 'ok'}", flush=True)
            since, failed = time.monotonic(), failed or bool(failure)
    return int(failed)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build and run the C++ test programs.")
    parser.add_argument("--sanitize", choices=SANITIZERS)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--qemu", metavar="CPU", help="run as this CPU, such as Haswell or Nehalem")
    how.add_argument("--valgrind", action="store_true")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
