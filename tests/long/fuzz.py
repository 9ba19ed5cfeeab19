"""Fuzzes one target for some time, by hand: new cases with each seed, failures shrunk and printed.

    python tests/long/fuzz.py TARGET [--minutes 10] [--seed 0]

Every seed is a batch of cases of its own; the same seed gives the same batch. What was found is kept as a plain test.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.long.fuzz_requests import check_request, request_cases
from tests.long.fuzz_texts import EVENT_CASES, check_events, check_stops, stop_cases
from tests.long.fuzz_tokens import check_tokens, token_cases

NUM_BATCH_CASES = 1000
_MAX_FAILURES = 8
_PROGRESS_S = 10.0


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
        cases: Where cases come from.
        check: Raises where one of them shows a fault.
    """

    cases: st.SearchStrategy[Any]
    check: Callable[[Any], None]


TARGETS = {
    "request": Target(request_cases, check_request),
    "stops": Target(stop_cases(), check_stops),
    "events": Target(EVENT_CASES, check_events),
    "tokens": Target(token_cases(), check_tokens),
}


def run_batch(target: Target, batch_seed: int, num_cases: int = NUM_BATCH_CASES) -> int:
    """Check so many cases, the same for the same seed; return how often the check was called, shrinking included."""
    num_calls = 0

    def check(case: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        target.check(case)

    run = settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    seed(batch_seed)(run(given(target.cases)(check)))()
    return num_calls


def main() -> int:
    """Run batch after batch until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    args = parser.parse_args()
    logging.getLogger("server").setLevel(logging.ERROR)  # what clients send is warned of, endlessly
    started, told, num_cases, num_failures, batch_seed = time.monotonic(), 0.0, 0, 0, args.seed
    while (elapsed := time.monotonic() - started) < args.minutes * 60 and num_failures < _MAX_FAILURES:
        try:
            num_cases += run_batch(TARGETS[args.target], batch_seed)
        except Exception as error:  # a group of them, where a batch found several
            num_failures += 1
            print(f"\n{args.target}, seed {batch_seed}:")
            traceback.print_exception(error, limit=-6)
        batch_seed += 1
        if elapsed - told >= _PROGRESS_S:
            told = elapsed
            print(f"{args.target}: {elapsed:.0f} s, {num_cases:,} cases, {num_failures} failures", flush=True)
    seeds = f"seeds {args.seed} to {batch_seed - 1}"
    print(f"{args.target}: {args.minutes:g} minutes, {seeds}, {num_cases:,} cases, {num_failures} failures")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
