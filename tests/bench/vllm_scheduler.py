"""vLLM V1's scheduler alone, without a model, under the loads of scheduler.py: what its ``--vllm`` runs.

    python tests/bench/vllm_scheduler.py [--model DIR]

Runs under an interpreter that has vLLM, so imports nothing of ours. Takes the synchronous scheduler with prefix caching
and statistics on, and prints one JSON object.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Before vLLM is imported, since it reads them then. Stdout is for the figures, and nothing is fetched.
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

# The loads of scheduler.py; the two files share no import, so a change there is a change here.
BLOCK_SIZE = 16
PROMPT_TOKENS = 64
ADMITTED, ADMITTED_TOKENS = 256, 1024
MAX_MODEL_LEN = 8192
RUNNING = (64, 256, 1024)
WARM_STEPS = 40

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Bench:
    """Creates schedulers whose budgets never bind, and requests as vLLM's engine core would."""

    def __init__(self, model: Path) -> None:
        self._model = str(model)
        hash_function = get_hash_fn_by_name(CacheConfig(block_size=BLOCK_SIZE).prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)

    def create_scheduler(self, max_num_seqs: int, *, num_blocks: int) -> Any:
        """Return a scheduler over a cache that holds nothing but block ids."""
        cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache_config.num_gpu_blocks = num_blocks
        config = VllmConfig(
            model_config=ModelConfig(
                model=self._model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_MODEL_LEN
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=65_536,
                max_model_len=MAX_MODEL_LEN,
                enable_chunked_prefill=True,
                async_scheduling=False,
                is_encoder_decoder=False,
            ),
            cache_config=cache_config,
        )
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        return Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )

    def create_request(self, number: int, token_ids: list[int], max_tokens: int) -> Any:
        """Return a request that only its length ends; its construction hashes the prompt."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(
            request_id=f"req-{number}",
            prompt_token_ids=token_ids,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._block_hasher,
        )

    def measure_decode(self, num_running: int, num_steps: int) -> float:
        """Return the median of seconds a step in which every request decodes one token."""
        scheduler = self.create_scheduler(num_running, num_blocks=max(20_000, num_running * 100))
        for number in range(num_running):
            tokens = [(number * 131 + position) % 40_000 for position in range(PROMPT_TOKENS + number % BLOCK_SIZE)]
            scheduler.add_request(self.create_request(number, tokens, max_tokens=6000))
        for _ in range(WARM_STEPS):
            run_step(scheduler)
        with frozen_heap():
            steps = [run_step(scheduler) for _ in range(num_steps)]
        assert all(num_tokens == num_running for _, num_tokens in steps)
        return statistics.median(seconds for seconds, _ in steps)

    def measure_admission(self, *, is_cached: bool) -> float:
        """Return seconds from the first request's construction to the end of the last prompt."""
        scheduler = self.create_scheduler(ADMITTED, num_blocks=60_000)
        prompts = [
            [(number * 7919 + position * 31 + position * position % 97) % 40_000 for position in range(ADMITTED_TOKENS)]
            for number in range(ADMITTED)
        ]
        if is_cached:
            self._admit(scheduler, prompts, max_tokens=1)
            while scheduler.has_requests():
                run_step(scheduler)
        with frozen_heap():
            return self._admit(scheduler, prompts, max_tokens=16)

    def _admit(self, scheduler: Any, prompts: list[list[int]], *, max_tokens: int) -> float:
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            scheduler.add_request(self.create_request(number, prompt, max_tokens))
        seconds = time.perf_counter() - started
        while scheduler.waiting or any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running):
            seconds += run_step(scheduler)[0]
        return seconds


def run_step(scheduler: Any) -> tuple[float, int]:
    """Schedule a step, apply its result; return the seconds of both, without what a model would do, and the tokens."""
    started = time.perf_counter()
    output = scheduler.schedule()
    seconds = time.perf_counter() - started
    result = sample(scheduler, output)
    started = time.perf_counter()
    scheduler.update_from_output(output, result)
    return seconds + time.perf_counter() - started, output.total_num_scheduled_tokens


def sample(scheduler: Any, output: Any) -> Any:
    """Return a token for each row that reaches its last token; called right after its schedule()."""
    req_ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[req_id] for req_id in req_ids]
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[[7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests],
    )


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep what exists out of the collector's sight, as vLLM's engine core does before it serves."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def model_directory() -> Iterator[Path]:
    """A one-layer llama as far as a scheduler asks: its configuration, no weights, no tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
        yield Path(directory)


def best_of(runs: int, measure: Callable[[], float]) -> float:
    """Return the smallest of several runs: the others had company on the machine."""
    return min(measure() for _ in range(runs))


def measure(model: Path, num_steps: int) -> dict[str, Any]:
    """Return microseconds per running request and step, and milliseconds per admission; best of several runs."""
    bench = Bench(model)
    return {
        "us_per_request": {
            str(num_running): best_of(3, partial(bench.measure_decode, num_running, num_steps)) * 1e6 / num_running
            for num_running in RUNNING
        },
        "admission_ms": best_of(5, partial(bench.measure_admission, is_cached=False)) * 1e3,
        "admission_cached_ms": best_of(5, partial(bench.measure_admission, is_cached=True)) * 1e3,
        "version": vllm.__version__,
    }


def main() -> None:
    """Measure, print JSON."""
    parser = argparse.ArgumentParser(description="What vLLM's scheduler costs, without a model.")
    parser.add_argument("--model", type=Path, metavar="DIR", help="A model's directory. [default: one made for this]")
    parser.add_argument("--steps", type=int, default=400, help="Steps timed per size. [default: 400]")
    args = parser.parse_args()
    if args.model:
        figures = measure(args.model, args.steps)
    else:
        with model_directory() as model:
            figures = measure(model, args.steps)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
