"""The scheduler alone, without a model: what a step costs per running request, and what admission costs.

    python tests/bench/scheduler.py [--json FILE] [--vllm PYTHON]

Times schedule() + update_from_output() + make_stats() of pure decode steps, scheduling one step ahead (placeholders,
in-flight accounting), prefix caching on, blocks of 16 tokens; and the admission of 256 prompts of 1,024 tokens, from
add_request() to the last step of their prefill, with every block new and with every block cached. Given an interpreter
that has vLLM, times vLLM's scheduler under the same loads too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from engine_core.config import SchedulerConfig
from engine_core.housekeeping import no_full_collections
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import EngineCoreRequest
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.constraints import build_constraints
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
ADMITTED, ADMITTED_TOKENS = 256, 1024
MAX_MODEL_LEN = 8192

# Microseconds per running request and step; milliseconds per admission.
GOALS = {"us_per_request": 1.0, "admission_ms": 40.0, "admission_cached_ms": 20.0}


@dataclass(slots=True)
class StepTimes:
    """Seconds per step, by part."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    def median_us(self) -> float:
        """Return the median of the whole step, in microseconds."""
        return statistics.median(map(sum, zip(self.schedule, self.update, strict=True))) * 1e6


def create_scheduler(max_num_seqs: int, *, num_blocks: int, max_steps_in_flight: int) -> Scheduler:
    """Return a scheduler whose budgets never bind."""
    config = SchedulerConfig(max_num_batched_tokens=65_536, max_num_seqs=max_num_seqs)
    return Scheduler(
        config=config,
        kv_cache=KVCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, watermark=0.01),
        max_model_len=MAX_MODEL_LEN,
        constraints=build_constraints(config, block_size=BLOCK_SIZE),
        max_steps_in_flight=max_steps_in_flight,
    )


def create_request(number: int, token_ids: list[int], max_tokens: int) -> EngineCoreRequest:
    """Return a request that only its length ends."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, eos_token_ids=frozenset({2}), ignore_eos=True)
    return EngineCoreRequest(f"req-{number}", token_ids, params, arrival_time=0.0)


class Loop:
    """The engine's loop without an engine: every row that is due samples the same token."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.times = StepTimes()

    def step(self) -> SchedulerOutput:
        """Run a step ahead, then apply the oldest result."""
        scheduler = self._scheduler
        started = time.perf_counter()
        output = scheduler.schedule(started)
        self.times.schedule.append(time.perf_counter() - started)
        self._in_flight.append((output, self._sample(output)))
        while len(self._in_flight) >= scheduler.max_steps_in_flight:
            started = time.perf_counter()
            scheduler.update_from_output(*self._in_flight.pop(0))
            scheduler.make_stats()
            self.times.update.append(time.perf_counter() - started)
        return output

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Return a token for each row that reaches its last token; called right after its schedule()."""
        requests = self._scheduler.requests
        is_due = [requests[id_].num_computed_tokens >= requests[id_].num_tokens for id_ in output.req_ids]
        return ModelRunnerOutput([7 if due else -1 for due in is_due])


def measure_decode(num_running: int, num_steps: int) -> StepTimes:
    """Time steps in which every request decodes one token."""
    scheduler = create_scheduler(num_running, num_blocks=max(20_000, num_running * 100), max_steps_in_flight=2)
    loop = Loop(scheduler)
    for number in range(num_running):
        # Lengths differ, so that blocks do not all fill up in the same step.
        tokens = [(number * 131 + position) % 40_000 for position in range(PROMPT_TOKENS + number % BLOCK_SIZE)]
        scheduler.add_request(create_request(number, tokens, max_tokens=6000))
    for _ in range(40):
        loop.step()
    loop.times = StepTimes()
    with no_full_collections():
        for _ in range(num_steps):
            output = loop.step()
            assert len(output.req_ids) == num_running == output.total_num_scheduled_tokens
    return loop.times


def measure_admission(*, is_cached: bool) -> float:
    """Return seconds from the first add_request() to the end of the last prompt."""
    scheduler = create_scheduler(ADMITTED, num_blocks=60_000, max_steps_in_flight=1)
    prompts = [
        [(number * 7919 + position * 31 + position * position % 97) % 40_000 for position in range(ADMITTED_TOKENS)]
        for number in range(ADMITTED)
    ]
    if is_cached:
        _admit(scheduler, prompts, max_tokens=1)
        while scheduler.has_unfinished_requests() or scheduler.has_pending_output():
            Loop(scheduler).step()
    with no_full_collections():
        return _admit(scheduler, prompts, max_tokens=16)


def _admit(scheduler: Scheduler, prompts: list[list[int]], *, max_tokens: int) -> float:
    loop = Loop(scheduler)
    messages = [create_request(number, prompt, max_tokens) for number, prompt in enumerate(prompts)]
    started = time.perf_counter()
    for message in messages:
        scheduler.add_request(message)
    added = time.perf_counter() - started
    while len(scheduler.waiting) or any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running):
        loop.step()
    return added + sum(loop.times.schedule) + sum(loop.times.update)


def best_of(runs: int, measure: Callable[[], float]) -> float:
    """Return the smallest of several runs: the others had company on the machine."""
    return min(measure() for _ in range(runs))


def measure_vllm(python: str, num_steps: int) -> dict[str, Any]:
    """Return vLLM's figures, named as ours are, from a process of its own."""
    script = Path(__file__).with_name("vllm_scheduler.py")
    # Isolated: with our root on its path, packages of ours could stand in for some that vLLM means.
    command = [python, "-I", str(script), "--steps", str(num_steps)]
    figures: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return figures


