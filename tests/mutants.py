"""Checks the checks: breaks one rule of the scheduler at a time, and asks its tests whether they notice.

``tests/mutants.toml`` says what is broken, and how. pytest does not collect this file: `make mutants` runs it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "tests/mutants.toml"
GUIDE = ROOT / "CONTRIBUTING.md"
TABLE_START, TABLE_END = "<!-- mutants: start -->\n", "<!-- mutants: end -->\n"

# What the scheduler's tests need: nothing of it imports torch.
_COPIED = ("engine_core", "kernels", "tests/engine_core", "tests/conftest.py", "pyproject.toml")
_NOT_COPIED = shutil.ignore_patterns("model", "engine.py", "test_engine.py", "__pycache__")
_TESTED = ("tests/engine_core/kv_cache", "tests/engine_core/scheduler", "tests/engine_core/test_core.py")
# They try many schedules for seconds: whatever a small test notices, it notices sooner.
_SLOW = ("test_reference_comparison.py", "test_scheduler_properties.py")

# All tests together: many times what they need, so that whoever is still running then hangs.
_MAX_TESTS_S = 60.0
_ALL_PASSED, _SOME_FAILED = 0, 1  # pytest's exit statuses


@dataclass(frozen=True)
class Mutant:
    """A rule of the specification, broken in one place.

    Attributes:
        rule: Its id.
        broken: What is wrong then, in a few words.
        file: Where, from the root of the project.
        old: The text there; occurs exactly once.
        new: What stands there instead.
    """

    rule: str
    broken: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Trial:
    """What the tests said to a mutant.

    Attributes:
        mutant: Which.
        caught_by: The first test that failed or hung; None = nobody noticed.
        duration_s: Seconds until then.
    """

    mutant: Mutant
    caught_by: str | None
    duration_s: float

    def __str__(self) -> str:
        verdict = self.caught_by or "SURVIVED"
        return f"{self.duration_s:5.1f} s  {self.mutant.rule:3} {self.mutant.broken}: {verdict}"


def load_mutants() -> list[Mutant]:
    """Read the table."""
    return [Mutant(**fields) for fields in tomllib.loads(MUTANTS.read_text(encoding="utf-8"))["mutant"]]


def copy_project(to: Path) -> None:
    """Copy what the scheduler's tests need."""
    for name in _COPIED:
        source, target = ROOT / name, to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=_NOT_COPIED)
        else:
            shutil.copy2(source, target)


def break_rule(mutant: Mutant, root: Path) -> None:
    """Put the mutant's text into its file."""
    path = root / mutant.file
    path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")


def check_texts(mutants: Sequence[Mutant], root: Path) -> None:
    """Raise RuntimeError unless each old text occurs exactly once in its file."""
    counts = [(mutant, (root / mutant.file).read_text(encoding="utf-8").count(mutant.old)) for mutant in mutants]
    outdated = [
        f"{mutant.rule}, {mutant.broken}: `old` occurs {count} times in {mutant.file}"
        for mutant, count in counts
        if count != 1
    ]
    if outdated:
        raise RuntimeError("\n".join([f"write these anew in {MUTANTS.name}, so that each occurs once:", *outdated]))


def list_test_files(root: Path) -> list[str]:
    """Return the test files, those that fail within milliseconds first."""
    paths = [path for name in _TESTED for path in sorted((root / name).glob("test_*.py")) or [root / name]]
    paths.sort(key=lambda path: path.name in _SLOW)
    return [str(path.relative_to(root)) for path in paths]


def run_tests(root: Path) -> str | None:
    """Run the tests until one fails, or hangs.

    Returns:
        Its name; None = all passed.

    Raises:
        RuntimeError: pytest could not even run them.
    """
    options = ["-x", "-v", "-p", "no:cacheprovider", "--tb=no", "--show-capture=no"]
    command = [sys.executable, "-m", "pytest", *options, *list_test_files(root)]
    try:
        result = subprocess.run(command, cwd=root, timeout=_MAX_TESTS_S, capture_output=True, check=False)
    except subprocess.TimeoutExpired as error:
        started = re.findall(r"^\S+::([^\s\[]+)", (error.stdout or b"").decode(), re.MULTILINE)
        return f"{started[-1] if started else 'pytest'} (hangs)"
    if result.returncode == _ALL_PASSED:
        return None
    failed = re.search(r"^FAILED \S+::([^\s\[]+)", result.stdout.decode(), re.MULTILINE)
    if result.returncode != _SOME_FAILED or failed is None:
        raise RuntimeError(f"pytest could not run the tests:\n{result.stdout.decode()}{result.stderr.decode()}")
    return failed[1]


def try_mutant(mutant: Mutant, pristine: Path) -> Trial:
    """Break the rule in a copy of its own, and run the tests there."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder, "project")
        shutil.copytree(pristine, root)
        break_rule(mutant, root)
        caught_by = run_tests(root)
    return Trial(mutant, caught_by, time.monotonic() - started)


def try_all(mutants: Sequence[Mutant], num_jobs: int) -> list[Trial]:
    """Try each mutant, after the project as it is: with a test that fails anyway nothing could be told."""
    with tempfile.TemporaryDirectory(prefix="pristine-") as folder:
        pristine = Path(folder)
        copy_project(pristine)
        check_texts(mutants, pristine)
        if failed := run_tests(pristine):
            raise RuntimeError(f"{failed} fails with nothing broken; mend that first")
        trials = []
        with ThreadPoolExecutor(num_jobs) as pool:
            for trial in pool.map(partial(try_mutant, pristine=pristine), mutants):
                print(trial, flush=True)
                trials.append(trial)
    return trials


def build_table(trials: Sequence[Trial]) -> str:
    """Return the table for the guide."""
    lines = ["| rule | what is broken | the first test that notices |", "|---|---|---|"]
    for trial in trials:
        name, *hangs = (trial.caught_by or "none").split(" ", 1)
        lines.append(f"| {trial.mutant.rule} | {trial.mutant.broken} | {' '.join([f'`{name}`', *hangs])} |")
    return "\n".join(lines) + "\n"


def write_table(trials: Sequence[Trial]) -> None:
    """Replace the table in the guide, between its two markers."""
    head, rest = GUIDE.read_text(encoding="utf-8").split(TABLE_START)
    _, tail = rest.split(TABLE_END)
    GUIDE.write_text(f"{head}{TABLE_START}\n{build_table(trials)}\n{TABLE_END}{tail}", encoding="utf-8")


def main() -> int:
    """Return the exit status: 1 if anything survived."""
    parser = argparse.ArgumentParser(description="Break one rule of the scheduler at a time: does a test notice?")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants with this rule, or this text in their line")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tries so many at once (default: cores)")
    parser.add_argument("--table", action="store_true", help=f"then write the table in {GUIDE.name}")
    args = parser.parse_args()
    mutants = [m for m in load_mutants() if m.rule == args.only or args.only in f"{m.rule} {m.broken} {m.file}"]
    if not mutants:
        parser.error(f"no mutant has {args.only!r} in its rule, description or file")
    if args.only and args.table:
        parser.error("the table holds all mutants; leave out --only")
    trials = try_all(mutants, args.jobs)
    survivors = [trial for trial in trials if trial.caught_by is None]
    print(f"{len(trials)} mutants, {len(survivors)} survived", *survivors, sep="\n")
    if args.table and not survivors:
        write_table(trials)
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(str(error))
