"""ResultApplier: appends what a step sampled, and ends what has come to its end. Decides nothing about the next step.

Source: scheduler.md 1.11, K7, V9.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import EngineCoreOutput, EngineCoreOutputs
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.counters import StepCounters
from engine_core.scheduler.lifecycle import Lifecycle
from engine_core.scheduler.output import ModelRunnerOutput
from engine_core.scheduler.step_plan import ScheduledRow, ScheduledStep
from engine_core.scheduler.stopping import check_stop


class ResultApplier:
    """Turns results into tokens of requests and outputs for clients.

    Args:
        lifecycle: Ends requests.
        kv_cache: Registers blocks that have become full.
        counters: Counts what came.
    """

    def __init__(self, *, lifecycle: Lifecycle, kv_cache: KVCacheManager, counters: StepCounters) -> None:
        self._lifecycle = lifecycle
        self._kv_cache = kv_cache
        self._counters = counters

    def apply(self, step: ScheduledStep, result: ModelRunnerOutput) -> EngineCoreOutputs:
        """Apply one step's result.

        Rows of requests that have ended meanwhile bring nothing. Those of preempted ones do: what was sampled is
        right, whatever became of the KV.
        """
        num_decodes = len(step.decodes)
        assert len(result.token_ids) == num_decodes + len(step.rows), "one entry a row, in the order of the output"
        outputs = EngineCoreOutputs(self._lifecycle.take_undelivered())
        if result.errors:
            self._end_failed(step, result.errors, outputs.outputs)
        self._apply_decodes(step.decodes, result.token_ids, outputs)
        for row, token_id in zip(step.rows, islice(result.token_ids, num_decodes, None), strict=True):
            more = result.more_token_ids.get(row.request.request_id, [])
            self._apply_row(row, [token_id, *more] if token_id >= 0 else more, outputs)
        if any(output.finish_reason for output in outputs.outputs):
            self._lifecycle.sweep_running()
        if result.logprobs or result.prompt_logprobs:
            _attach_logprobs(result, outputs)
        return outputs

    def _apply_decodes(self, decodes: list[Request], token_ids: list[int], outputs: EngineCoreOutputs) -> None:
        """The hot lane: one token for each of many requests that go on. Everything rare leaves by a call."""
        block_size = self._kv_cache.block_size
        running = RequestStatus.RUNNING
        add_req_id, add_token_id = outputs.token_req_ids.append, outputs.token_ids.append
        for request, token_id in zip(decodes, token_ids):  # noqa: B905 - token_ids go on with the other rows' tokens
            if request.status is not running:
                self._deliver(request, [token_id], outputs)
                continue
            num_tokens = request.num_tokens
            if not num_tokens % block_size:
                # The step wrote the slot before the new token's: the block that ends there is full and known.
                self._kv_cache.register_full_blocks(request, num_tokens)
            request.all_token_ids.append(token_id)
            request.num_tokens = num_tokens = num_tokens + 1
            if num_tokens >= request.max_total_tokens or token_id in request.stop_ids:
                stop = check_stop(request)
                if stop is not None:
                    outputs.outputs.append(self._stop(request, [token_id], stop))
                    continue
            add_req_id(request.request_id)
            add_token_id(token_id)

    def _apply_row(self, row: ScheduledRow, token_ids: list[int], outputs: EngineCoreOutputs) -> None:
        request = row.request
        if request.status.is_finished:
            return
        assert bool(token_ids) == row.is_sampling, f"{request.request_id}: a sample is due at the last known token only"
        if row.num_drafts:
            self._reject_drafts(request, row.num_drafts, len(token_ids) - 1)
        self._deliver(request, token_ids, outputs)

    def _reject_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        num_rejected = num_drafts - num_accepted
        request.num_tokens_with_spec -= num_rejected
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= num_rejected
        self._counters.count_accepted(num_accepted)

    def _deliver(self, request: Request, token_ids: list[int], outputs: EngineCoreOutputs) -> None:
        """Append one row's tokens, and record what its client is to hear."""
        if request.status.is_finished:
            return
        if token_ids:
            self._append(request, token_ids, outputs)
        if request.num_steps_to_drain:
            self._lifecycle.drain_one(request)

    def _append(self, request: Request, token_ids: list[int], outputs: EngineCoreOutputs) -> None:
        is_first = request.num_tokens == request.num_prompt_tokens
        # The step computed every token before the last of these, whether or not they all count.
        num_computed = request.num_tokens + len(token_ids) - 1
        stop = None
        for count, token_id in enumerate(token_ids, start=1):
            request.append_output(token_id)
            stop = check_stop(request)
            if stop is not None:
                token_ids = token_ids[:count]
                break
        if request.status is RequestStatus.RUNNING:
            self._kv_cache.register_full_blocks(request, min(num_computed, request.num_tokens))
        if stop is not None:
            outputs.outputs.append(self._stop(request, token_ids, stop))
        elif is_first or len(token_ids) > 1:
            outputs.outputs.append(
                EngineCoreOutput(
                    request.request_id,
                    token_ids,
                    num_cached_tokens=request.num_cached_tokens,
                    first_scheduled_time=request.first_scheduled_time,
                )
            )
        else:
            outputs.token_req_ids.append(request.request_id)
            outputs.token_ids.append(token_ids[0])

    def _stop(self, request: Request, token_ids: list[int], stop: tuple[RequestStatus, int | None]) -> EngineCoreOutput:
        status, stop_token_id = stop
        return self._lifecycle.finish(request, status, token_ids, stop_token_id=stop_token_id)

    def _end_failed(self, step: ScheduledStep, errors: dict[str, str], outputs: list[EngineCoreOutput]) -> None:
        for request in step.requests():
            error = errors.get(request.request_id)
            if error is None:
                continue
            if request.status.is_finished:  # aborted while the step ran: what it left in the cache is as suspect
                self._kv_cache.forget_suspect(request)
            else:
                outputs.append(
                    self._lifecycle.finish(request, RequestStatus.FINISHED_ERROR, error=error, is_suspect=True)
                )


def _attach_logprobs(result: ModelRunnerOutput, outputs: EngineCoreOutputs) -> None:
    """Give each new token its logprobs, and move lines that get some from the columns to the records.

    Those of tokens that nobody gets (behind a stop, of a request that has ended) are dropped.
    """
    columns = list(zip(outputs.token_req_ids, outputs.token_ids, strict=True))
    outputs.token_req_ids[:] = [request_id for request_id, _ in columns if request_id not in result.logprobs]
    outputs.token_ids[:] = [token_id for request_id, token_id in columns if request_id not in result.logprobs]
    moved = [EngineCoreOutput(request_id, [token]) for request_id, token in columns if request_id in result.logprobs]
    outputs.outputs[:] = [_with_logprobs(output, result) for output in (*outputs.outputs, *moved)]


def _with_logprobs(output: EngineCoreOutput, result: ModelRunnerOutput) -> EngineCoreOutput:
    num_tokens = len(output.new_token_ids)
    if not num_tokens:
        return output
    logprobs = result.logprobs.get(output.request_id)
    return replace(
        output,
        logprobs=None if logprobs is None else logprobs[:num_tokens],
        prompt_logprobs=result.prompt_logprobs.get(output.request_id),
    )
