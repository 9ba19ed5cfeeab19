"""Compiles the FlashInfer modules that Pointsman uses ahead of time, so that no start of a server has to.

    python deploy/gpu/build_flashinfer_modules.py                      # into the installed FlashInfer
    python deploy/gpu/build_flashinfer_modules.py --out modules/       # to be copied there: flashinfer/data/aot/

Run it with the Python that has FlashInfer. Needs nvcc 12.8 or newer (13 for a torch of CUDA 13), a C++ compiler and
ninja; no graphics card, no torch headers. Compiles for FLASHINFER_CUDA_ARCH_LIST, by default 9.0a (H100, H200). What
was compiled before is kept under FLASHINFER_WORKSPACE_BASE and only completed. Exit codes: 0 all is there, 1 something
did not compile or does not load, 64 an argument makes no sense, 69 a tool is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = "0.7.4"  # whose internals this script calls
DEFAULT_ARCHS = "9.0a"
# Headers that the norms include and a toolkit may lack -> the wheel that has them, which torch brings along.
NORM_HEADERS = {"cublasLt.h": "nvidia-cublas", "curand_kernel.h": "nvidia-curand"}

# What every model calls: pages, rotary embedding, norms, activations, and the merging of a shared prefix's attention.
# Module -> a function of it, by which it is known to have loaded.
COMMON = {
    "page": "append_paged_kv_cache",
    "rope": "apply_rope_pos_ids_cos_sin_cache",
    "norm": "fused_add_rmsnorm",
    "silu_and_mul": "silu_and_mul",
    "gelu_tanh_and_mul": "gelu_tanh_and_mul",
    "cascade": "merge_state",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of attention: FlashInfer compiles each apart, in bf16, without rotary embedding inside.

    Attributes:
        head_dim: Of queries, keys and values.
        window: It looks back over a window only.
        soft_cap: Its scores are capped.
    """

    head_dim: int
    window: bool = False
    soft_cap: bool = False

    @property
    def name(self) -> str:
        return f"{self.head_dim}{':window' * self.window}{':cap' * self.soft_cap}"


# Which kinds the models that Pointsman knows are made of.
MODELS: dict[str, tuple[Kind, ...]] = {
    "llama": (Kind(128),),  # 3.x from 3B on; Qwen2.5 from 3B on, Qwen3, Mistral without a window
    "small-llama": (Kind(64),),  # Llama 3.2 1B, SmolLM2, Qwen2.5 to 1.5B
    "mistral": (Kind(128, window=True),),  # 7B v0.1
    "gemma3": (Kind(256), Kind(256, window=True)),  # 270M to 12B
    "gemma3-27b": (Kind(128), Kind(128, window=True)),
}


@dataclass(frozen=True, slots=True)
class Toolkit:
    """What compiles.

    Attributes:
        home: CUDA_HOME: bin/nvcc, include, lib or lib64.
        include_dirs: Further headers; see NORM_HEADERS.
        link_dirs: Where libcudart.so and libcuda.so lie, the latter a stub where there is no driver.
    """

    home: Path
    include_dirs: tuple[Path, ...] = ()
    link_dirs: tuple[Path, ...] = ()


@dataclass(slots=True)
class Built:
    """What came of a module."""

    name: str
    path: Path | None = None
    problem: str = ""
    num_bytes: int = field(default=0)


class MissingToolError(Exception):
    """Something to compile with is not there. The message is a sentence."""


# ---------------------------------------------------------------------- which modules
def parse_kind(text: str) -> Kind:
    """Read ``128``, ``128:window``, ``256:window:cap``."""
    head_dim, *rest = text.split(":")
    if not head_dim.isdigit() or int(head_dim) not in (64, 128, 256) or not set(rest) <= {"window", "cap"}:
        raise argparse.ArgumentTypeError(f"{text!r} is no kind: 64, 128 or 256, then :window, :cap or both")
    return Kind(int(head_dim), "window" in rest, "cap" in rest)


def select_kinds(models: Sequence[str], kinds: Sequence[Kind]) -> list[Kind]:
    """Return each kind once, those of the models first.

    Args:
        models: Names of MODELS.
        kinds: Further ones.
    """
    return list(dict.fromkeys([*(kind for model in models for kind in MODELS[model]), *kinds]))


