"""The engine on a card, on FlashInfer's and CUDA's stand-ins: what it starts with, what it says, what it computes."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_core.device_start import foretell_use, measure_use
from engine_core.engine import Engine, forecast
from engine_core.errors import EngineFailure
from engine_core.memory import size_device_pool
from engine_core.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EnginePhase, EngineState
from engine_core.model.compute import Machine, settle_compute
from engine_core.model.decoder import Decoder
from engine_core.sampling_params import SamplingParams
from kernels.accelerator import DeviceMemory
from kernels.flashinfer_backend import FlashInferBackend
from kernels.testing.fake_cuda import FakeAccelerator
from kernels.testing.fake_flashinfer import FakeFlashInfer
from tests.engine_core.cuda_machine import GIB, create_accelerator, create_machine
from tests.helpers import greedy
from tests.kernels.fused_case import create_arch, create_checkpoint

MIB = 1 << 20
# Untied: a head that is the embedding would give each token back.
ARCH = create_arch(head_dim=64, max_position_embeddings=512, tie_word_embeddings=False)
CHECKPOINT = create_checkpoint(ARCH)
CACHE = CacheConfig(block_size=16, num_blocks=40)
SCHEDULER = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4)
PROMPTS = [[(7 * i + 3 * j * j + 1) % ARCH.vocab_size for j in range(5 + 9 * i)] for i in range(6)]


def create_config(
    backend: str = "cuda",
    *,
    cache: CacheConfig = CACHE,
    scheduler: SchedulerConfig = SCHEDULER,
    enforce_eager: bool = False,
) -> EngineConfig:
    device = DeviceConfig(backend, num_threads=1, enforce_eager=enforce_eager)
    return EngineConfig(ModelConfig(Path("random"), "bf16"), cache, scheduler, device)


class Run:
    """An engine from its start to its end."""

    def __init__(self, config: EngineConfig, accelerator: FakeAccelerator | None = None) -> None:
        self.states: list[EngineState] = []
        self._outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
        self._settled = threading.Event()
        machine = create_machine(accelerator) if config.device.backend == "cuda" else Machine()
        self.engine = Engine(config, CHECKPOINT, publish=self._outputs.put, on_state=self._note, machine=machine)
        self.engine.start()
        assert self._settled.wait(60), "the engine did not load"

    def _note(self, state: EngineState) -> None:
        self.states.append(state)
        if state.phase is not EnginePhase.LOADING:
            self._settled.set()

    def send(self, prompts: list[list[int]], params: Callable[[int], SamplingParams]) -> list[list[EngineCoreOutput]]:
        """Return each request's outputs."""
        assert self.engine.state.phase is EnginePhase.READY, self.engine.state.detail
        found: list[list[EngineCoreOutput]] = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            self.engine.add_request(EngineCoreRequest(str(i), prompt, params(i), arrival_time=0.0))
        num_ended = 0
        while num_ended < len(prompts):
            outputs = self._outputs.get(timeout=60)
            assert outputs.engine_error is None, outputs.engine_error
            for output in outputs.as_records():
                assert output.error is None, output.error
                found[int(output.request_id)].append(output)
                num_ended += output.finish_reason is not None
        return found

    def generate(self, params: Callable[[int], SamplingParams]) -> list[list[int]]:
        """Return each prompt's tokens, and end the engine."""
        found = self.send(PROMPTS, params)
        assert self.engine.shutdown(60)
        return [[token_id for output in outputs for token_id in output.new_token_ids] for outputs in found]


def plain(i: int) -> SamplingParams:
    return greedy(8)


def drawn(i: int) -> SamplingParams:
    return greedy(5, temperature=0.9, seed=i, top_p=0.95 if i % 2 else 1.0)


def find_worst_gap(found: list[list[int]]) -> float:
    """Return how far below the reference's likeliest token, in log probability, any of these is to the reference."""
    reference = Run(create_config("torch"))
    whole = [prompt + tokens for prompt, tokens in zip(PROMPTS, found, strict=True)]
    outputs = reference.send(whole, lambda i: greedy(1, num_prompt_logprobs=1))
    assert reference.engine.shutdown(60)
    gaps = []
    for tokens, own in zip(found, outputs, strict=True):
        asked = next(output.prompt_logprobs for output in own if output.prompt_logprobs is not None)
        gaps += [each.top_logprobs[0] - each.logprob for each in asked[-len(tokens) :]]
    assert len(gaps) == sum(map(len, found)) > 0
    return max(gaps)


