"""Target gap: prompts get as much of a step as lets the running streams have their next token in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine_core.request import Request
from engine_core.scheduler.constraint import Constraint
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.step_cost import StepCost, StepLoad
from engine_core.scheduler.step_plan import StepPlan

# Prompts always get on, however small the target: one tile of rows, which costs a kernel as much as one row.
MIN_CHUNK_TOKENS = 16
# A step holds at most so many times the prompt tokens of the largest one measured: little is known beyond.
_MAX_GROWTH = 2.0
# The share of gaps that shall end in time, and how far one step moves the margin that this takes.
_SHARE_IN_TIME, _MARGIN_STEP = 0.95, 0.02
_FIRST_MARGIN, _MAX_MARGIN = 0.05, 0.25


class TargetItl(Constraint):
    """While streams run, caps a step's prompt tokens so that the step ends within the target in 19 of 20 cases.

    A stream is a request that gets an output token every step. One that computes its prompt, or what a preemption threw
    away, is none: it is what is capped. Where no stream runs, nobody waits for a next token, and nothing is capped.
    Where the streams alone take longer than the target, prompts still get MIN_CHUNK_TOKENS a step.

    Learns from every step: how long it executed, and from one begin_step() to the next, which is what the clients see.

    Args:
        target_s: Above 0.
    """

    touches_decode = False

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._cost = StepCost()
        self._margin = _FIRST_MARGIN
        self._most_tokens, self._most_took_s = 0, 0.0
        self._in_flight: deque[StepLoad] = deque()
        self._ended: list[tuple[StepLoad, float]] = []
        # Of the step under construction.
        self._plan = StepPlan(0.0, 0)
        self._running: Sequence[Request] = ()
        self._streams: tuple[int, int] | None = None
        self._load = StepLoad()
        self._num_prompts = 0
        self._sum_prompt_starts = 0

    def begin_step(self, plan: StepPlan, running: Sequence[Request]) -> None:
        """Learn from what has ended since the last step began."""
        # With requests running all along the engine has not rested in between.
        gap_s = plan.now - self._plan.now if running and len(self._ended) == 1 else 0.0
        for load, execute_time_s in self._ended:
            self._learn(load, max(execute_time_s, gap_s))
        self._ended.clear()
        self._plan, self._running, self._streams = plan, running, None
        self._load, self._num_prompts, self._sum_prompt_starts = StepLoad(), 0, 0

    def cap(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> int:
        """Cut a prompt to what is left of the step; streams get what they ask for."""
        if _is_decoding(request, num_computed_tokens):
            return num_new_tokens
        if self._streams is None:  # counted only where a prompt asks: no prompt has been scheduled before it
            starts = [r.num_computed_tokens for r in self._running if _is_decoding(r, r.num_computed_tokens)]
            self._streams = len(starts), sum(starts)
        if not self._streams[0]:
            return num_new_tokens
        taken = self._load.num_prompt_tokens if plan is self._plan else self._count_running_prompt_tokens()
        load = StepLoad(*self._streams, taken, self._load.num_prompt_pairs)
        aim_s = self._target_s / (1.0 + self._margin)
        fitting = self._cost.count_prompt_tokens(load, num_computed_tokens, aim_s)
        fitting = min(fitting, self._count_familiar_tokens(aim_s) - taken)
        return int(min(num_new_tokens, max(fitting, MIN_CHUNK_TOKENS - taken, 0)))

    def _count_familiar_tokens(self, aim_s: float) -> float:
        """Return how many prompt tokens a step may hold without leaving what is known too far behind: as many as have
        been measured, or more where they would fit even if all the time went into them."""
        if not self._most_tokens:
            return 0.0
        return self._most_tokens * min(_MAX_GROWTH, max(1.0, aim_s / self._most_took_s))

    def _count_running_prompt_tokens(self) -> int:
        """Return what the running prompts, less the last, still lack. Another plan than the step's asks what would be
        left for a waiting request if the last one made way for it."""
        left = (r.num_tokens_with_spec - r.num_computed_tokens for r in self._running[:-1])
        return sum(num_tokens for num_tokens in left if num_tokens > 1)

    def commit(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> None:
        """Charge a prompt."""
        if plan.rows[-1].is_decode:
            return
        self._load.num_prompt_tokens += num_new_tokens
        self._load.num_prompt_pairs += num_new_tokens * (num_computed_tokens + num_new_tokens / 2.0)
        self._num_prompts += 1
        self._sum_prompt_starts += num_computed_tokens

    def annotate(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """Keep what the step holds until its time is known."""
        if plan.is_empty:
            return
        self._load.num_decodes = plan.num_rows - self._num_prompts
        self._load.num_decode_pairs = sum(output.starts) - self._sum_prompt_starts
        self._in_flight.append(self._load)

    def end_step(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Note how long it executed; how long it took in all is known when the next step begins."""
        self._ended.append((self._in_flight.popleft(), result.execute_time_s))

    def _learn(self, load: StepLoad, seconds: float) -> None:
        if seconds <= 0.0:  # nobody measured
            return
        lateness = self._cost.learn(load, seconds)
        if load.num_prompt_tokens >= self._most_tokens:
            self._most_tokens, self._most_took_s = load.num_prompt_tokens, seconds
        if load.num_decodes and load.num_prompt_tokens:
            # Late steps push up, others let it sink: at rest where the share of late ones is the one wanted.
            push = (lateness > self._margin) - (1.0 - _SHARE_IN_TIME)
            self._margin = min(max(0.0, self._margin + _MARGIN_STEP * push), _MAX_MARGIN)


def _is_decoding(request: Request, start: int) -> bool:
    """Tell whether, drafts apart, its last output is all that it has left to compute."""
    num_known = request.num_tokens_with_spec - len(request.draft_token_ids)
    return start >= request.num_prompt_tokens and num_known - start <= 1
