"""A model runner that owns simulated KV memory and notices every wrong read.

Each slot holds a running hash of all tokens up to its position, so KV of the wrong request, the wrong position, a
block reused too early or never written shows up as a difference, not as an odd text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from engine_core.messages import FinishReason, TokenLogprobs
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import ModelRunnerOutput, NewRequestData, SchedulerOutput

VOCAB_SIZE = 16
_MASK = (1 << 61) - 1
_GARBAGE = -1


def mix(*values: int) -> int:
    """Return a 61-bit hash of small integers, the same in every process."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value + 0x1F)) * 0xD6E8FEB86659FD93 + 0x632BE59BD9B4E019) & _MASK
        state ^= state >> 29
    return state


def sample_token(chain: int, seed: int, output_index: int) -> int:
    """Return the token that the fake model picks after a context; depends on nothing else."""
    return mix(chain, seed, output_index) % VOCAB_SIZE


def token_logprobs(chain: int, token_id: int, num_top: int) -> TokenLogprobs:
    """Return what the fake model thinks of a token after a context."""
    top = tuple(mix(chain, place) % VOCAB_SIZE for place in range(num_top))
    return TokenLogprobs(token_id, -float(mix(chain, token_id) % 1000), 1 + chain % 7, top, (-1.0,) * num_top)


