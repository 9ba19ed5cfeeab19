"""deploy/image/prune.py on folders that look like what it prunes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parent.parent.parent / "deploy" / "image" / "prune.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prune", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_flashinfer_modules_come_and_sources_go_but_for_the_templates_that_a_plan_reads(tmp_path: Path) -> None:
    make_files(tmp_path / "modules", "page/page.so")
    data = tmp_path / "data"
    make_files(data, "csrc/a.jinja", "csrc/nv/b.cu", "cutlass/c.h", "cccl/d.h", "include/e.h", "spdlog/f.h", "g.json")
    script.install_modules(tmp_path / "modules", data)
    assert list_files(data) == {"aot/page/page.so", "csrc/a.jinja", "g.json"}


def test_torch_keeps_the_one_program_that_it_starts(tmp_path: Path) -> None:
    make_files(tmp_path, "bin/torch_shm_manager", "bin/protoc", "bin/tests/x", "include/a.h", "share/b", "lib/c.so")
    script.prune_torch(tmp_path)
    assert list_files(tmp_path) == {"bin/torch_shm_manager", "lib/c.so"}
