"""The C++ kernels by themselves: their test programs, and that no instruction set's file holds what its CPUs lack.

Long: compiling takes 15 s, linking and running a minute; in make test, test_cpu_backend.py has each set compute.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kernels.csrc.run import (
    ISA_FLAGS,
    Bench,
    build,
    compile_library,
    failure_of,
    find_isas,
    list_programs,
    with_tiles,
)

# In disassembly by objdump -w: address, bytes, mnemonic, operands.
LINE = re.compile(r"^\s*[0-9a-f]+:\t([0-9a-f ]+)\t(\S+)\s*(.*)$")
LEGACY_PREFIXES = {0x66, 0xF2, 0xF3, 0x2E, 0x3E, 0x64, 0x65, 0x26, 0x36, 0x67, 0xF0}
# SSE3, POPCNT, LZCNT and TZCNT, which are not in the 0F 38 and 0F 3A maps: prefix and opcode behind 0F.
AFTER_SSE2 = {(0xF2, 0x12), (0xF3, 0x12), (0xF3, 0x16), (0x66, 0x7C), (0xF2, 0x7C), (0x66, 0x7D), (0xF2, 0x7D)}
AFTER_SSE2 |= {(0x66, 0xD0), (0xF2, 0xD0), (0xF2, 0xF0), (0xF3, 0xB8), (0xF3, 0xBC), (0xF3, 0xBD)}

BMI = r"andn|bextr|bls[irc].*|bls(?:msk|r)|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|tzcnt|lzcnt"
TILES = r"tile.*|ldtilecfg|sttilecfg|tdp.*|tcmm.*"
BF16 = r"vdpbf16ps|v?cvtne2?ps2?bf16|vcvtne2ps2bf16|vcvtneps2bf16"
VNNI = r"vpdp(?:bus|wss)ds?"
# Extensions of AVX and AVX-512 that no file is compiled for: FMA4, XOP, IFMA, VBMI, VBMI2, BITALG, VPOPCNTDQ, CD, FP16.
OTHERS = (
    r"vfn?m(?:add|sub|addsub|subadd)[ps][sd]|vpmadd52.*|vperm[it]?2?b|vpermb|vpmultishiftqb|vp(?:compress|expand)[bw]"
    r"|vpsh[lr]dv?[wdq]|vpopcnt.*|vpshufbitqmb|vpconflict.*|vplzcnt.*|vpbroadcastm.*|vp2intersect.*|vgf2p8.*|vaes.*"
    r"|vpclmul.*|v[a-z0-9]+[ps]h|vpdpb[su][su]ds?(?<!vpdpbusd)(?<!vpdpbusds)|gf2p8.*|sha.*|aes.*|pclmul.*"
)
MAY_NOT = {
    "avx2": f"{BMI}|{TILES}|{BF16}|{VNNI}|{OTHERS}",
    "avx512_vnni": f"{BMI}|{TILES}|{BF16}|{OTHERS}",
    "avx512": f"{BMI}|{TILES}|{OTHERS}",
    "amx": f"{BMI}|{OTHERS}|tdpfp16ps|tcmm.*",
}


class Instruction(NamedTuple):
    """One line of a disassembly."""

    code: bytes
    mnemonic: str
    text: str

    @property
    def encoding(self) -> str:
        """`vex`, `evex`, `after sse2`, or `base` for what every x86-64 knows."""
        code, prefix = self.code, 0
        while code and (code[0] in LEGACY_PREFIXES or 0x40 <= code[0] <= 0x4F):
            prefix = code[0] if code[0] in (0x66, 0xF2, 0xF3) else prefix
            code = code[1:]
        if code[:1] in (b"\xc4", b"\xc5"):
            return "vex"
        if code[:1] == b"\x62":
            return "evex"
        is_later = code[:2] in (b"\x0f\x38", b"\x0f\x3a") or (code[:1] == b"\x0f" and (prefix, code[1]) in AFTER_SSE2)
        return "after sse2" if is_later else "base"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("csrc"))


@pytest.fixture(scope="module")
def objects(bench: Bench) -> dict[str, Path]:
    """The library's object files by their source's stem."""
    return compile_library(bench)


@pytest.mark.long
def test_every_program_passes_on_every_set_that_this_cpu_runs(bench: Bench, objects: dict[str, Path]) -> None:
    isas = find_isas(bench)
    programs = build(bench, list_programs(isas, is_slow=True), with_tiles(bench, objects, isas))
    assert {"linear", "pack", "pool", "attend-generic"} <= {program.name for program in programs}
    failures = {program.name: failure_of(bench.run(path, program.arguments)) for program, path in programs.items()}
    assert {name: failure for name, failure in failures.items() if failure} == {}


def disassemble(path: Path) -> Iterator[Instruction]:
    output = subprocess.run(["objdump", "-dw", str(path)], capture_output=True, text=True, check=True).stdout
    for line in output.splitlines():
        if match := LINE.match(line):
            code, mnemonic, operands = match.groups()
            text = f"{mnemonic} {operands}"
            if mnemonic in ("{vex}", "{evex}", "rep", "repz", "lock"):
                mnemonic = operands.split()[0]
            yield Instruction(bytes.fromhex(code), mnemonic, text)


def offences(path: Path, isa: str) -> set[str]:
    """Return the instructions of an object file that a CPU with just `isa` lacks."""
    found = set()
    for instruction in disassemble(path):
        encoding = instruction.encoding
        if isa == "generic":
            is_known = encoding == "base"
        else:
            is_known = encoding != "evex" or isa != "avx2"
            is_known &= not re.fullmatch(MAY_NOT[isa], instruction.mnemonic)
        if not is_known:
            found.add(instruction.text)
    return found


@pytest.mark.long
@pytest.mark.parametrize("isa", ISA_FLAGS)
def test_a_set_has_no_instruction_of_a_greater_one(objects: dict[str, Path], isa: str) -> None:
    assert offences(objects[f"isa_{isa}"], isa) == set()


@pytest.mark.long
@pytest.mark.parametrize(
    ("isa", "greater"), [("generic", "avx2"), ("avx2", "avx512_vnni"), ("avx512_vnni", "avx512"), ("avx512", "amx")]
)
def test_the_check_sees_the_next_greater_set(objects: dict[str, Path], isa: str, greater: str) -> None:
    assert offences(objects[f"isa_{greater}"], isa)


@pytest.mark.long
def test_everything_else_runs_on_any_x86_64(objects: dict[str, Path]) -> None:
    others = {stem: path for stem, path in objects.items() if not stem.startswith("isa_")}
    assert len(others) >= 5
    assert {stem: found for stem, path in others.items() if (found := offences(path, "generic"))} == {}


@pytest.mark.long
@pytest.mark.parametrize("isa", ISA_FLAGS)
def test_a_set_defines_its_table_and_nothing_that_the_linker_could_share(objects: dict[str, Path], isa: str) -> None:
    output = subprocess.run(
        ["nm", "--defined-only", "--extern-only", str(objects[f"isa_{isa}"])],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [line.split()[1:] for line in output.splitlines()] == [["T", f"_ZN9pointsman{len(isa) + 6}{isa}_tableEv"]]


@pytest.mark.parametrize(
    ("code", "encoding"),
    [
        ("c5 f8 57 c0", "vex"),  # vxorps
        ("62 f1 7c 48 57 c0", "evex"),
        ("66 0f 38 00 c1", "after sse2"),  # pshufb
        ("f3 48 0f b8 c1", "after sse2"),  # popcnt
        ("f2 0f 12 c1", "after sse2"),  # movddup
        ("66 41 0f 6f c1", "base"),  # movdqa
        ("f3 0f 10 c1", "base"),  # movss
    ],
)
def test_encodings(code: str, encoding: str) -> None:
    assert Instruction(bytes.fromhex(code), "", "").encoding == encoding