def test_flashinfer_with_graphs_and_overlap_gives_the_references_tokens() -> None:
    card = create_accelerator()
    run = Run(create_config(), card)
    found = run.generate(plain)
    assert all(len(tokens) == 8 for tokens in found) and len(set().union(*found)) > 20
    assert find_worst_gap(found) < 0.05, "bf16 rounds in another order; a token that is as good as equal may win"
    assert card.count("capture") > 0 and card.count("replay") > 8
    assert card.log[-1] == "synchronize", "nothing runs on when the engine has ended"


def test_flashinfer_without_graphs_or_overlap_gives_the_same() -> None:
    card = create_accelerator()
    scheduler = replace(SCHEDULER, async_scheduling=False)
    found = Run(create_config(scheduler=scheduler, enforce_eager=True), card).generate(plain)
    assert find_worst_gap(found) < 0.05
    assert card.count("capture") == card.count("replay") == 0


def test_flashinfer_gives_a_seed_its_tokens_again() -> None:
    first, second = (Run(create_config(enforce_eager=True)).generate(drawn) for _ in range(2))
    assert first == second and len({tuple(tokens) for tokens in first}) == len(PROMPTS)


def test_the_start_with_flashinfer_tells_how_far_it_is() -> None:
    run = Run(create_config())
    run.engine.shutdown(60)
    details = [state.detail for state in run.states]
    assert details[0] == "layer 1 of 2" and "measuring the largest step" in details
    captured = [detail for detail in details if detail.startswith("capturing graphs")]
    assert captured[0].startswith("capturing graphs 1 of ") and len(captured) > 3
    ready = next(state for state in run.states if state.phase is EnginePhase.READY)
    assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (40, 16, 512)
    assert (
        ready.weights_bytes == settle_compute(create_config(), ARCH, create_machine()).measure(CHECKPOINT).weights_bytes
    )


# ---------------------------------------------------------------------- memory
OPEN = CacheConfig(block_size=16)
TABLE_BYTES = 4096 * ARCH.head_dim * 4


def load(config: EngineConfig, card: FakeAccelerator, num_bytes_loaded: int) -> tuple[EngineConfig, Decoder, Machine]:
    """Load the model; the card then has so much less."""
    machine = create_machine(card)
    compute = settle_compute(config.resolve(trained_model_len=512), ARCH, machine)
    decoder = compute.load(CHECKPOINT, lambda share, what: None)
    assert isinstance(decoder, Decoder)
    memory = card.memory()
    card._memory = DeviceMemory(memory.free - num_bytes_loaded, memory.total)
    return compute.config, decoder, machine


@pytest.mark.parametrize(("utilization", "taken"), [(0.85, 0), (0.9, 40 * MIB)])
def test_flashinfers_pool_is_foretold_within_5_percent(utilization: float, taken: int) -> None:
    config = create_config(
        cache=replace(OPEN, gpu_memory_utilization=utilization),
        scheduler=SchedulerConfig(max_num_batched_tokens=1024, max_num_seqs=64),
    )
    total = 440 * MIB
    expected = forecast(config, CHECKPOINT, machine=create_machine(create_accelerator(total=total, taken=taken)))
    assert expected.state is not None, expected.problem
    card = create_accelerator(total=total, taken=taken)
    settled, decoder, machine = load(config, card, expected.weights_bytes + TABLE_BYTES)
    backend = settle_compute(settled, ARCH, machine).device
    assert backend is not None
    use, foretold = measure_use(decoder, backend, settled), foretell_use(ARCH, 0, backend, settled)
    assert use.step_bytes == pytest.approx(foretold.step_bytes, rel=0.05)
    budget = size_device_pool(
        settled.cache, block_bytes=expected.block_bytes, max_model_len=512, max_num_seqs=64, use=use
    )
    assert budget.reason == expected.state.detail == f"gpu_memory_utilization {utilization:g}"
    assert budget.num_blocks == pytest.approx(expected.state.num_blocks, rel=0.05)