def prefill_names(kind: Kind, *, fa3: bool) -> list[str]:
    """Return the modules of a kind. FlashInfer's decoding on tensor cores is its fa2 prefill."""
    base = (
        "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_"
        f"head_dim_qk_{kind.head_dim}_head_dim_vo_{kind.head_dim}_posenc_0_"
        f"use_swa_{kind.window}_use_logits_cap_{kind.soft_cap}_f16qk_False"
    )
    return [f"{base}_kv_stride_equal", *([f"{base}_sm90"] if fa3 else [])]


def module_names(kinds: Iterable[Kind], *, fa3: bool) -> list[str]:
    """Return all that will be compiled, the slow ones first."""
    return [*(name for kind in kinds for name in reversed(prefill_names(kind, fa3=fa3))), *COMMON]


def generate_specs(kinds: Iterable[Kind], *, fa3: bool) -> list[Any]:
    """Have FlashInfer write the sources of the modules; the order is module_names()'s."""
    import torch
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module, gen_batch_prefill_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.rope import gen_rope_module

    bf16 = torch.bfloat16
    specs = []
    for kind in kinds:
        rest = (bf16, bf16, bf16, torch.int32, kind.head_dim, kind.head_dim, 0, kind.window, kind.soft_cap, False)
        if fa3:
            specs.append(gen_batch_prefill_module("fa3", *rest))
        specs.append(_gen_batch_prefill_primary_module("fa2", *rest))
    common: dict[str, Callable[[], Any]] = {
        "page": gen_page_module,
        "rope": gen_rope_module,
        "norm": gen_norm_module,
        "silu_and_mul": lambda: gen_act_and_mul_module("silu"),
        "gelu_tanh_and_mul": lambda: gen_act_and_mul_module("gelu_tanh"),
        "cascade": gen_cascade_module,
    }
    return specs + [common[name]() for name in COMMON]


# ---------------------------------------------------------------------- with what
def find_toolkit(scratch: Path, environment: dict[str, str]) -> Toolkit:
    """Find nvcc and what belongs to it, and make what is missing for linking.

    Args:
        scratch: A folder for links and the stub of the driver's library.
        environment: CUDA_HOME of it counts.

    Raises:
        MissingToolError: There is no nvcc, C++ compiler or ninja.
    """
    wheels = _nvidia_wheels()
    candidates = [Path(environment["CUDA_HOME"])] if environment.get("CUDA_HOME") else []
    candidates += [*wheels, Path("/usr/local/cuda")]
    home = next((path for path in candidates if (path / "bin" / "nvcc").is_file()), None)
    if home is None:
        raise MissingToolError(f"No bin/nvcc under {', '.join(map(str, candidates))}: set CUDA_HOME.")
    for tool in ("c++", "ninja"):
        if shutil.which(tool) is None:
            raise MissingToolError(f"{tool} is not on the PATH.")
    include_dirs = [path / "include" for path in wheels if path != home and (path / "include").is_dir()]
    libraries = [path for base in (home, *wheels) for path in (base / "lib64", base / "lib") if path.is_dir()]
    links = scratch / "link"
    links.mkdir(parents=True, exist_ok=True)
    _link_runtime(links, libraries)
    _link_driver(links, libraries)
    return Toolkit(home.resolve(), tuple(include_dirs), (links, *libraries))


