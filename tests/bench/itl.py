"""Fixed budgets and target gaps side by side, on simulated machines: what streams feel when long prompts arrive.

    python tests/bench/itl.py [--json FILE]

Streams decode while prompts of 1,900 tokens arrive every two seconds (the load W5), under the real scheduler. The
machines take the time that they are told to, with noise: about SmolLM2-135M on two cores; the same with two more for
half of the time; one on which every step costs much. Seconds are simulated, so a run takes few, on any machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from tests.bench.bench_report import Figures, Table, format_ms, format_s, quantile
from tests.engine_core.scheduler.scheduler_helpers import create_request
from tests.engine_core.scheduler.simulated_machine import Machine, Simulation, create_simulation

NUM_STREAMS, PROMPT_TOKENS, PROMPT_EVERY_S, MAX_TOKENS = 4, 1900, 2.0, 8
FROM_S, UNTIL_S = 4.0, 124.0
BUDGETS = (512, 256, 128, 64)
TARGETS_MS = (100, 50, 30)
MACHINES: dict[str, Callable[[], Machine]] = {
    "two cores": Machine,
    "two cores, or four, by turns of 15 s": lambda: Machine(slowness=lambda now: 1.0 if now % 30.0 < 15.0 else 0.5),
    "dear steps": lambda: Machine(step_s=0.012, weights_s=0.0),
}


@dataclass(frozen=True, slots=True)
class Regime:
    """How prompts are kept in bounds.

    Attributes:
        name: For the table.
        max_tokens: Fixed budget of a step.
        target_ms: --target-itl-ms; 0 = off.
    """

    name: str
    max_tokens: int
    target_ms: int = 0


REGIMES = (
    *(Regime(f"fixed, {budget} tokens a step", budget) for budget in BUDGETS),
    *(Regime(f"target {target_ms} ms", BUDGETS[0], target_ms) for target_ms in TARGETS_MS),
)


def serve(machine: Machine, regime: Regime) -> Figures:
    """Serve the load under a regime, and sum up."""
    sim = create_simulation(
        machine, target_s=regime.target_ms / 1e3, max_num_batched_tokens=regime.max_tokens, max_num_seqs=64
    )
    sim.add_streams(NUM_STREAMS)
    arrivals: dict[str, float] = {}
    while sim.now < UNTIL_S:
        if sim.now >= len(arrivals) * PROMPT_EVERY_S:
            request_id = f"prompt{len(arrivals)}"
            arrivals[request_id] = len(arrivals) * PROMPT_EVERY_S
            sim.add(create_request(request_id, PROMPT_TOKENS, MAX_TOKENS))
        sim.step()
    return _sum_up(sim, arrivals)


def _sum_up(sim: Simulation, arrivals: dict[str, float]) -> Figures:
    gaps = sim.gaps(since=FROM_S)
    waits = [
        sim.token_times[request_id][0] - arrived
        for request_id, arrived in arrivals.items()
        if arrived >= FROM_S and sim.token_times[request_id]
    ]
    return {
        "gap_p50_s": quantile(gaps, 0.5),
        "gap_p99_s": quantile(gaps, 0.99),
        "gap_max_s": max(gaps),
        "stream_tokens_per_s": len(gaps) / (sim.now - FROM_S),
        "prompt_tokens_per_s": sim.prompt_tokens_per_s(FROM_S),
        "first_token_p50_s": quantile(waits, 0.5),
        "first_token_p99_s": quantile(waits, 0.99),
    }


def build_table(figures: dict[str, Figures]) -> Table:
    """Return a machine's table."""
    header = (
        "regime",
        "gap p50, ms",
        "p99, ms",
        "longest, ms",
        "streams, tokens/s",
        "prompts, tokens/s",
        "prompts: first token p50 / p99, s",
    )
    rows = [
        [
            regime,
            format_ms(of["gap_p50_s"]),
            format_ms(of["gap_p99_s"]),
            format_ms(of["gap_max_s"]),
            f"{of['stream_tokens_per_s']:,.0f}",
            f"{of['prompt_tokens_per_s']:,.0f}",
            f"{format_s(of['first_token_p50_s'])} / {format_s(of['first_token_p99_s'])}",
        ]
        for regime, of in figures.items()
    ]
    return Table(header, rows)


def main() -> None:
    """Run, print a table a machine, write JSON where asked."""
    parser = argparse.ArgumentParser(description="Fixed budgets and target gaps, on simulated machines.")
    parser.add_argument("--json", metavar="FILE", help="Write the figures as JSON; - = stdout, and nothing else there.")
    args = parser.parse_args()
    report = sys.stderr if args.json == "-" else sys.stdout

    figures: dict[str, dict[str, Figures]] = {}
    for name, build_machine in MACHINES.items():
        figures[name] = {regime.name: serve(build_machine(), regime) for regime in REGIMES}
        print(f"{name}:\n\n{build_table(figures[name]).to_markdown()}\n", file=report, flush=True)
    if args.json:
        with sys.stdout if args.json == "-" else open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file)
            file.write("\n")


if __name__ == "__main__":
    main()
