"""deploy/gpu/build_flashinfer_modules.py without a compiler: which modules, with what, and what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

from engine_core.model.arch import arch_from_config
from kernels.flashinfer_support import HEAD_DIMS

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "deploy" / "gpu" / "build_flashinfer_modules.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_flashinfer_modules", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


script = load_script()


# ---------------------------------------------------------------------- which modules
def gemma3(head_dim: int) -> dict[str, object]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "intermediate_size": 64,
        "vocab_size": 64,
        "sliding_window": 32,
    }


def test_flashinfer_modules_exist_for_every_kind_of_attention_of_a_family_that_has_windows() -> None:
    arch = arch_from_config(gemma3(256))
    kinds = {script.Kind(arch.head_dim, window >= 0, bool(arch.attn_soft_cap)) for window in arch.windows}
    assert kinds == set(script.MODELS["gemma3"])


def test_flashinfer_modules_exist_for_every_head_that_the_backend_takes() -> None:
    kinds = script.select_kinds(list(script.MODELS), [])
    assert {kind.head_dim for kind in kinds} == set(HEAD_DIMS)
    assert {kind.head_dim for kind in kinds if kind.window} >= {128, 256}


def test_a_kind_is_compiled_once_and_hopper_has_a_second_module_of_it() -> None:
    kinds = script.select_kinds(["llama", "gemma3-27b"], [script.Kind(128), script.Kind(64, soft_cap=True)])
    assert [kind.name for kind in kinds] == ["128", "128:window", "64:cap"]
    names = script.module_names(kinds, fa3=True)
    assert len(names) == len(set(names)) == 2 * 3 + len(script.COMMON)
    assert sum(name.endswith("_sm90") for name in names) == 3
    assert not any(name.endswith("_sm90") for name in script.module_names(kinds, fa3=False))


@pytest.mark.parametrize(("archs", "has_fa3"), [("9.0a", True), ("8.0 9.0a", True), ("8.0,9.0a", True), ("8.9", False)])
def test_fa3_is_compiled_where_hopper_is_among_the_cards(archs: str, has_fa3: bool) -> None:
    assert script.has_hopper(archs) is has_fa3


def test_names_are_flashinfers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the sources it would compile."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    kinds = script.select_kinds(list(script.MODELS), [script.Kind(256, window=True, soft_cap=True)])
    specs = script.generate_specs(kinds, fa3=True)
    assert [spec.name for spec in specs] == script.module_names(kinds, fa3=True)


# ---------------------------------------------------------------------- arguments
@pytest.mark.parametrize("text", ["", "96", "128:windows", "128:window:window:x", "cap"])
def test_what_is_no_kind_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--list", "--kind", text])
    assert "is no kind: 64, 128 or 256" in capsys.readouterr().err


def test_an_unknown_family_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--models", "llama,gpt", "--list"]) == 64
    assert capsys.readouterr().err == f"--models: gpt not known; there are {', '.join(script.MODELS)}\n"


def test_it_lists_what_it_would_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--models", "none", "--only", "page,norm", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["page", "norm"]


# ---------------------------------------------------------------------- with what
def make_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_wheels(folder: Path) -> Path:
    """A CUDA toolkit as NVIDIA's wheels lay it out: lib without a 64, a runtime by its number only, no driver."""
    make_program(folder / "bin" / "nvcc")
    for name in ("include", "lib"):
        (folder / name).mkdir()
    (folder / "lib" / "libcudart.so.13").write_text("")
    return folder