def _nvidia_wheels() -> list[Path]:
    """Where NVIDIA's wheels for CUDA 13 lie, which torch brings along."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return [path for root in roots if (path := Path(root) / "cu13").is_dir()]


def _link_runtime(links: Path, libraries: Sequence[Path]) -> None:
    """Wheels have libcudart.so.13 and not the name without a number, by which a linker looks."""
    link = links / "libcudart.so"
    found = [path for folder in libraries for path in sorted(folder.glob("libcudart.so*"))]
    if found and not link.exists():
        link.symlink_to(found[0].resolve())


def _link_driver(links: Path, libraries: Sequence[Path]) -> None:
    """The driver's library comes with the driver. Here its name must do."""
    stub = links / "libcuda.so"
    if stub.exists() or any((folder / "stubs" / "libcuda.so").exists() for folder in libraries):
        return
    subprocess.run(["c++", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", os.devnull, "-o", str(stub)], check=True)
    (links / "libcuda.so.1").symlink_to(stub.name)


def check_headers(toolkit: Toolkit, extra_includes: Sequence[Path]) -> None:
    """Make sure that the norms can be compiled.

    Raises:
        MissingToolError: A header is nowhere to be found.
    """
    folders = (toolkit.home / "include", *extra_includes, *toolkit.include_dirs)
    for header, wheel in NORM_HEADERS.items():
        if not any((folder / header).is_file() for folder in folders):
            raise MissingToolError(f"{header} is not there: pip install {wheel}, or name its folder by --include.")


def build_environment(toolkit: Toolkit, extra_includes: Sequence[Path], base: dict[str, str]) -> dict[str, str]:
    """Return the variables by which FlashInfer compiles; it reads most of them when it is imported."""
    includes = " ".join(f"-I{path}" for path in (*extra_includes, *toolkit.include_dirs))
    links = " ".join(f"-L{path}" for path in toolkit.link_dirs)
    return {
        **base,
        "CUDA_HOME": str(toolkit.home),
        "FLASHINFER_CUDA_ARCH_LIST": base.get("FLASHINFER_CUDA_ARCH_LIST", DEFAULT_ARCHS),
        "FLASHINFER_EXTRA_CUDAFLAGS": f"{base.get('FLASHINFER_EXTRA_CUDAFLAGS', '')} {includes}".strip(),
        "FLASHINFER_EXTRA_LDFLAGS": f"{base.get('FLASHINFER_EXTRA_LDFLAGS', '')} {links}".strip(),
    }


# ---------------------------------------------------------------------- compiling
def compile_specs(specs: Sequence[Any], jobs: int, workspace: Path) -> None:
    """Compile all modules in one go and tell how far it is. One that fails does not stop the others."""
    for spec in specs:
        spec.write_ninja()
    everything = workspace / "pointsman.ninja"
    lines = ["ninja_required_version = 1.3", *(f"subninja {spec.ninja_path}" for spec in specs)]
    everything.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["ninja", "-C", str(workspace), "-f", str(everything), "-j", str(jobs), "-k", "0"]
    status = {**os.environ, "NINJA_STATUS": "[%f/%t %es] "}
    with subprocess.Popen(command, env=status, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ninja:
        assert ninja.stdout is not None
        for line in ninja.stdout:
            print(shorten(line.rstrip()), flush=True)


def shorten(line: str) -> str:
    """Return a line of ninja's: of a command only what it makes, anything else as it is."""
    progress, bracket, command = line.partition("] ")
    if not line.startswith("[") or " -o " not in command:
        return line
    made = Path(command.partition(" -o ")[2].split()[0])
    return f"{progress}{bracket}{made.parent.name}/{made.name}"


def collect(names: Iterable[str], compiled: Path, out: Path) -> list[Built]:
    """Copy each module to where FlashInfer loads it from without looking at sources: ``out/NAME/NAME.so``."""
    results = []
    for name in names:
        source, target = compiled / name / f"{name}.so", out / name / f"{name}.so"
        if not source.is_file():
            results.append(Built(name, problem="did not compile"))
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, then renamed: a server that has the old one mapped must not see it change.
        shutil.copyfile(source, target.with_suffix(".part"))
        target.with_suffix(".part").replace(target)
        results.append(Built(name, target, num_bytes=target.stat().st_size))
    return results


_LOAD = """
import sys, tvm_ffi
module = tvm_ffi.load_module(sys.argv[1])
sys.exit(0 if module.get_function(sys.argv[2]) is not None else "no function " + sys.argv[2])
"""


def check_loads(built: Iterable[Built], toolkit: Toolkit) -> None:
    """Load each module in a process of its own and look for its function. Without a driver its stub must do: then this
    proves that the file is whole and that its symbols resolve, not that a card runs it."""
    folders = ":".join(map(str, (*toolkit.link_dirs, *toolkit.home.glob("lib64"))))
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{os.environ.get('LD_LIBRARY_PATH', '')}:{folders}".lstrip(":")}
    for each in built:
        if each.path is None:
            continue
        function = COMMON.get(each.name, "paged_run")
        command = [sys.executable, "-c", _LOAD, str(each.path), function]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last_line = (done.stderr.strip() or "no reason given").splitlines()[-1]
            each.problem = f"does not load: {last_line}"


def format_result(built: Sequence[Built], seconds: float) -> str:
    """Return a line a module and one for all."""
    lines = [f"{each.num_bytes / 1e6:7.2f} MB  {each.name}  {each.problem}".rstrip() for each in built]
    num_good = sum(not each.problem for each in built)
    total = sum(each.num_bytes for each in built)
    return "\n".join([*lines, f"{num_good} of {len(built)} modules, {total / 1e6:.1f} MB, in {seconds:.0f} s"])


# ---------------------------------------------------------------------- the command
def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    models = ", ".join(MODELS)
    add("--models", metavar="A,B", default="all", help=f"Families to compile for: {models}, or none. [default: all]")
    add("--kind", metavar="K", type=parse_kind, action="append", default=[], help="One more, such as 256:window:cap.")
    add("--no-fa3", action="store_true", help="Leave out what only Hopper's cards (9.0a) use, and do use.")
    add("--only", metavar="A,B", default="", help="Of all these only modules whose names begin so.")
    add("--out", metavar="DIR", type=Path, help="Where to. [default: data/aot of the installed FlashInfer]")
    add("--include", metavar="DIR", type=Path, action="append", default=[], help="Further headers.")
    add("--jobs", metavar="N", type=int, default=0, help="Compilers at a time. [default: one a CPU]")
    add("--list", action="store_true", help="Name the modules and stop.")
    return parser


def parse_models(text: str) -> list[str]:
    """Read ``--models``.

    Raises:
        ValueError: A name is not known.
    """
    names = list(MODELS) if text == "all" else [] if text == "none" else text.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ValueError(f"--models: {', '.join(unknown)} not known; there are {', '.join(MODELS)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    asked = build_parser().parse_args(arguments)
    try:
        kinds = select_kinds(parse_models(asked.models), asked.kind)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 64
    archs = os.environ.get("FLASHINFER_CUDA_ARCH_LIST", DEFAULT_ARCHS)
    fa3 = not asked.no_fa3 and has_hopper(archs)
    chosen = [name for name in module_names(kinds, fa3=fa3) if is_chosen(name, asked.only)]
    if asked.list:
        print("\n".join(chosen))
        return 0
    if importlib.util.find_spec("flashinfer") is None:
        print("This Python has no FlashInfer: install the extra cuda first, pip install '.[cuda]'.", file=sys.stderr)
        return 69
    with tempfile.TemporaryDirectory() as scratch:
        try:
            toolkit = find_toolkit(Path(scratch), dict(os.environ))
            if "norm" in chosen:
                check_headers(toolkit, asked.include)
        except MissingToolError as error:
            print(error, file=sys.stderr)
            return 69
        os.environ.update(build_environment(toolkit, asked.include, dict(os.environ)))
        return build(asked, kinds, fa3, chosen, toolkit)


def has_hopper(archs: str) -> bool:
    """Whether a list such as ``9.0a 10.0a`` has Hopper in it, whose prefill is a module of its own, fa3."""
    return any(arch.startswith("9.0") for arch in archs.replace(",", " ").split())


def is_chosen(name: str, only: str) -> bool:
    """Whether ``--only`` lets a module through."""
    return not only or name.startswith(tuple(only.split(",")))


def build(asked: argparse.Namespace, kinds: Sequence[Kind], fa3: bool, chosen: Sequence[str], toolkit: Toolkit) -> int:
    """Compile, copy and check; return the exit code."""
    started = time.monotonic()
    try:
        import flashinfer
        from flashinfer.jit import env
    except ImportError as error:
        print(f"This Python cannot import FlashInfer ({error}): pip install '.[cuda]'.", file=sys.stderr)
        return 69
    if flashinfer.__version__ != VERSION:
        print(f"This is FlashInfer {flashinfer.__version__}, and Pointsman wants {VERSION}.", file=sys.stderr)
        return 69
    specs = [spec for spec in generate_specs(kinds, fa3=fa3) if spec.name in chosen]
    assert [spec.name for spec in specs] == list(chosen), "FlashInfer names its modules as module_names() does"
    print(f"{len(specs)} modules for {os.environ['FLASHINFER_CUDA_ARCH_LIST']}, nvcc of {toolkit.home}", flush=True)
    compile_specs(specs, asked.jobs or os.cpu_count() or 1, Path(env.FLASHINFER_WORKSPACE_DIR))
    built = collect(chosen, Path(env.FLASHINFER_JIT_DIR), asked.out or Path(env.FLASHINFER_AOT_DIR))
    check_loads(built, toolkit)
    print(format_result(built, time.monotonic() - started))
    return 1 if any(each.problem for each in built) else 0


if __name__ == "__main__":
    sys.exit(main())
