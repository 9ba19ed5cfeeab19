"""Everything about Pointsman that needs a graphics card, in one command of at most eight minutes, without a network:

    python tests/bench/gpu.py [--out FOLDER] [--json FILE] [--stages a,b] [--budget 480]

Each stage runs in a process of its own under its own time limit: one that hangs or crashes costs itself only. What is
found is written to FOLDER/figures.jsonl as it comes; the table at the end, floors beside figures, is printed also when
the run is interrupted. ``--dry-run`` runs all of it at tiny shapes on the fakes, on a CPU: it proves the script and
measures nothing. Exit codes: 0 all stages ended well; 1 one did not, or a check failed; 64 an argument makes no sense;
69 there is no card, or no FlashInfer; 130 it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from tests.bench.gpu_report import (
    Figure,
    Sink,
    StageEnd,
    append,
    format_figure,
    format_formulas,
    format_table,
    judge,
    read_lines,
)

ROOT = Path(__file__).resolve().parents[2]
_END_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run.

    Attributes:
        name: As ``--stages`` calls it.
        module: Of tests.bench; its function ``run_NAME``, dashes as underscores, takes a Bench.
        limit_s: It is ended after so many seconds.
    """

    name: str
    module: str
    limit_s: float


STAGES = (
    Stage("environment", "gpu_card", 30.0),
    Stage("card", "gpu_card", 30.0),
    Stage("correctness", "gpu_correctness", 75.0),
    Stage("plan", "gpu_attention", 25.0),
    Stage("decode-attention", "gpu_attention", 40.0),
    Stage("prefill-attention", "gpu_attention", 30.0),
    Stage("cascade", "gpu_attention", 25.0),
    Stage("engine-0.6b", "gpu_engine", 75.0),
    Stage("engine-8b", "gpu_engine", 100.0),
    Stage("server", "gpu_server", 75.0),
)


class NoCardError(Exception):
    """There is nothing to measure on. The message is a sentence."""


# ---------------------------------------------------------------------- one stage, in its process
def run_stage(name: str, figures: Path, *, is_dry: bool) -> None:
    """Run one stage here and now.

    Args:
        name: Of STAGES.
        figures: Where what it finds is written, and what earlier stages found is read.
        is_dry: On the fakes.
    """
    from tests.bench.gpu_device import Bench  # not above: torch comes with it, which --help does not need

    stage = next(each for each in STAGES if each.name == name)
    module = importlib.import_module(f"tests.bench.{stage.module}")
    run: Callable[[Bench], None] = getattr(module, function_name(name))
    run(Bench.create(Sink(figures, name, is_dry), is_dry=is_dry))


def function_name(stage: str) -> str:
    """Return what runs a stage in its module."""
    return f"run_{stage.replace('-', '_').replace('.', '_')}"


def run_as_child(name: str, figures: Path, *, is_dry: bool) -> int:
    """Be the process of one stage: load what takes long, wait for a line, run. Returns the exit code."""
    import torch  # noqa: F401  (while the stage before is still at work: seconds that nobody waits for)

    if not is_dry:
        os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # it looks once, when it is imported
        with contextlib.suppress(ImportError):
            import flashinfer  # noqa: F401
    if not sys.stdin.readline():
        return 1
    try:
        run_stage(name, figures, is_dry=is_dry)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


