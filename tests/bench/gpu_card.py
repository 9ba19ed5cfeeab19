"""Stages `environment` and `card`: what machine this is, and the rates that every floor is reckoned from."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import torch.nn.functional as F

from tests.bench.gpu_device import BANDWIDTH, GEMM_RATE, LAUNCH, Bench


def run_environment(bench: Bench) -> None:
    """Name everything that a figure may depend on."""
    note = bench.sink.note
    capability = ".".join(map(str, bench.accelerator.capability))
    memory = bench.accelerator.memory()
    note("card", f"{bench.accelerator.name}, compute capability {capability}")
    note("memory", f"{memory.total / 2**30:.1f} GiB, {memory.free / 2**30:.1f} free")
    note("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}")
    note("flashinfer", f"{getattr(bench.flashinfer, '__version__', 'the fake')}{_describe_modules(bench)}")
    note("host", f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    if not bench.is_dry and memory.free < 0.9 * memory.total:
        note("others", "more than a tenth of the card's memory is taken: somebody else may be using it")


def _describe_modules(bench: Bench) -> str:
    """What is compiled already: the rest compiles while it is measured, which the stages have no time for."""
    if bench.is_dry:
        return ""
    folder = Path(bench.flashinfer.__file__).parent / "data" / "aot"
    names = sorted(path.parent.name for path in folder.glob("*/*.so"))
    return f"; {len(names)} modules compiled ahead of time" + (f": {', '.join(names)}" if names else "")


def run_card(bench: Bench) -> None:
    """Measure copying, reading, multiplying, launching, and the way to the card and back."""
    _measure_memory(bench)
    _measure_gemm(bench)
    _measure_launch(bench)
    _measure_round_trip(bench)


def _measure_memory(bench: Bench) -> None:
    """The better of a copy and a read: kernels that only read do better than a copy, which turns around."""
    num_bytes = bench.pick(4 << 30, 1 << 16)
    source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=bench.device)
    target = torch.empty_like(source)
    copies = [2 * num_bytes / s / 1e12 for s in bench.time_device_s(lambda: target.copy_(source), 10)]
    reads = [num_bytes / s / 1e12 for s in bench.time_device_s(lambda: source.amax(), 10)]
    best = max(copies, reads, key=lambda rates: sorted(rates)[len(rates) // 2])
    bench.sink.add("copy within the card, both ways counted", "TB/s", copies)
    bench.sink.add("read by one reduction", "TB/s", reads)
    bench.sink.add(BANDWIDTH, "TB/s", best)


def _measure_gemm(bench: Bench) -> None:
    n = bench.pick(8192, 64)
    a, b = bench.random(n, n), bench.random(n, n)
    seconds = bench.time_device_s(lambda: F.linear(a, b), 20)
    bench.sink.add(GEMM_RATE, "TFLOP/s", [2 * n**3 / s / 1e12 for s in seconds])
    # What decoding is made of: a few rows against a matrix that no cache holds.
    out, inner = bench.pick((131072, 4096), (256, 64))
    weight = bench.random(out, inner)
    for rows in bench.pick((1, 64, 256), (1, 4)):
        x = bench.random(rows, inner)
        _measure_linear(bench, x, weight)


def _measure_linear(bench: Bench, x: torch.Tensor, weight: torch.Tensor) -> None:
    floor = max(weight.nbytes / bench.bandwidth, 2 * len(x) * weight.numel() / bench.gemm_rate)
    bench.sink.add(
        f"linear {list(weight.shape)}, {len(x)} rows",
        "us",
        [s * 1e6 for s in bench.time_device_s(lambda: F.linear(x, weight), 20)],
        floor=floor * 1e6,
        formula="max(bytes of the weight / bandwidth, 2 x rows x weights / GEMM rate)",
    )


def _measure_launch(bench: Bench) -> None:
    """Kernels that do next to nothing, each after the other: what is left is the launching."""
    x = torch.zeros(32, device=bench.device)
    count = bench.pick(500, 3)

    def body() -> None:
        for _ in range(count):
            x.add_(1.0)

    bench.sink.add(LAUNCH, "us", [s * 1e6 for s in bench.time_captured_s(body, 20, parts=count)])


def _measure_round_trip(bench: Bench) -> None:
    """A step's block goes up and its tokens come back."""
    accelerator = bench.accelerator
    up, down = accelerator.pinned(4096), accelerator.pinned(256)
    block = torch.zeros(4096, dtype=torch.int32, device=bench.device)
    ids = torch.zeros(256, dtype=torch.int32, device=bench.device)

    def go_and_return() -> None:
        accelerator.upload(up, block)
        accelerator.download(ids, down).synchronize()

    bench.sink.add(
        "16 KB up, 1 KB down, and the host knows", "us", [s * 1e6 for s in bench.time_host_s(go_and_return, 50)]
    )
