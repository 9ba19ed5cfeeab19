"""What the scheduler does, shown on the embedded model: four experiments as tables, JSON and plots.

    python tests/bench/chapter.py [--only NAME] [--quick] [--json FILE] [--plots DIR]

Token ids go straight into the engine, on the CPU backend in bf16. Times are taken where the engine publishes tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from server.config import default_cache_dir
from server.model_resolver import resolve_model
from tests.bench.bench_engine import LoadedModel, warm_shapes
from tests.bench.bench_report import Outcome
from tests.bench.chapter_batching import run_batching
from tests.bench.chapter_chunking import run_chunking
from tests.bench.chapter_prefix import run_prefix
from tests.bench.chapter_priority import run_priority

EXPERIMENTS: dict[str, Callable[..., Outcome]] = {
    "batching": run_batching,
    "chunking": run_chunking,
    "prefix": run_prefix,
    "priority": run_priority,
}

# Compute threads wait for each other: one busy neighbour costs far more than its share.
_QUIET_LOAD = 0.5


def main() -> None:
    """Run the experiments, print a table each, write what was asked for."""
    args = _parse_args()
    report = sys.stderr if args.json == "-" else sys.stdout
    load_before = os.getloadavg()[0]
    if load_before > _QUIET_LOAD:
        print(
            f"load average {load_before:.1f}: these will be the figures of a busy machine", file=sys.stderr, flush=True
        )
    model = _load_model()
    figures: dict[str, Any] = {}
    for name in args.only or EXPERIMENTS:
        outcome = _run(name, model, is_quick=args.quick, report=report)
        figures[name] = outcome.figures
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            (args.plots / f"{name}.svg").write_text(outcome.svg, encoding="utf-8")
    if args.json:
        figures["machine"] = {"num_cpus": os.cpu_count(), "load_before": load_before}
        _write_json(args.json, figures)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the scheduler does, shown on the embedded model.")
    parser.add_argument("--only", action="append", choices=EXPERIMENTS, help="Run this experiment; may be repeated.")
    parser.add_argument("--quick", action="store_true", help="Under a minute: shows that it works, not what it shows.")
    parser.add_argument("--json", metavar="FILE", help="Write the figures as JSON; - = stdout, and nothing else there.")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="Write an SVG per experiment into this directory.")
    return parser.parse_args()


def _load_model() -> LoadedModel:
    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    resolved = resolve_model(None, progress=report, cache_dir=default_cache_dir())
    report(f"loading {resolved.served_name}")
    model = LoadedModel(resolved.path)
    warm_shapes(model)
    return model


def _run(name: str, model: LoadedModel, *, is_quick: bool, report: IO[str]) -> Outcome:
    started = time.monotonic()
    print(f"{name}: running", file=sys.stderr, flush=True)
    outcome = EXPERIMENTS[name](model, is_quick=is_quick)
    print(f"\n## {name} ({time.monotonic() - started:.0f} s)\n\n{outcome.table.to_markdown()}", file=report, flush=True)
    return outcome


def _write_json(target: str, figures: dict[str, Any]) -> None:
    text = json.dumps(figures, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
