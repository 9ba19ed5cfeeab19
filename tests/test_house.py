"""The house rules that a machine can check: who imports whom, what stays out of the engine, how long a file may get."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "engine_core", "kernels")
ALLOWED = {"server": {"server", "engine_core"}, "engine_core": {"engine_core", "kernels"}, "kernels": {"kernels"}}
# Inside engine_core a module may import its own layer and those to the right of it.
LAYERS = (
    {"engine"},
    {"forecast"},
    {"device_start"},
    {"core", "step_executor"},
    {"model"},
    {"scheduler"},
    {"kv_cache"},
    {"request", "memory", "survey"},
    {"messages"},
    {"stats", "sampling_params", "config", "snapshot"},
    {"errors", "housekeeping"},
)
FORBIDDEN = {
    "engine_core": {"asyncio", "fastapi", "starlette", "uvicorn", "prometheus_client", "tokenizers", "transformers"},
    "kernels": {"fastapi", "starlette", "uvicorn", "prometheus_client", "tokenizers", "transformers", "asyncio"},
    "server": {"transformers"},
}
TORCH_FREE = (
    "engine_core/scheduler",
    "engine_core/kv_cache",
    "engine_core/request.py",
    "engine_core/core.py",
    "server",
)
# A step is a pure function of (state, events, now): time comes in as an argument, chance and the outside not at all.
PURE = "engine_core/scheduler/"
IMPURE = {"time", "datetime", "random", "secrets", "uuid", "os", "threading", "queue", "asyncio", "logging"}
# Two doors: the messages, and (apart, because it needs torch) the engine that answers them.
DOORS = ("engine_core", "engine_core.engine")
MAX_LINES = 500


def source_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def layer_of(module: str) -> int | None:
    return next((index for index, names in enumerate(LAYERS) if module in names), None)


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    relative = path.relative_to(ROOT)
    package = relative.parts[0]
    for name in imports(path):
        top, *rest = name.split(".")
        assert top not in FORBIDDEN[package], f"{relative} imports {name}"
        if top in PACKAGES:
            assert top in ALLOWED[package], f"{relative} imports {name}: server -> engine_core -> kernels only"
        if package == "server" and top == "engine_core":
            assert name in DOORS, f"{relative} imports {name}: the server enters engine_core by {DOORS} only"
        if any(str(relative).startswith(prefix) for prefix in TORCH_FREE):
            assert top != "torch", f"{relative} imports torch"
        if str(relative).startswith(PURE):
            assert top not in IMPURE, f"{relative} imports {name}: the scheduler is a pure function"
        if package == "engine_core" and top == "engine_core" and rest and len(relative.parts) > 1:
            own, other = layer_of(relative.parts[1].removesuffix(".py")), layer_of(rest[0])
            if own is not None:
                assert other is not None, f"{rest[0]} has no layer: name it in LAYERS"
                assert other >= own, f"{relative} imports {name}, which stands above it"


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES, f"{path.relative_to(ROOT)} is too long: split it along its meaning"
    assert ast.get_docstring(ast.parse(text)) or not text.strip(), f"{path.relative_to(ROOT)} has no docstring"


def test_every_engine_module_has_a_layer() -> None:
    names = {path.name.removesuffix(".py") for path in (ROOT / "engine_core").iterdir() if path.name != "__pycache__"}
    assert names - {"__init__", "py.typed"} == set().union(*LAYERS)
