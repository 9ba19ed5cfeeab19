"""openvino-genai has no HTTP server: this runs the same loads in its process. Run by the Python of OpenVINO's own venv.

    PYTHON tests/bench/openvino_driver.py MODEL --cache-gb 4 --threads 2

Prints ``{"ready": true}`` once the model is loaded; then for each line "LOAD REPEAT IS_SMOKE" on standard input one
line of figures. Between two steps the event loop takes up whatever is due, as a server's would.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

import openvino_genai

from server.bench.load import run_load
from server.bench.results import RequestResult
from tests.bench.peer_loads import WARM_UP, WARM_UP_NAME, measure, scale_load

_MAX_NUM_SEQS = 256


@dataclass(slots=True)
class _Running:
    """A request in the pipeline."""

    handle: Any
    max_tokens: int
    result: RequestResult
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PipelineCompleter:
    """Answers prompts with a pipeline whose steps run in the event loop, one after the other while there is work."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._tokenizer = pipeline.get_tokenizer()
        self._running: list[_Running] = []
        self._num_requests = 0
        self._stepping: asyncio.Task[None] | None = None

    async def complete(self, prompt: str, max_tokens: int, start_s: float | None = None) -> RequestResult:
        """Answer a prompt with exactly ``max_tokens`` tokens."""
        start_s = self.clock() if start_s is None else start_s
        ids = self._tokenizer.encode(prompt).input_ids
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        handle = self._pipeline.add_request(self._num_requests, ids, config)
        self._num_requests += 1
        running = _Running(handle, max_tokens, RequestResult(start_s=start_s, num_prompt_tokens=ids.shape[1]))
        self._running.append(running)
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step_while_busy())
        await running.ended
        return running.result

    async def _step_while_busy(self) -> None:
        while self._running:
            self._pipeline.step()
            now_s = self.clock()
            for running in self._running:
                _collect(running, now_s)
            self._running = [running for running in self._running if not running.ended.done()]
            await asyncio.sleep(0)
        self._stepping = None


def _collect(running: _Running, now_s: float) -> None:
    if not running.handle.can_read():
        return
    result = running.result
    result.num_output_tokens += sum(len(output.generated_ids) for output in running.handle.read().values())
    result.has_usage = True
    result.token_times.append(now_s)
    if result.num_output_tokens >= running.max_tokens:
        result.end_s = now_s
        running.ended.set_result(None)


def _load_pipeline(args: argparse.Namespace) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = args.cache_gb
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_seqs = _MAX_NUM_SEQS
    properties = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY"}
    return openvino_genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", properties)


async def _answer_commands(completer: PipelineCompleter) -> None:
    _say({"ready": True})
    for line in iter(sys.stdin.readline, ""):  # between loads there is nothing else for the event loop to do
        name, repeat, is_smoke = line.split()
        if name == WARM_UP_NAME:
            await run_load(completer, WARM_UP)
            _say({})
        else:
            _say(await measure(completer, scale_load(name, repeat=int(repeat), is_smoke=is_smoke == "1")))


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    """Load, then obey standard input until it ends."""
    parser = argparse.ArgumentParser(description="Run loads in OpenVINO's process.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache-gb", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    completer = PipelineCompleter(_load_pipeline(parser.parse_args()))
    asyncio.run(_answer_commands(completer))


if __name__ == "__main__":
    main()