def build_ratios(ours: dict[str, Any], vllm: dict[str, Any]) -> dict[str, Any]:
    """Return how many times ours each of vLLM's figures is."""
    return {
        name: build_ratios(figure, vllm[name]) if isinstance(figure, dict) else vllm[name] / figure
        for name, figure in ours.items()
    }


def format_vllm(ours: float, vllm: float | None) -> str:
    """Return the end of a line: vLLM's figure, and how many times ours it is; nothing where it was not measured."""
    return "" if vllm is None else f"    vLLM {vllm:6.2f}    ratio {vllm / ours:5.2f}"


def report_decode(num_steps: int, vllm: dict[str, float], report: IO[str]) -> dict[str, float]:
    """Print a line a size; return microseconds per running request and step, by size."""
    figures: dict[str, float] = {}
    print("running   schedule     update      both   per request   (medians, us)", file=report)
    for num_running in (64, 256, 1024):
        runs = [measure_decode(num_running, num_steps) for _ in range(3)]
        times = min(runs, key=StepTimes.median_us)
        per_request = figures[str(num_running)] = times.median_us() / num_running
        print(
            f"{num_running:7d} {statistics.median(times.schedule) * 1e6:10.1f} "
            f"{statistics.median(times.update) * 1e6:10.1f} {times.median_us():9.1f} {per_request:10.2f}"
            f"    goal {GOALS['us_per_request']:.2f}{format_vllm(per_request, vllm.get(str(num_running)))}",
            file=report,
            flush=True,
        )
    return figures


def report_admission(vllm: dict[str, float], report: IO[str]) -> dict[str, float]:
    """Print a line a case; return milliseconds by the name of the goal."""
    figures: dict[str, float] = {}
    print(f"admission of {ADMITTED} prompts of {ADMITTED_TOKENS} tokens:", file=report)
    for name, words, is_cached in (
        ("admission_ms", "every block new", False),
        ("admission_cached_ms", "every block cached", True),
    ):
        figures[name] = 1e3 * best_of(5, partial(measure_admission, is_cached=is_cached))
        line = f"  {words:18s} {figures[name]:7.1f} ms    goal {GOALS[name]:.0f}"
        print(line + format_vllm(figures[name], vllm.get(name)), file=report, flush=True)
    return figures


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description="What the scheduler costs, without a model.")
    parser.add_argument("--json", metavar="FILE", help="Write the figures as JSON; - = stdout, and nothing else there.")
    parser.add_argument("--steps", type=int, default=400, help="Steps timed per size. [default: 400]")
    parser.add_argument("--vllm", metavar="PYTHON", help="Time vLLM's scheduler too, under this interpreter.")
    args = parser.parse_args()
    report = sys.stderr if args.json == "-" else sys.stdout

    vllm = measure_vllm(args.vllm, args.steps) if args.vllm else {}
    figures: dict[str, Any] = {"us_per_request": report_decode(args.steps, vllm.get("us_per_request", {}), report)}
    figures |= report_admission(vllm, report)
    if vllm:
        figures |= {"vllm": vllm, "ratio": build_ratios(figures, vllm)}
    if args.json:
        with sys.stdout if args.json == "-" else open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file)
            file.write("\n")


if __name__ == "__main__":
    main()
