"""A model runner that owns simulated KV memory and notices every wrong read.

Each slot holds a running hash of all tokens up to its position, so KV of the wrong request, the wrong position, a
block reused too early or never written shows up as a difference, not as an odd text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_core.messages import FinishReason
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
        if token in ends:
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
    chains: list[int] = field(default_factory=list)  # chains[p]: hash of tokens[0..p]

    def chain(self, position: int) -> int:
        for p in range(len(self.chains), position + 1):
            self.chains.append(mix(self.chains[-1] if p else 0, self.tokens[p]))
        return self.chains[position]


class FakeModelRunner:
    """Executes SchedulerOutputs against ``num_blocks`` usable blocks (block 0 on top) of simulated KV.

    Keeps its own state from the deltas alone and never looks into the scheduler.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[str, _Row] = {}
        self.failing_ids: set[str] = set()
        self.num_executed_steps = 0
        self._preempted_ids: set[str] = set()
        self._kv = [[_GARBAGE] * block_size for _ in range(num_blocks + 1)]

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: apply the news, write all KV, read it all back, sample."""
        self._apply(output)
        counts = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(counts.values())
        assert all(count > 0 for count in counts.values())
        entering = {new.request_id for new in output.scheduled_new_reqs}
        going_on = output.scheduled_cached_reqs.req_ids
        assert len(entering) == len(output.scheduled_new_reqs) and not entering & set(going_on)
        assert set(counts) == entering | set(going_on)
        self.num_executed_steps += bool(counts)
        for request_id, count in counts.items():
            self._write(self.rows[request_id], count)
        result = ModelRunnerOutput()
        for request_id, count in counts.items():
            self._read_and_sample(request_id, count, result)
        for request_id in result.errors:
            self._spoil_step_of(request_id, counts[request_id])
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
            del self.rows[request_id]
            self._preempted_ids.add(request_id)
        for new in output.scheduled_new_reqs:
            self._enter(new)
        cached = output.scheduled_cached_reqs
        columns = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_computed in columns:
            row = self.rows[request_id]
            row.block_ids += block_ids
            assert num_computed == row.num_computed, "the scheduler and the runner disagree on the position"

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
        )

    def _write(self, row: _Row, count: int) -> None:
        for p in range(row.num_computed, row.num_computed + count):
            block = row.block_ids[p // self.block_size]
            assert block != 0, "the null block holds no KV"
            self._kv[block][p % self.block_size] = row.chain(p)

    def _read_and_sample(self, request_id: str, count: int, result: ModelRunnerOutput) -> None:
        row = self.rows[request_id]
        row.num_computed += count
        for p in range(row.num_computed):
            stored = self._kv[row.block_ids[p // self.block_size]][p % self.block_size]
            assert stored == row.chain(p), f"{request_id} read wrong KV at position {p}"
        if request_id in self.failing_ids:
            self.failing_ids.discard(request_id)
            result.errors[request_id] = "the logits are not finite"
        elif row.num_computed == len(row.tokens):
            output_index = len(row.tokens) - row.num_prompt_tokens
            token = sample_token(row.chain(row.num_computed - 1), row.params.seed, output_index)
            row.tokens.append(token)
            result.sampled_token_ids[request_id] = [token]

    def _spoil_step_of(self, request_id: str, count: int) -> None:
        """Ruin what a failed request wrote in this step; rows that share a block have computed it rightly as well."""
        row = self.rows[request_id]
        shared = {block for other in self.rows.values() if other is not row for block in other.block_ids}
        written = row.block_ids[(row.num_computed - count) // self.block_size :]
        self.spoil([block for block in written if block not in shared])
