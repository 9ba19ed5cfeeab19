"""A load: which prompts, when. And its run against anything that completes them: closed loop or Poisson arrivals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from server.bench.results import RequestResult
from server.bench.words import build_prompt


class Completer(Protocol):
    """What a load is sent to."""

    @property
    def clock(self) -> Callable[[], float]:
        """Return seconds."""

    async def complete(self, prompt: str, max_tokens: int, start_s: float | None = None) -> RequestResult:
        """Answer a prompt with exactly ``max_tokens`` tokens; failures are in the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a server.

    Attributes:
        num_requests: All together.
        concurrency: Streams at a time; each sends its next request when the last has ended. Of no effect with ``rate``.
        rate: Requests a second on average, at random times whatever the server does; 0 = closed loop.
        prompt_tokens: Length of a prompt, its shared beginning included.
        prefix_tokens: Length of the beginning that all prompts share.
        output_tokens: Length of each answer.
        seed: Of prompts and arrivals.
    """

    num_requests: int
    concurrency: int = 1
    rate: float = 0.0
    prompt_tokens: int = 128
    prefix_tokens: int = 0
    output_tokens: int = 128
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What came of a load.

    Attributes:
        results: One a request, in the order of the prompts.
        wall_s: From the first request's start to the last one's end.
    """

    results: Sequence[RequestResult]
    wall_s: float


def build_prompts(load: Load) -> list[str]:
    """Return the load's prompts, which begin alike only as far as they should."""
    rng = random.Random(f"prompts {load.seed}")
    prefix = build_prompt(load.prefix_tokens, rng)
    num_own = load.prompt_tokens - load.prefix_tokens
    return [prefix + build_prompt(num_own, rng) for _ in range(load.num_requests)]


def build_arrivals(load: Load) -> list[float]:
    """Return when each request of a Poisson load is due, in seconds from the start; the first is due at once."""
    rng = random.Random(f"arrivals {load.seed}")
    times = [0.0]
    while len(times) < load.num_requests:
        times.append(times[-1] + rng.expovariate(load.rate))
    return times


async def run_load(
    completer: Completer, load: Load, *, on_result: Callable[[RequestResult], None] = lambda _: None
) -> LoadRun:
    """Run a load to its end.

    Args:
        completer: Whom to ask.
        load: What.
        on_result: Called with each result as it comes.
    """
    prompts = build_prompts(load)
    start_s = completer.clock()
    if load.rate:
        results = await _run_open(completer, prompts, load, on_result)
    else:
        results = await _run_closed(completer, prompts, load, on_result)
    return LoadRun(results, max(result.end_s for result in results) - start_s)


async def _run_closed(
    completer: Completer, prompts: Sequence[str], load: Load, on_result: Callable[[RequestResult], None]
) -> list[RequestResult]:
    results: dict[int, RequestResult] = {}
    waiting = iter(enumerate(prompts))

    async def stream() -> None:
        for index, prompt in waiting:
            results[index] = await completer.complete(prompt, load.output_tokens)
            on_result(results[index])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, len(prompts))):
            group.create_task(stream())
    return [results[index] for index in range(len(prompts))]


async def _run_open(
    completer: Completer, prompts: Sequence[str], load: Load, on_result: Callable[[RequestResult], None]
) -> list[RequestResult]:
    first_s = completer.clock()

    async def request(prompt: str, due_s: float) -> RequestResult:
        # Counted from when it was due: a client that falls behind must not flatter the server.
        result = await completer.complete(prompt, load.output_tokens, due_s)
        on_result(result)
        return result

    tasks: list[asyncio.Task[RequestResult]] = []
    async with asyncio.TaskGroup() as group:
        for prompt, arrival_s in zip(prompts, build_arrivals(load), strict=True):
            await asyncio.sleep(max(0.0, first_s + arrival_s - completer.clock()))
            tasks.append(group.create_task(request(prompt, first_s + arrival_s)))
    return [task.result() for task in tasks]
