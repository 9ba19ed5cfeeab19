"""Engine: the engine's thread from loading to its end. Builds decoder, KV pool, scheduler and core, and runs them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace

from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.device_start import LOADED, check_weights_fit, size_pool, start_runner
from engine_core.errors import EngineDeadError, EngineError, EngineFailure, classify_failure, describe_failure
from engine_core.forecast import Forecast, forecast, ready_state
from engine_core.housekeeping import collect_garbage, no_full_collections
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.memory import KVBudget, available_bytes, effective_model_len, size_kv_pool
from engine_core.messages import EngineCommand, EngineCoreOutputs, EngineCoreRequest, EnginePhase, EngineState
from engine_core.model.checkpoint import Checkpoint, imagine_checkpoint, open_checkpoint
from engine_core.model.compute import THIS_MACHINE, Machine, settle_compute
from engine_core.model.decoder import LanguageModel
from engine_core.model.runner import ModelRunner
from engine_core.model.warm_up import warm_up
from engine_core.scheduler.constraints import build_constraints
from engine_core.scheduler.scheduler import Scheduler
from engine_core.snapshot import EngineSnapshot
from engine_core.step_executor import DirectExecutor, StepExecutor, StepThread, ThreadedExecutor
from kernels.backend import DeviceBackend, KVPool

__all__ = [
    "Checkpoint",
    "Engine",
    "Forecast",
    "forecast",
    "imagine_checkpoint",
    "open_checkpoint",
    "resolve_config",
]

logger = logging.getLogger(__name__)


def resolve_config(config: EngineConfig, checkpoint: Checkpoint, machine: Machine = THIS_MACHINE) -> EngineConfig:
    """Return the config with everything settled that depends on the checkpoint and on the machine.

    Raises:
        ConfigError: The configuration does not fit them.
    """
    resolved = config.resolve(trained_model_len=checkpoint.arch.max_position_embeddings)
    return settle_compute(resolved, checkpoint.arch, machine).config


class Engine:
    """Owns the engine thread.

    Args:
        config: Checked and resolved here against the checkpoint.
        checkpoint: From ``open_checkpoint``: headers and shapes are known to be right.
        publish: Gets each step's outputs, on the engine's thread; must not block.
        on_state: Gets each new state, on one of the engine's threads.
        num_token_ids: Ids that the tokenizer knows: none above is ever sampled. None = all that the model has.
        machine: What to compute on; for tests.

    Raises:
        ConfigError: The configuration does not fit the checkpoint.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        publish: Callable[[EngineCoreOutputs], None],
        on_state: Callable[[EngineState], None] = lambda state: None,
        num_token_ids: int | None = None,
        machine: Machine = THIS_MACHINE,
    ) -> None:
        self._config = resolve_config(config, checkpoint, machine)
        self._machine = machine
        self._checkpoint = checkpoint
        self._publish = publish
        self._on_state = on_state
        self._num_token_ids = num_token_ids
        self._state = EngineState(EnginePhase.LOADING, "starting")
        self._device: DeviceBackend | None = None
        self._core: EngineCore | None = None
        self._stop_asked = threading.Event()
        self._unanswered: set[Future[bool]] = set()
        # A daemon thread: a step that hangs must not keep a stopped process alive.
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)

    @property
    def state(self) -> EngineState:
        return self._state

    def start(self) -> None:
        """Start the thread: loading first, then the busy loop."""
        self._thread.start()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand over an admitted request; returns at once.

        Raises:
            EngineDeadError: The engine is not running.
        """
        self._get_running_core().add_request(request)

    def ask(self, command: EngineCommand) -> Future[bool]:
        """Have a command carried out between two steps; returns at once.

        Returns:
            Whether it was done. A ValueError says why it cannot be, an EngineDeadError that nobody is left to do it.

        Raises:
            EngineDeadError: The engine is not running.
        """
        core = self._get_running_core()
        answer: Future[bool] = Future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        core.ask(command, answer)
        if self._state.phase is not EnginePhase.READY:  # it ended meanwhile, perhaps without seeing this
            self._fail_unanswered()
        return answer

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids and a stopped engine are no error."""
        if self._core is not None:
            self._core.abort_requests(tuple(request_ids))

    def take_snapshot(self) -> Future[EngineSnapshot] | None:
        """Ask for a look at the scheduler; None unless the engine is ready. If it dies, the future gets nothing."""
        if self._core is None or self._state.phase is not EnginePhase.READY:
            return None
        return self._core.take_snapshot()

    def seconds_since_progress(self) -> float:
        """Age of the last finished step while there is work in hand, else 0."""
        return self._core.seconds_since_progress() if self._core is not None else 0.0

    def shutdown(self, timeout_s: float) -> bool:
        """Stop after the current step, and wait for the thread at most this long.

        Returns:
            Whether no thread of the engine is left. If one is, it is inside native code.
        """
        self._stop_asked.set()
        if self._core is not None:
            self._core.stop()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _get_running_core(self) -> EngineCore:
        core, state = self._core, self._state
        if core is None or state.phase is not EnginePhase.READY:
            raise EngineDeadError(f"the engine is {state.phase}: {state.detail}")
        return core

    def _fail_unanswered(self) -> None:
        for answer in list(self._unanswered):
            with suppress(InvalidStateError):  # answered a moment ago
                answer.set_exception(EngineDeadError(f"the engine is {self._state.phase}: {self._state.detail}"))

    # ------------------------------------------------------------------ the engine's thread
    def _run(self) -> None:
        # A card runs a step beside the host as it is; a CPU's runs beside the loop on a thread of its own.
        is_cuda = self._config.device.backend == "cuda"
        thread = StepThread() if self._config.scheduler.async_scheduling and not is_cuda else None
        try:
            # The thread that loads the model also runs it: its compute threads are its own.
            core = thread.submit(lambda: self._load(thread)).result() if thread else self._load(None)
            if not self._stop_asked.is_set():
                with no_full_collections():
                    core.run_busy_loop()
            if thread:
                # A step scheduled ahead may still run: whoever hears of the end may take the interpreter away.
                thread.close()
            if self._device is not None:
                self._device.accelerator.synchronize()
            self._set_state(replace(self._state, phase=EnginePhase.STOPPED, detail="stopped"))
        except EngineError as error:
            self._die(str(error), classify_failure(error))
        except BaseException as error:  # a panic in a Rust library is no Exception, and nobody above would hear of it
            logger.exception("the engine died")
            self._die(describe_failure(error), classify_failure(error))
        finally:
            self._fail_unanswered()
            if thread:
                thread.close()

    def _die(self, reason: str, failure: EngineFailure) -> None:
        # State first: whoever comes after this line is refused, whoever came before hears the message.
        self._set_state(replace(self._state, phase=EnginePhase.DEAD, detail=reason, failure=failure))
        self._publish(EngineCoreOutputs([], engine_error=reason))

    def _set_state(self, state: EngineState) -> None:
        self._state = state
        self._on_state(state)

    def _report(self, progress: float, detail: str) -> None:
        self._set_state(replace(self._state, progress=progress, detail=detail))

    def _load(self, thread: StepThread | None) -> EngineCore:
        # Settled once more: what computes belongs to this thread.
        compute = settle_compute(self._config, self._checkpoint.arch, self._machine)
        self._device = compute.device
        if compute.device is not None:
            weights_bytes = compute.measure(self._checkpoint).weights_bytes
            check_weights_fit(weights_bytes, compute.device, self._config)
        model = compute.load(self._checkpoint, self._report)
        budget = self._size_pool(model)
        kv = model.alloc_kv(num_pages=budget.num_blocks + 1, page_size=budget.block_size)
        max_model_len = self._effective_model_len(budget)
        if compute.device is not None:
            executor = start_runner(
                model,
                kv,
                compute.device,
                self._config,
                max_model_len=max_model_len,
                num_token_ids=self._num_token_ids,
                on_progress=self._report,
            )
        else:
            executor = self._start_host(model, kv, thread, max_model_len)
        self._core = self._build_core(executor, budget, max_model_len)
        self._set_state(ready_state(budget, weights_bytes=model.weights_bytes, max_model_len=max_model_len))
        return self._core

    def _start_host(
        self, model: LanguageModel, kv: KVPool, thread: StepThread | None, max_model_len: int
    ) -> StepExecutor:
        self._report(LOADED, "warming up")
        warm_up(model, kv)
        runner = ModelRunner(decoder=model, kv=kv, max_model_len=max_model_len, num_token_ids=self._num_token_ids)
        return ThreadedExecutor(runner, thread) if thread else DirectExecutor(runner)

    def _size_pool(self, model: LanguageModel) -> KVBudget:
        if self._device is not None:
            self._report(LOADED, "measuring the largest step")
            return size_pool(model, self._device, self._config)
        cache = self._config.cache
        return size_kv_pool(
            cache,
            block_bytes=model.kv_page_bytes(cache.block_size),
            max_model_len=self._max_model_len,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            available=available_bytes(),
        )

    @property
    def _max_model_len(self) -> int:
        assert self._config.model.max_model_len is not None, "resolve() settles it"
        return self._config.model.max_model_len

    def _effective_model_len(self, budget: KVBudget) -> int:
        max_model_len = effective_model_len(self._max_model_len, budget)
        if max_model_len < self._max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, fewer than max_model_len (%d): requests end at %d",
                budget.num_tokens,
                self._max_model_len,
                max_model_len,
            )
        return max_model_len

    def _build_core(self, executor: StepExecutor, budget: KVBudget, max_model_len: int) -> EngineCore:
        kv_cache = KVCacheManager(
            num_blocks=budget.num_blocks,
            block_size=budget.block_size,
            enable_prefix_caching=self._config.cache.enable_prefix_caching,
            watermark=self._config.cache.watermark,
        )
        scheduler = Scheduler(
            config=self._config.scheduler,
            kv_cache=kv_cache,
            max_model_len=max_model_len,
            constraints=build_constraints(self._config.scheduler, block_size=budget.block_size),
            max_steps_in_flight=2 if self._config.scheduler.async_scheduling else 1,
        )

        def rest() -> None:
            scheduler.check_invariants()
            collect_garbage()

        return EngineCore(
            scheduler=scheduler, executor=executor, publish=self._publish, rest=rest, clock=time.monotonic
        )