def test_a_toolkit_of_wheels_gets_the_names_that_a_linker_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_wheels(tmp_path / "cu13")
    for tool in ("c++", "ninja"):
        make_program(tmp_path / "bin" / tool)
    (tmp_path / "bin" / "c++").write_text('#!/bin/sh\nfor last; do :; done; touch "$last"\n')
    monkeypatch.setenv("PATH", str(tmp_path / "bin") + os.pathsep + os.environ["PATH"])
    toolkit = script.find_toolkit(tmp_path / "scratch", {"CUDA_HOME": str(home)})
    links = toolkit.link_dirs[0]
    assert (links / "libcudart.so").resolve() == home / "lib" / "libcudart.so.13"
    assert (links / "libcuda.so").exists() and (links / "libcuda.so.1").exists()
    variables = script.build_environment(toolkit, [Path("/headers")], {"FLASHINFER_EXTRA_LDFLAGS": "-Lx"})
    assert variables["CUDA_HOME"] == str(home)
    assert variables["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
    assert variables["FLASHINFER_EXTRA_LDFLAGS"].split()[:2] == ["-Lx", f"-L{links}"]
    assert "-I/headers" in variables["FLASHINFER_EXTRA_CUDAFLAGS"]


def test_without_a_tool_a_sentence_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_wheels(tmp_path / "cu13")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script.main(["--only", "page"]) == 69
    assert capsys.readouterr().err == "c++ is not on the PATH.\n"


def test_without_flashinfer_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    asked = script.build_parser().parse_args(["--only", "page"])
    assert script.build(asked, [], False, ["page"], script.Toolkit(tmp_path)) == 69
    assert "cannot import FlashInfer" in capsys.readouterr().err


def test_a_header_that_only_a_wheel_has_is_named_with_its_wheel(tmp_path: Path) -> None:
    toolkit = script.Toolkit(make_wheels(tmp_path / "cu13"))
    (toolkit.home / "include" / "cublasLt.h").touch()
    with pytest.raises(script.MissingToolError, match=r"curand_kernel\.h is not there: pip install nvidia-curand"):
        script.check_headers(toolkit, [tmp_path])
    (tmp_path / "curand_kernel.h").touch()
    script.check_headers(toolkit, [tmp_path])


# ---------------------------------------------------------------------- what it says and leaves behind
def test_a_compilers_line_is_told_by_what_it_makes() -> None:
    assert script.shorten("[3/9 12s] nvcc -MF x.d -c page.cu -o /w/cached_ops/page/page.o ") == "[3/9 12s] page/page.o"
    assert script.shorten("page.cu(3): error: no") == "page.cu(3): error: no"


def test_modules_are_laid_out_as_flashinfer_looks_for_them_and_missing_ones_are_told(tmp_path: Path) -> None:
    (tmp_path / "cached" / "page").mkdir(parents=True)
    (tmp_path / "cached" / "page" / "page.so").write_bytes(b"new")
    target = tmp_path / "aot" / "page" / "page.so"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"old")
    with target.open("rb") as mapped:
        page, rope = script.collect(["page", "rope"], tmp_path / "cached", tmp_path / "aot")
        assert mapped.read() == b"old"  # whoever has it open keeps what it has
    assert (page.path, target.read_bytes()) == (target, b"new")
    assert (rope.path, rope.problem) == (None, "did not compile")
    assert [path.name for path in target.parent.iterdir()] == ["page.so"]
    lines = script.format_result([page, rope], 61.0).splitlines()
    assert lines[1].endswith("rope  did not compile")
    assert lines[2] == "1 of 2 modules, 0.0 MB, in 61 s"


# ---------------------------------------------------------------------- one version everywhere
def test_the_image_has_the_version_whose_internals_the_script_calls() -> None:
    lock = (ROOT / "deploy" / "image" / "requirements-cuda.lock").read_text()
    assert f"flashinfer-python=={script.VERSION} " in lock


def test_every_pin_of_the_two_locks_has_hashes() -> None:
    for name in ("image/requirements-cuda.lock", "gpu/requirements-nvcc.lock"):
        text = (ROOT / "deploy" / name).read_text()
        entries = re.findall(r"^(\S+==\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", text, re.MULTILINE)
        assert len(entries) == sum(not line.startswith(("#", " ")) for line in text.splitlines() if line)
        assert [pin for pin, hashes in entries if not hashes] == []
