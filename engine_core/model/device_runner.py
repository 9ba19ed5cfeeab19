"""DeviceRunner: gives steps to a device that computes beside the host, and brings back what was sampled.

Two lanes. Fast: the device picks the tokens, they stay there for the next step, and nobody waits. Host: some row needs
what only the host does (penalties, bias, min_tokens, logprobs), so the step ahead is waited for, and so is this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from engine_core.model.decoder import Decoder
from engine_core.model.device_graphs import Progress, StepGraphs, capture_graphs
from engine_core.model.device_results import PendingStep, ResultRing, SampledRow
from engine_core.model.device_sampler import NUM_COLUMNS, Draw, RowRecord, build_record, greedy_record
from engine_core.model.device_work import DeviceWork
from engine_core.model.head_reader import HeadReader
from engine_core.model.input_batch import InputBatch, StepInputs
from engine_core.model.logit_fetcher import LogitFetcher
from engine_core.model.request_row import RequestRow
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from kernels.backend import DeviceBackend, IntArray, KVPool
from kernels.step_block import StepBlock

PendingResult = Callable[[], ModelRunnerOutput]
_MAX_IN_FLIGHT = 2  # as many as there are pinned blocks and places for results


class _QueuedBody(NamedTuple):
    """A step whose body is on its way, up to the head.

    Attributes:
        hidden: [R, H].
        records: [R, NUM_COLUMNS], on the device.
        draw: What the records take.
        size: The graph's batch size; 0 = computed eagerly.
    """

    hidden: torch.Tensor
    records: torch.Tensor
    draw: Draw
    size: int


class DeviceRunner:
    """A model on a device, its KV pages, and the running requests' tokens. Used by one thread.

    Args:
        work: What the device does.
        block: Where steps are laid out.
        graphs: Of decode steps.
        backend: Plans.
        batch: Empty, made for a device that picks.
        results: Brings tokens back.
        fetcher: Brings logits back.
    """

    def __init__(
        self,
        *,
        work: DeviceWork,
        block: StepBlock,
        graphs: StepGraphs,
        backend: DeviceBackend,
        batch: InputBatch,
        results: ResultRing,
        fetcher: LogitFetcher,
    ) -> None:
        self._work = work
        self._block = block
        self._graphs = graphs
        self._backend = backend
        self._batch = batch
        self._results = results
        self._fetcher = fetcher
        self._unread = greedy_record(work.unread_slot)
        self._in_flight: deque[PendingStep] = deque()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens, and sample where a request's last known token was among them."""
        return self.launch(output)()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> PendingResult:
        """Have the device begin a step, behind those that it has, without waiting for it.

        At most one step may be in flight; an older one is waited for. 64 decoding requests take 0.2 ms of Python.

        Returns:
            Waits for the step's end, and for those before it, and returns its result.
        """
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._finish_oldest()
        self._batch.apply(output)
        if output.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput
        step = self._batch.build_step(output)
        if _needs_host(step):
            result = self._run_with_host(step, len(output.req_ids))
            return lambda: result
        pending = self._launch_fast(step, len(output.req_ids))
        self._in_flight.append(pending)
        return partial(self._finish, pending)

    # ------------------------------------------------------------------ the fast lane
    def _launch_fast(self, step: StepInputs, num_lines: int) -> PendingStep:
        queued = self._queue_body(step)
        num_rows = len(step.sampling_rows)
        load_id = self._block.load_id
        if num_rows == 0:  # a chunk of a prompt
            nothing: IntArray = np.empty(0, np.int32)
            arrival = self._backend.accelerator.event()
            return PendingStep(load_id=load_id, arrival=arrival, words=nothing, sampled=[], num_lines=num_lines)
        if queued.size:
            self._graphs.heads[queued.size, queued.draw].replay()
        else:
            self._work.head(queued.hidden, queued.records, queued.draw)
        arrival, words = self._results.send(self._work.reported[:num_rows])
        sampled = [
            SampledRow(row, line, row.append_unknown())
            for row, line in zip(step.sampling_rows, step.sampling_lines, strict=True)
        ]
        return PendingStep(load_id=load_id, arrival=arrival, words=words, sampled=sampled, num_lines=num_lines)

    def _finish(self, pending: PendingStep) -> ModelRunnerOutput:
        while pending.result is None:
            self._finish_oldest()
        return pending.result

    def _finish_oldest(self) -> None:
        pending = self._in_flight[0]
        pending.finish()
        self._in_flight.popleft()
        self._block.note_done(pending.load_id)

    # ------------------------------------------------------------------ the host lane
    def _run_with_host(self, step: StepInputs, num_lines: int) -> ModelRunnerOutput:
        """Run a step to its end. Its tokens are known then: nobody asks the device for them."""
        while self._in_flight:
            self._finish_oldest()
        queued = self._queue_body(step)
        reader = HeadReader(step, num_lines)
        needed = np.flatnonzero(step.needs_logits)
        num_rows, size = len(step.needs_logits), self._fetcher.max_num_rows
        for first in range(0, num_rows, size):
            stop = min(first + size, num_rows)
            logits = self._work.head_with_logits(
                first, queued.hidden[first:stop], queued.records[first:stop], queued.draw
            )
            arrival, words = self._results.send(self._work.reported[first:stop])
            wanted = needed[(needed >= first) & (needed < stop)] - first
            rows = self._fetcher.fetch(logits, wanted.tolist())
            arrival.synchronize()
            reader.read(first, words.tolist(), (words >= 0).tolist(), rows)
        self._block.note_done(self._block.load_id)
        return reader.result

    # ------------------------------------------------------------------ both
    def _queue_body(self, step: StepInputs) -> _QueuedBody:
        meta, kv, num_rows = step.meta, self._work.kv, len(step.needs_logits)
        num_shared_pages = self._backend.num_shared_pages(meta, kv) if meta.num_common_pages else 0
        # A graph has a row of logits for every request.
        size = self._graphs.size_for(meta.num_reqs) if meta.max_q_len == 1 and num_rows == meta.num_reqs else 0
        if size and num_shared_pages and not self._graphs.has_cascade(size):
            num_shared_pages = 0
        draw, records = self._records(step, size or num_rows)
        tensors, on_device = self._block.load(meta, records, num_shared_pages=num_shared_pages, num_padded=size)
        plan = self._backend.plan_step(tensors, kv, in_graph=size > 0)
        if not size:
            return _QueuedBody(self._work.body(tensors, plan), on_device, draw, size)
        self._graphs.bodies[size, num_shared_pages > 0].replay()
        return _QueuedBody(self._work.hidden, on_device, draw, size)

    def _records(self, step: StepInputs, num_rows: int) -> tuple[Draw, IntArray]:
        """Return what the rows' records take, and the records: [num_rows, NUM_COLUMNS]."""
        records, taken = [self._unread] * num_rows, 0
        needs_logits = step.needs_logits.tolist()
        for row, index in zip(step.sampling_rows, step.sampling_logits, strict=True):
            if needs_logits[index]:
                continue  # the host picks it
            record = row.device_record or _give_record(row)
            taken |= record.draw
            records[index] = record.words(row.num_output_tokens)
        return Draw.of(taken), np.frombuffer(b"".join(records), np.int32).reshape(num_rows, NUM_COLUMNS)


