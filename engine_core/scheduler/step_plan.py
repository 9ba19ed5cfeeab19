"""StepPlan: the scratch pad of one schedule() call. Born inside it, kept until the next; decides nothing.

What outlives it: the SchedulerOutput for the runner, and the ScheduledStep by which the result finds its requests.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.output import NewRequestData, SchedulerOutput


@dataclass(slots=True)
class ScheduledRow:
    """A row of a step that is more than one plain decode.

    Attributes:
        request: Whose.
        start: Position of its first token.
        num_tokens: Tokens to compute, drafts included.
        num_drafts: Of those, drafts.
        is_sampling: Whether the row reaches the last token known or being sampled, so that the step samples for it.
    """

    request: Request
    start: int
    num_tokens: int
    num_drafts: int
    is_sampling: bool

    @property
    def is_decode(self) -> bool:
        """Whether, drafts apart, it computes its last output and nothing else. All other rows are prompts, or what a
        preemption threw away."""
        num_known = self.num_tokens - self.num_drafts
        return num_known == 1 and self.is_sampling and self.start >= self.request.num_prompt_tokens


@dataclass(slots=True)
class ScheduledStep:
    """The requests of a step in flight, in the order of its output's columns: ``decodes``, then ``rows``."""

    step_id: int
    decodes: list[Request]
    rows: list[ScheduledRow]

    def __contains__(self, request: object) -> bool:
        return any(mine is request for mine in self.requests())

    def requests(self) -> Iterator[Request]:
        """Yield each row's request."""
        yield from self.decodes
        for row in self.rows:
            yield row.request

    def drop(self, request_ids: Container[str], nobody: Request) -> None:
        """Let what the step brings for the requests with these ids go to ``nobody``."""
        self.decodes = [nobody if request.request_id in request_ids else request for request in self.decodes]
        for row in self.rows:
            if row.request.request_id in request_ids:
                row.request = nobody


@dataclass(frozen=True, slots=True)
class Refusal:
    """A constraint left a request without tokens.

    Attributes:
        constraint: Its class's name.
        is_passed_by: The next in the queue was looked at all the same.
    """

    constraint: str
    is_passed_by: bool


@dataclass(slots=True)
class StepPlan:
    """What the step under construction holds so far.

    Attributes:
        now: Seconds on the engine's clock.
        token_budget: Tokens that may still be scheduled.
        in_flight: Steps whose results have not been applied.
        decodes: Requests that get the one token that their last sample asks for.
        decode_starts: Its position, for each of them.
        rows: All others, in schedule order.
        preempted: Requests that lost their blocks in this step.
        num_prompt_tokens: Scheduled tokens that are prompts, or what a preemption threw away.
        refusals: What constraints said no to, by request id; for whoever asks why.
    """

    now: float
    token_budget: int
    in_flight: Sequence[ScheduledStep] = ()
    decodes: list[Request] = field(default_factory=list)
    decode_starts: list[int] = field(default_factory=list)
    rows: list[ScheduledRow] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_prompt_tokens: int = 0
    refusals: dict[str, Refusal] = field(default_factory=dict)
    _new_reqs: list[NewRequestData] = field(default_factory=list)
    _new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    _drafts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nobody has got a token yet."""
        return not (self.decodes or self.rows)

    @property
    def num_rows(self) -> int:
        """Requests that have got tokens."""
        return len(self.decodes) + len(self.rows)

    def add_row(self, row: ScheduledRow) -> None:
        """Record a row and charge its tokens."""
        self.rows.append(row)
        self.token_budget -= row.num_tokens
        request = row.request
        if row.num_drafts:
            self._drafts[request.request_id] = request.draft_token_ids[: row.num_drafts]
        if not row.is_decode:
            self.num_prompt_tokens += row.num_tokens - row.num_drafts

    def add_blocks(self, request: Request, block_ids: list[int]) -> None:
        """Record that the table of a request that the runner knows has grown."""
        self._new_block_ids[request.request_id] = block_ids

    def add_entering(self, request: Request, num_cached_tokens: int) -> None:
        """Record a request that enters, or re-enters, with all its state; its status still tells which."""
        is_resumed = request.status is RequestStatus.PREEMPTED
        self._new_reqs.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=request.all_token_ids.copy() if is_resumed else request.prompt_token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                block_ids=request.block_ids.copy(),
                num_computed_tokens=num_cached_tokens,
                resumed=is_resumed,
            )
        )

    def build_output(self, step_id: int, finished_req_ids: list[str], preempted_req_ids: list[str]) -> SchedulerOutput:
        """Pack the plan into what the model runner gets."""
        num_decodes = len(self.decodes)
        counts = [row.num_tokens for row in self.rows]
        return SchedulerOutput(
            step_id=step_id,
            req_ids=[request.request_id for request in self.decodes] + [row.request.request_id for row in self.rows],
            token_counts=[1] * num_decodes + counts,
            starts=self.decode_starts + [row.start for row in self.rows],
            new_block_ids=self._new_block_ids,
            scheduled_new_reqs=self._new_reqs,
            scheduled_spec_decode_tokens=self._drafts,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=preempted_req_ids + [request.request_id for request in self.preempted],
            num_prompt_tokens=self.num_prompt_tokens,
            total_num_scheduled_tokens=num_decodes + sum(counts),
        )

    def build_step(self, step_id: int) -> ScheduledStep:
        """Keep what the result will be applied to."""
        return ScheduledStep(step_id, self.decodes, self.rows)
