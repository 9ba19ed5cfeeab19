"""The C++ step against this machine's limits: reading the weights, and multiplying.

    python tests/bench/limits.py [--rounds N] [--threads N] [--model MODEL] [--probe-only] [--json FILE]

Compiles a small probe, runs it before and after the steps, and takes the better of each limit. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from kernels.cpu_threads import usable_threads
from server.config import default_cache_dir
from server.model_resolver import resolve_model
from tests.bench.limits_cases import CASES, ModelSize
from tests.bench.limits_report import (
    Limits,
    StepTime,
    build_figures,
    build_limits_table,
    build_steps_table,
    check_bars,
    judge,
)
from tests.bench.limits_steps import TimedModel
from tests.bench.progress import Progress

PROBE = Path(__file__).parent / "csrc" / "limits.cpp"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-pthread")
_PROBE_ROUNDS = 20
_PROBE_ONLY_BYTES = 269_000_000  # of SmolLM2-135M in bf16


def build_probe(folder: Path) -> Path:
    """Compile the probe for this machine; return the program."""
    program = folder / "limits"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run([*compiler, *_FLAGS, str(PROBE), "-o", str(program)], check=True)
    return program


def run_probe(program: Path, num_threads: int, num_bytes: int) -> Limits:
    """Return what the machine can do when it reads so many bytes over and over."""
    arguments = [str(number) for number in (num_threads, max(1, num_bytes // 1_000_000), _PROBE_ROUNDS)]
    said = subprocess.run([str(program), *arguments], check=True, capture_output=True, text=True)
    return Limits.of(json.loads(said.stdout))


def _measure_probe(args: argparse.Namespace, program: Path, report: IO[str]) -> dict[str, Any]:
    limits = run_probe(program, args.threads or usable_threads(), _PROBE_ONLY_BYTES)
    print(build_limits_table(limits).to_markdown(), file=report, flush=True)
    return build_figures(limits, ModelSize(0, 0, 0), [])


def _measure_steps(args: argparse.Namespace, program: Path, report: IO[str]) -> dict[str, Any]:
    resolved = resolve_model(args.model, progress=lambda line: None, cache_dir=default_cache_dir())
    progress = Progress(args.rounds + 3)
    progress.show("loading")
    model = TimedModel(resolved.path, args.threads)
    progress.advance("probe")
    before = run_probe(program, model.num_threads, model.size.weight_bytes)
    progress.advance("steps")
    clock = time.thread_time if args.cpu_time else time.perf_counter
    times = model.time_cases(CASES, args.rounds, clock=clock, on_round=lambda: progress.advance("steps"))
    if args.cpu_time:  # the phases were timed by another clock, the neighbours' time included
        times = {case: StepTime(best.seconds) for case, best in times.items()}
    progress.show("probe")
    limits = before.best_of(run_probe(program, model.num_threads, model.size.weight_bytes))
    progress.clear()
    verdicts = judge(limits, model.size, times)
    print(f"{_cpu_name()}, {model.isa} kernels, {model.size.weight_bytes / 1e6:.0f} MB of weights\n", file=report)
    print(f"{build_limits_table(limits).to_markdown()}\n\n{build_steps_table(verdicts).to_markdown()}\n", file=report)
    for name, bar in check_bars(verdicts).items():
        met = "met" if bar["is_met"] else "MISSED"
        print(f"{name}: {bar['reached']:.1%} of at least {bar['required']:.0%}: {met}", file=report, flush=True)
    return build_figures(limits, model.size, verdicts) | {"isa": model.isa}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The C++ step against this machine's limits.")
    parser.add_argument("--rounds", type=int, default=40, help="Times that each step is timed. [default: %(default)s]")
    parser.add_argument(
        "--threads", type=int, default=0, help="Compute threads. [default: as many as the engine takes]"
    )
    parser.add_argument("--model", help="As of pointsman serve. [default: the embedded model]")
    parser.add_argument(
        "--cpu-time", action="store_true", help="On a busy machine, with --threads 1: leave out the neighbours' time."
    )
    parser.add_argument("--probe-only", action="store_true", help="Only what the machine can do.")
    parser.add_argument("--json", metavar="FILE", help="Write the figures as JSON; - = stdout, and nothing else there.")
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time counts one thread's time: give --threads 1 with it")
    return args


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Probe, time, print tables, write JSON where asked."""
    args = _parse_args()
    report = sys.stderr if args.json == "-" else sys.stdout
    measure = _measure_probe if args.probe_only else _measure_steps
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args, build_probe(Path(folder)), report)
    if args.json:
        figures |= {"cpu": _cpu_name(), "load": os.getloadavg()[0]}
        with sys.stdout if args.json == "-" else open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
