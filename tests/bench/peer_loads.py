"""The loads that peers are compared under, W1 to W6. Needs no packages: OpenVINO's Python runs them in its process."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.bench.load import Completer, Load, LoadRun, run_load
from server.bench.results import RequestResult
from server.bench.summary import is_complete, percentiles_ms, summarize
from server.bench.words import build_prompt

# W5: streams that run on and on, while long prompts arrive every so often.
_NUM_STREAMS, _NUM_ROUNDS, _STREAM_PROMPT_TOKENS = 4, 4, 32
_LONG_PROMPT_TOKENS, _LONG_OUTPUT_TOKENS = 1_900, 8
_FIRST_LONG_S, _LONG_INTERVAL_S = 1.0, 2.0

OnResult = Callable[[RequestResult], None]


@dataclass(frozen=True, slots=True)
class NamedLoad:
    """A load with a name and a model.

    Attributes:
        model: A checkpoint of peer_checkpoints.
        load: What is asked.
        is_mixed: W5's long prompts arrive meanwhile; ``load`` describes the running streams.
    """

    model: str
    load: Load
    is_mixed: bool = False


_ONE = Load(num_requests=4, concurrency=1, prompt_tokens=128, output_tokens=128)
_EIGHT = Load(num_requests=32, concurrency=8, prompt_tokens=256, output_tokens=128)
_MANY = Load(num_requests=96, concurrency=32, prompt_tokens=256, output_tokens=64)
_PREFIX = Load(num_requests=32, concurrency=8, prompt_tokens=1_024 + 32, prefix_tokens=1_024, output_tokens=32)
_STREAMS = Load(
    num_requests=_NUM_STREAMS * _NUM_ROUNDS,
    concurrency=_NUM_STREAMS,
    prompt_tokens=_STREAM_PROMPT_TOKENS,
    output_tokens=256,
)
_HTTP = Load(num_requests=512, concurrency=64, prompt_tokens=32, output_tokens=64)

LOADS: dict[str, NamedLoad] = {
    "W1": NamedLoad("smollm2", _ONE),
    "W2": NamedLoad("smollm2", _EIGHT),
    "W3": NamedLoad("smollm2", _MANY),
    "W4": NamedLoad("smollm2", _PREFIX),
    "W5": NamedLoad("smollm2", _STREAMS, is_mixed=True),
    "W6": NamedLoad("tiny", _HTTP),
    "Q1": NamedLoad("qwen3", _ONE),
    "Q2": NamedLoad("qwen3", _EIGHT),
    "Q3": NamedLoad("qwen3", _MANY),
}
# Before the first load: every server has seen prompts, batches and answers once.
WARM_UP = Load(num_requests=16, concurrency=8, prompt_tokens=256, output_tokens=16, seed=999)
WARM_UP_NAME = "warm-up"
# Shows that all works, and measures nothing.
_SMOKE = {"num_requests": 2, "concurrency": 2, "prompt_tokens": 32, "prefix_tokens": 0, "output_tokens": 8}


def scale_load(name: str, *, repeat: int, is_smoke: bool = False) -> NamedLoad:
    """Return a load with prompts that no other load or repeat has: nothing is found in a prefix cache by accident.

    Args:
        name: A key of LOADS.
        repeat: From 0 on.
        is_smoke: Two short requests only.
    """
    named = LOADS[name]
    seed = 1_000 * (1 + list(LOADS).index(name)) + repeat
    changes = _SMOKE if is_smoke else {}
    return dataclasses.replace(named, load=dataclasses.replace(named.load, seed=seed, **changes))


async def measure(completer: Completer, named: NamedLoad, on_result: OnResult = lambda _: None) -> dict[str, Any]:
    """Run a load and return its figures as plain values: those of Summary, and for W5 those of the long prompts."""
    if named.is_mixed:
        return await _measure_mixed(completer, named.load, on_result)
    run = await run_load(completer, named.load, on_result=on_result)
    figures = summarize(run, named.load).to_json()
    return {**figures, "total_tokens_per_s": _count_tokens(run) / run.wall_s}


async def _measure_mixed(completer: Completer, load: Load, on_result: OnResult) -> dict[str, Any]:
    arrivals = _LongPrompts(completer, load.seed)
    task = asyncio.create_task(arrivals.send())
    start_s = completer.clock()
    try:
        run = await run_load(completer, load, on_result=on_result)
    finally:
        task.cancel()
    long = LoadRun(await arrivals.finish(), completer.clock() - start_s)
    good = [result for result in long.results if is_complete(result)]
    figures = summarize(run, load).to_json()
    figures["num_failed"] += len(long.results) - len(good)
    return {
        **figures,
        "total_tokens_per_s": (_count_tokens(run) + _count_tokens(long)) / long.wall_s,
        "num_long_prompts": len(long.results),
        "long_ttft_ms": percentiles_ms([result.ttft_s for result in good]),
    }


class _LongPrompts:
    """Sends a long prompt every few seconds for as long as it is let."""

    def __init__(self, completer: Completer, seed: int) -> None:
        self._completer = completer
        self._rng = random.Random(f"long prompts {seed}")
        self._tasks: list[asyncio.Task[RequestResult]] = []

    async def send(self) -> None:
        due_s = self._completer.clock() + _FIRST_LONG_S
        while True:
            await asyncio.sleep(max(0.0, due_s - self._completer.clock()))
            prompt = build_prompt(_LONG_PROMPT_TOKENS, self._rng)
            self._tasks.append(asyncio.create_task(self._completer.complete(prompt, _LONG_OUTPUT_TOKENS, due_s)))
            due_s += _LONG_INTERVAL_S

    async def finish(self) -> list[RequestResult]:
        return list(await asyncio.gather(*self._tasks))


def _count_tokens(run: LoadRun) -> int:
    good = [result for result in run.results if is_complete(result)]
    return sum((result.num_prompt_tokens or 0) + result.num_output_tokens for result in good)