def test_flashinfers_kernels_for_one_long_prompt_are_tried_before_there_is_one() -> None:
    """On Hopper they are a module of their own, which may have to be compiled first."""
    config = create_config(cache=OPEN, scheduler=SchedulerConfig(max_num_batched_tokens=1024, max_num_seqs=64))
    settled, decoder, machine = load(config, create_accelerator(), 0)
    backend = settle_compute(settled, ARCH, machine).device
    assert isinstance(backend, FlashInferBackend)
    measure_use(decoder, backend, settled)
    calls = [call for call in backend._flashinfer.calls if call.name.startswith("BatchPrefill")]
    num_reqs = [call.args[0].shape[0] - 1 for call in calls if call.name.endswith(".plan")]
    num_rows = {call.args[0].shape[0] for call in calls if call.name.endswith(".run")}
    assert num_reqs == [1, 64] and num_rows == {512, 1024}


def test_flashinfers_pool_takes_what_utilisation_leaves_and_lowers_the_context() -> None:
    config = create_config(cache=OPEN).resolve(trained_model_len=512)
    compute = settle_compute(config, ARCH, create_machine())
    assert compute.device is not None
    spare = foretell_use(ARCH, 0, compute.device, compute.config).left_bytes(0.9)
    twenty_bytes = 21 * compute.measure(CHECKPOINT).block_bytes
    card = create_accelerator(total=GIB, taken=spare + TABLE_BYTES - twenty_bytes)
    run = Run(create_config(cache=OPEN), card)
    run.engine.shutdown(60)
    ready = next(state for state in run.states if state.phase is EnginePhase.READY)
    assert ready.detail == "gpu_memory_utilization 0.9" and 15 < ready.num_blocks <= 20
    assert ready.max_model_len == ready.num_blocks * 16


@pytest.mark.parametrize(
    ("cache", "total", "told"),
    [
        (CACHE, 8 * MIB, "the weights need 0.00 GiB but .* --gpu-memory-utilization"),
        (OPEN, 200 * MIB, "gpu_memory_utilization 0.9: 0 blocks.* lower --max-num-batched-tokens"),
        (replace(OPEN, num_blocks=100_000), GIB, "num_kv_blocks: 100000 blocks .* set --num-kv-blocks"),
    ],
)
def test_what_does_not_fit_ends_the_start_and_is_foretold(cache: CacheConfig, total: int, told: str) -> None:
    taken = 8 * MIB if total == 8 * MIB else 0
    run = Run(create_config(cache=cache), create_accelerator(total=total, taken=taken))
    state = run.engine.state
    assert (state.phase, state.failure) == (EnginePhase.DEAD, EngineFailure.MEMORY)
    foretold = forecast(
        create_config(cache=cache), CHECKPOINT, machine=create_machine(create_accelerator(total=total, taken=taken))
    )
    assert foretold.state is None
    for words in (state.detail, foretold.problem):
        assert re.search(told, words), words


def test_a_card_that_fails_ends_the_engine_with_a_sentence() -> None:
    class Failing(FakeAccelerator):
        def peak_bytes(self, body: Callable[[], None]) -> int:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation.")

    run = Run(create_config(), Failing())
    assert run.engine.state.failure is EngineFailure.MEMORY
    assert "the card's memory is exhausted: lower --gpu-memory-utilization" in run.engine.state.detail
    assert "Tried to allocate 2.00 GiB" in run.engine.state.detail and "documentation" not in run.engine.state.detail


@pytest.mark.parametrize("name", ["rmsnorm", "BatchDecodeWithPagedKVCacheWrapper.plan"], ids=["measuring", "capturing"])
def test_a_module_that_may_not_be_compiled_is_named_and_no_restart_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer looks for a module where it is first needed, and does not say which one it has not found."""

    class MissingJITCacheError(RuntimeError):
        spec = SimpleNamespace(name="batch_prefill_sm90")

    def fail(self: FakeFlashInfer, called: str, function: Callable[..., Any], *, skip: int = 0) -> Callable[..., Any]:
        def refuse(*args: object, **kwargs: object) -> None:
            raise MissingJITCacheError("JIT compilation is disabled")

        return refuse if called == name else function

    monkeypatch.setattr(FakeFlashInfer, "_recording", fail)
    state = Run(create_config()).engine.state
    assert (state.phase, state.failure) == (EnginePhase.DEAD, EngineFailure.CONFIG)
    assert "the module batch_prefill_sm90 is not compiled" in state.detail