def expect_logprobs(tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return those of each token after the first, computed without any scheduler."""
    found, chain = [], 0
    for token, following in pairwise(tokens):
        chain = mix(chain, token)
        found.append(token_logprobs(chain, following, num_top))
    return found


def expect_output(
    prompt: Sequence[int], params: SamplingParams, max_total_tokens: int
) -> tuple[list[int], FinishReason]:
    """Return what a request must produce, computed without any scheduler.

    Args:
        prompt: Its prompt.
        params: Its sampling parameters.
        max_total_tokens: The shorter of context and KV pool + 1.
    """
    chain = 0
    for token in prompt:
        chain = mix(chain, token)
    ends = params.stop_token_ids | (frozenset() if params.ignore_eos else params.eos_token_ids)
    outputs: list[int] = []
    while True:
        token = sample_token(chain, params.seed, len(outputs))
        outputs.append(token)
        chain = mix(chain, token)
        if token in ends and len(outputs) >= params.min_tokens:
            return outputs, FinishReason.STOP
        if len(outputs) == params.max_tokens or len(prompt) + len(outputs) == max_total_tokens:
            return outputs, FinishReason.LENGTH


@dataclass
class _Row:
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[int]
    num_computed: int
    num_found: int  # of the tokens computed, those that it did not compute itself
    rejections: list[int] = field(default_factory=list)  # by step that sampled
    chains: list[int] = field(default_factory=list)  # chains[p]: hash of tokens[0..p]

    def chain(self, position: int) -> int:
        for p in range(len(self.chains), position + 1):
            self.chains.append(mix(self.chains[-1] if p else 0, self.tokens[p]))
        return self.chains[position]

    def logprobs(self, start: int, stop: int, num_top: int) -> list[TokenLogprobs]:
        return [token_logprobs(self.chain(p - 1), self.tokens[p], num_top) for p in range(start, stop)]

    def guess(self, num_tokens: int) -> list[int]:
        """Return the next tokens that it will sample."""
        chain, index = self.chain(len(self.tokens) - 1), len(self.tokens) - self.num_prompt_tokens
        guesses: list[int] = []
        for _ in range(num_tokens):
            guesses.append(sample_token(chain, self.params.seed, index + len(guesses)))
            chain = mix(chain, guesses[-1])
        return guesses


class _Span:
    """The tokens that a row computes in a step, and the running hash up to each of them."""

    def __init__(self, start: int, tokens: list[int], num_drafts: int, chain: int) -> None:
        self.start, self.num_drafts, self.tokens = start, num_drafts, list[int]()
        self.chains = [chain]
        for token in tokens:
            self.append(token)
        del self.chains[0]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.chains.append(mix(self.chains[-1], token))


class FakeModelRunner:
    """Executes SchedulerOutputs against ``num_blocks`` usable blocks (block 0 on top) of simulated KV.

    Keeps its own state from the deltas alone and never looks into the scheduler. Checks drafts like a model does: it
    computes them all, and keeps those that it would have sampled itself.
    """

    def __init__(self, *, num_blocks: int, block_size: int, is_overlapping: bool = False) -> None:
        self.block_size = block_size
        self.is_overlapping = is_overlapping
        self.rows: dict[str, _Row] = {}
        self.failing_ids: set[str] = set()
        self.num_executed_steps = 0
        self._preempted_ids: set[str] = set()
        self._kv = [[_GARBAGE] * block_size for _ in range(num_blocks + 1)]

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: apply the news, write all KV, read it all back, sample."""
        self._apply(output)
        _check_columns(output)
        drafts = output.scheduled_spec_decode_tokens
        spans = {
            request_id: self._lay_out(self.rows[request_id], count, drafts.get(request_id, []))
            for request_id, count in output.num_scheduled_tokens.items()
        }
        self.num_executed_steps += bool(spans)
        for request_id, span in spans.items():
            self._write(self.rows[request_id], span)
        errors: dict[str, str] = {}
        sampled: dict[str, list[int]] = {}
        for request_id, span in spans.items():
            self._read(request_id, span)
            sampled[request_id] = self._sample(request_id, span, errors)
        if not self.is_overlapping:  # else the next step may count on these blocks already
            for request_id in errors:
                self._spoil_step_of(request_id, spans[request_id])
        result = ModelRunnerOutput.of(output, sampled)
        result.errors = errors
        for request_id, token_ids in sampled.items():
            self._report(request_id, len(token_ids), result)
        return result

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks whose content nobody may rely on."""
        for block in block_ids:
            self._kv[block] = [_GARBAGE] * self.block_size

    def _apply(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
            self._preempted_ids.discard(request_id)
        for request_id in output.preempted_req_ids:
            if self.rows.pop(request_id, None) is not None:
                self._preempted_ids.add(request_id)
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self._enter(new)
        columns = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, start in columns:
            row = self.rows[request_id]
            row.block_ids += block_ids
            # The scheduler had not heard of the rejections of the steps in flight then, however many those were.
            unheard = accumulate(reversed(row.rejections), initial=0)
            assert start - row.num_computed in set(unheard), "scheduler and runner disagree on the position"

    def _enter(self, new: NewRequestData) -> None:
        assert new.request_id not in self.rows
        assert new.resumed == (new.request_id in self._preempted_ids)
        self._preempted_ids.discard(new.request_id)
        self.rows[new.request_id] = _Row(
            tokens=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            params=new.sampling_params,
            block_ids=list(new.block_ids),
            num_computed=new.num_computed_tokens,
            num_found=new.num_computed_tokens,
        )

    def _lay_out(self, row: _Row, count: int, drafts: list[int]) -> _Span:
        """Return the step's tokens of a row, drafts that were left to the runner filled in."""
        start, num_known = row.num_computed, count - len(drafts)
        tokens = row.tokens[start : start + num_known]
        assert len(tokens) == num_known, "the step computes tokens that nobody knows"
        span = _Span(start, tokens, len(drafts), row.chain(start - 1) if start else 0)
        index = len(row.tokens) - row.num_prompt_tokens
        for position, draft in enumerate(drafts):
            guess = sample_token(span.chains[-1], row.params.seed, index + position)
            if draft < 0:
                draft = guess if mix(span.chains[-1], position) % 4 else (guess + 1) % VOCAB_SIZE
            span.append(draft)
        return span

    def _write(self, row: _Row, span: _Span) -> None:
        for p, chain in enumerate(span.chains, start=span.start):
            block = row.block_ids[p // self.block_size]
            assert block != 0, "the null block holds no KV"
            self._kv[block][p % self.block_size] = chain

    def _read(self, request_id: str, span: _Span) -> None:
        row = self.rows[request_id]
        for p in range(span.start + len(span.tokens)):
            expected = span.chains[p - span.start] if p >= span.start else row.chain(p)
            stored = self._kv[row.block_ids[p // self.block_size]][p % self.block_size]
            assert stored == expected, f"{request_id} read wrong KV at position {p}"

    def _sample(self, request_id: str, span: _Span, errors: dict[str, str]) -> list[int]:
        row = self.rows[request_id]
        num_known = len(span.tokens) - span.num_drafts
        row.num_computed += num_known
        if request_id in self.failing_ids:
            self.failing_ids.discard(request_id)
            errors[request_id] = "The logits are not finite."
            row.tokens.append(0)  # a step that is scheduled already computes something there
            row.rejections.append(span.num_drafts)
            return []
        if row.num_computed < len(row.tokens):
            return []
        sampled: list[int] = []
        for chain, draft in zip(span.chains[num_known - 1 :], [*span.tokens[num_known:], None], strict=True):
            token = sample_token(chain, row.params.seed, len(row.tokens) - row.num_prompt_tokens)
            row.tokens.append(token)
            sampled.append(token)
            if token != draft:
                break
        row.num_computed += len(sampled) - 1
        row.rejections.append(span.num_drafts + 1 - len(sampled))
        return sampled

    def _report(self, request_id: str, num_sampled: int, result: ModelRunnerOutput) -> None:
        """Give the logprobs that a row asked for, of the tokens that it has just sampled and of its prompt."""
        row = self.rows[request_id]
        first = len(row.tokens) - num_sampled
        if num_sampled and row.params.num_logprobs is not None:
            result.logprobs[request_id] = row.logprobs(first, len(row.tokens), row.params.num_logprobs)
        if num_sampled and first == row.num_prompt_tokens and row.params.num_prompt_logprobs is not None:
            assert row.num_found == 0, f"{request_id}: who asks about the prompt must compute all of it"
            result.prompt_logprobs[request_id] = row.logprobs(1, first, row.params.num_prompt_logprobs)

    def _spoil_step_of(self, request_id: str, span: _Span) -> None:
        """Ruin what a failed request wrote in this step; rows that share a block have computed it rightly as well."""
        row = self.rows[request_id]
        shared = {block for other in self.rows.values() if other is not row for block in other.block_ids}
        written = row.block_ids[span.start // self.block_size :]
        self.spoil([block for block in written if block not in shared])


def _check_columns(output: SchedulerOutput) -> None:
    assert len(output.req_ids) == len(output.token_counts) == len(output.starts) == len(set(output.req_ids))
    assert output.total_num_scheduled_tokens == sum(output.token_counts)
    assert all(count > 0 for count in output.token_counts)
    entering = {new.request_id for new in output.scheduled_new_reqs}
    going_on = output.scheduled_cached_reqs.req_ids
    assert len(entering) == len(output.scheduled_new_reqs) and not entering & set(going_on)
    assert set(output.req_ids) == entering | set(going_on)
    assert set(output.new_block_ids) <= set(going_on)
    counts = output.num_scheduled_tokens
    for request_id, drafts in output.scheduled_spec_decode_tokens.items():
        assert 0 < len(drafts) < counts[request_id]
