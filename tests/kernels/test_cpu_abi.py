"""The ctypes twins against the header: every function and every member, of the same width and in the same order."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest

from kernels.cpu_abi import ABI_VERSION, FUNCTIONS, STRUCTS
from kernels.cpu_build import SOURCES
from kernels.cpu_library import KV_KINDS, PHASES
from kernels.fused import Storage, Target

HEADER = (SOURCES / "abi.h").read_text(encoding="utf-8")
CODE = re.sub(r"//[^\n]*", "", HEADER)
VALUES: dict[str, Any] = {
    "void": None,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
}


def twin(declaration: str) -> Any:
    """What ctypes calls a type: any pointer is an address, but a text that is read comes as bytes."""
    if "*" in declaration:
        return ctypes.c_char_p if re.search(r"\bchar\b", declaration) else ctypes.c_void_p
    return VALUES[declaration.split()[0]]


def declared_functions() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    found = {}
    for result, name, arguments in re.findall(r"PM_EXPORT ([^;()]*?)(pm_\w+)\(([^)]*)\);", CODE):
        found[name] = (twin(result), tuple(twin(each) for each in arguments.split(",") if each != "void"))
    return found


def declared_members(body: str) -> list[tuple[str, Any]]:
    members = []
    for declaration in body.split(";"):
        if not declaration.strip():
            continue
        head, name, length = re.fullmatch(r"\s*(.*?)(\w+)(?:\[(\d+)\])?\s*", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        members.append((name, twin(head) * int(length) if length else twin(head)))
    return members


def test_every_function_has_its_twin() -> None:
    declared = declared_functions()
    assert len(declared) == HEADER.count("PM_EXPORT ") - HEADER.count("#define PM_EXPORT ")
    assert declared == FUNCTIONS


def test_every_struct_has_its_twin() -> None:
    assert set(re.findall(r"typedef struct (\w+) \{", CODE)) == set(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_members_agree(name: str) -> None:
    match = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", CODE, re.DOTALL)
    assert match is not None
    assert declared_members(match[1]) == list(STRUCTS[name]._fields_)


def test_numbers_agree() -> None:
    numbers = {name: int(value) for name, value in re.findall(r"(PM_\w+) = (\d+)", CODE)}
    expected = {f"PM_{each.name}": int(each) for each in Storage}
    expected |= {f"PM_TO_{each.name}" if each is not Target.AS_STORED else "PM_AS_STORED": int(each) for each in Target}
    expected |= {f"PM_KV_{name.upper()}": value for name, value in KV_KINDS.items()}
    assert numbers == expected
    assert int(re.search(r"#define PM_ABI_VERSION (\d+)", CODE)[1]) == ABI_VERSION  # type: ignore[index]


def test_phases_agree() -> None:
    (told,) = re.findall(r"Seconds spent in each phase since the last call: (.*)\.", HEADER)
    assert told.split(", ") == list(PHASES)