def build_device_runner(  # noqa: PLR0913 - the engine's settings, each of which one part takes
    *,
    decoder: Decoder,
    kv: KVPool,
    backend: DeviceBackend,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_token_ids: int | None = None,
    on_progress: Progress = lambda fraction, detail: None,
    enforce_eager: bool = False,
) -> DeviceRunner:
    """Build a runner, and capture its graphs.

    Args:
        decoder: The loaded model; its backend is ``backend``.
        kv: Its pages; page ids are the scheduler's block ids.
        backend: Computes.
        max_model_len: Context in tokens.
        max_num_seqs: Requests that run at once, at most.
        max_num_batched_tokens: Tokens a step at most.
        num_token_ids: Ids that the tokenizer knows; None = the model's whole vocabulary.
        on_progress: Gets the part of the graphs that is captured, and a line for whoever waits.
        enforce_eager: Capture no graphs.
    """
    accelerator, vocab_size = backend.accelerator, decoder.arch.vocab_size
    max_num_rows = max(max_num_batched_tokens, max_num_seqs)
    decoder.reserve_positions(max_model_len)  # a graph keeps the tables that it was captured with
    work = DeviceWork(
        decoder=decoder,
        kv=kv,
        device=accelerator.device,
        max_num_seqs=max_num_seqs,
        max_num_rows=max_num_rows,
        num_token_ids=min(num_token_ids or vocab_size, vocab_size),
    )
    block = StepBlock(
        accelerator,
        page_size=kv.page_size,
        max_num_reqs=max_num_seqs,
        max_num_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_columns=NUM_COLUMNS,
    )
    sizes = () if enforce_eager else backend.graph_sizes(max_num_seqs)
    return DeviceRunner(
        work=work,
        block=block,
        graphs=capture_graphs(work=work, block=block, backend=backend, sizes=sizes, on_progress=on_progress),
        backend=backend,
        batch=InputBatch(max_model_len=max_model_len, block_size=kv.page_size, picks_on_device=True),
        results=ResultRing(accelerator, max_num_rows),
        fetcher=LogitFetcher(accelerator, vocab_size),
    )


def _needs_host(step: StepInputs) -> bool:
    return bool(step.needs_logits.any()) or any(row.prompt_logprobs is not None for row in step.sampling_rows)


def _give_record(row: RequestRow) -> RowRecord:
    row.device_record = build_record(row.sampling, row.slot)
    return row.device_record