# ---------------------------------------------------------------------- all stages
class Run:
    """One run of the command.

    Args:
        stages: In order.
        folder: For figures.jsonl, and a log a stage.
        budget_s: For all together.
        is_dry: On the fakes.
    """

    def __init__(self, stages: Sequence[Stage], folder: Path, *, budget_s: float, is_dry: bool) -> None:
        self.figures = folder / "figures.jsonl"
        self._stages = stages
        self._folder = folder
        self._is_dry = is_dry
        self._ends_at = time.monotonic() + budget_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Run the stages one after another, the next one's process loading meanwhile."""
        try:
            for stage, following in zip(self._stages, [*self._stages[1:], None], strict=True):
                child = self._children.pop(stage.name, None) or self._spawn(stage)
                if following is not None:
                    self._children[following.name] = self._spawn(following)
                print(f"-- {stage.name}", file=sys.stderr, flush=True)
                self._run_stage(stage, child)
        finally:
            for child in self._children.values():
                _kill(child)

    def _spawn(self, stage: Stage) -> subprocess.Popen[bytes]:
        with (self._folder / f"{stage.name}.log").open("wb") as log:
            return subprocess.Popen(
                child_command(stage, self._folder, self._is_dry),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _run_stage(self, stage: Stage, child: subprocess.Popen[bytes]) -> None:
        started = time.monotonic()
        # The fakes are slow, and prove something only at the end.
        limit_s = min(stage.limit_s * (4 if self._is_dry else 1), self._ends_at - started)
        if limit_s < 1.0:
            _kill(child)
            self._end(stage, "left out", 0.0, "the budget is used up")
            return
        assert child.stdin is not None
        num_before = len(read_lines(self.figures))
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended by itself: its exit code tells
                child.stdin.write(b"go\n")
                child.stdin.close()
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._end(stage, "late", time.monotonic() - started, f"it was ended after {limit_s:.0f} s")
            return
        finally:
            _kill(child)
            self._show_since(num_before)
        seconds = time.monotonic() - started
        text = "" if code == 0 else f"exit code {code}; {self._last_words(stage)}"
        self._end(stage, "done" if code == 0 else "failed", seconds, text)

    def _show_since(self, num_before: int) -> None:
        for line in read_lines(self.figures)[num_before:]:
            if isinstance(line, Figure):
                print(format_figure(line), file=sys.stderr, flush=True)

    def _end(self, stage: Stage, status: str, seconds: float, text: str) -> None:
        append(self.figures, StageEnd(stage=stage.name, status=status, seconds=seconds, text=text))

    def _last_words(self, stage: Stage) -> str:
        log = (self._folder / f"{stage.name}.log").read_bytes()[-4000:].decode("utf-8", "replace").strip()
        return log.splitlines()[-1] if log else "it said nothing"


def child_command(stage: Stage, folder: Path, is_dry: bool) -> list[str]:
    """Return what runs a stage as a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", stage.name, "--out", str(folder.resolve())]
    return command + ["--dry-run"] * is_dry


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a stage's process and all that it has started."""
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_GRACE_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it has started may outlive it


# ---------------------------------------------------------------------- the command
def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = ", ".join(stage.name for stage in STAGES)
    add("--out", metavar="FOLDER", type=Path, help="For figures and logs. [default: gpu-bench-TIME]")
    add("--json", metavar="FILE", help="Write all figures as one JSON value at the end; - = stdout.")
    add("--stages", metavar="A,B", default="", help=f"Only these of: {names}.")
    add("--budget", metavar="S", type=float, default=480.0, help="Seconds for all together. [default: 480]")
    add("--dry-run", action="store_true", help="On the fakes, at tiny shapes, without a card.")
    add("--child", metavar="NAME", help=argparse.SUPPRESS)
    return parser


def select_stages(text: str) -> list[Stage]:
    """Return the stages that ``--stages`` names, in their own order; all for none.

    Raises:
        ValueError: One is not known.
    """
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in {stage.name for stage in STAGES}]
    if unknown:
        raise ValueError(f"--stages: {', '.join(unknown)} not known; there are {', '.join(s.name for s in STAGES)}")
    return [stage for stage in STAGES if not names or stage.name in names]


def check_card() -> None:
    """Make sure that there is something to measure on.

    Raises:
        NoCardError: There is not.
    """
    try:
        import torch
    except ImportError as error:
        raise NoCardError(f"this Python has no torch ({error}): use the one that serves, .venv/bin/python") from error
    if not torch.cuda.is_available():
        raise NoCardError(
            f"torch {torch.__version__} sees no CUDA card here, so there is nothing to measure; "
            "--dry-run tries the script out on the fakes."
        )
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        raise NoCardError("flashinfer is not installed here: pip install flashinfer-python==0.7.4")
    if any((Path(found.origin).parent / "data" / "aot").glob("*/*.so")):
        # One that is missing shall cost its check a sentence, not the stage its time.
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    else:
        print(
            "No module of FlashInfer's was compiled ahead of time, so stages may spend their time compiling: "
            "deploy/gpu/build_flashinfer_modules.py does it beforehand.",
            file=sys.stderr,
        )


def make_folder(asked: Path | None, json_file: str | None) -> Path:
    """Return the folder for figures, empty of an earlier run's; before anything is measured.

    Raises:
        OSError: It, or the file for JSON, cannot be written.
    """
    folder = asked or Path(time.strftime("gpu-bench-%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.jsonl").unlink(missing_ok=True)
    if json_file not in (None, "-"):
        Path(str(json_file)).touch()
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    asked = build_parser().parse_args(arguments)
    if asked.child:
        return run_as_child(asked.child, asked.out / "figures.jsonl", is_dry=asked.dry_run)
    try:
        stages = select_stages(asked.stages)
        if not asked.dry_run:
            check_card()
        folder = make_folder(asked.out, asked.json)
    except (ValueError, NoCardError, OSError) as error:
        print(error, file=sys.stderr)
        return 69 if isinstance(error, NoCardError) else 64
    print(
        f"{'DRY RUN on the fakes, which measures nothing. ' if asked.dry_run else ''}Figures go to {folder}.",
        file=sys.stderr,
    )
    run = Run(stages, folder, budget_s=asked.budget, is_dry=asked.dry_run)
    signal.signal(signal.SIGTERM, _interrupt)
    is_whole = False
    try:
        run.run()
        is_whole = True
    except KeyboardInterrupt:
        print("interrupted; this is what there is:", file=sys.stderr)
    finally:
        report(run.figures, folder, asked.json, is_dry=asked.dry_run)
    return 130 if not is_whole else 0 if judge(read_lines(run.figures)).is_good else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def report(figures: Path, folder: Path, json_file: str | None, *, is_dry: bool) -> None:
    """Print the table, and write it beside the figures."""
    lines = read_lines(figures)
    table = format_table(lines, is_dry=is_dry)
    print(table, file=sys.stderr if json_file == "-" else sys.stdout, flush=True)
    (folder / "table.txt").write_text(f"{table}\n\n{format_formulas(lines)}\n", encoding="utf-8")
    if json_file:
        text = json.dumps([{"kind": type(line).__name__, **asdict(line)} for line in lines], indent=1)
        if json_file == "-":
            print(text)
        else:
            Path(json_file).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
