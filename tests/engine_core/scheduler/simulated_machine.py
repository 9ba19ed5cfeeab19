"""A machine that computes nothing and only takes its time: what a scheduler does to the gaps of running streams.

Its clock is its own: minutes of steps run in a second, and every run is the same.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from engine_core.messages import EngineCoreRequest
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler
from tests.engine_core.scheduler.scheduler_helpers import create_request, create_scheduler


@dataclass
class Machine:
    """How long a step takes. The defaults are about SmolLM2-135M on two CPU cores.

    Attributes:
        step_s: Every step, whatever it holds.
        weights_s: To read the weights; with many tokens, computing them takes longer and hides it.
        token_s: To compute one token's matrix products.
        pair_s: For one token to look back on one other.
        noise: Standard deviation of a step's time, as a share of it.
        hiccup_every: One step in so many, by chance, takes ten times as long; 0 = none.
        slowness: Factor on a step's time, given when it starts.
    """

    step_s: float = 0.0
    weights_s: float = 0.008
    token_s: float = 2e-4
    pair_s: float = 1.2e-7
    noise: float = 0.05
    hiccup_every: int = 0
    slowness: Callable[[float], float] = lambda now: 1.0
    _rng: random.Random = field(default_factory=lambda: random.Random(1), repr=False)

    def time_step(self, output: SchedulerOutput, now: float) -> float:
        """Return seconds."""
        pairs = sum(n * (s + n / 2.0) for s, n in zip(output.starts, output.token_counts, strict=True))
        tokens_s = output.total_num_scheduled_tokens * self.token_s
        ideal = self.step_s + max(self.weights_s, tokens_s) + pairs * self.pair_s
        noisy = ideal * self.slowness(now) * max(0.5, self._rng.gauss(1.0, self.noise))
        return noisy * 10.0 if self.hiccup_every and self._rng.random() < 1.0 / self.hiccup_every else noisy


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was scheduled."""

    now: float
    num_prompt_tokens: int


class Simulation:
    """The engine's loop on a simulated machine; with two steps in flight the loop runs ahead of it as EngineCore does.

    Attributes:
        now: Seconds.
        steps: Every step with work in it.
        token_times: When each request's tokens were heard of.
    """

    def __init__(self, scheduler: Scheduler, machine: Machine, *, host_s: float = 3e-4) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.steps: list[Step] = []
        self.token_times: dict[str, list[float]] = defaultdict(list)
        self._machine = machine
        self._host_s = host_s
        self._machine_free_at = 0.0
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, float]] = deque()
        self._num_prompts = 0

    def add(self, request: EngineCoreRequest) -> None:
        """Add a request."""
        self.scheduler.add_request(request)

    def add_streams(self, num_streams: int, *, prompt: int = 64, name: str = "stream") -> None:
        """Add requests that go on for as long as anybody looks."""
        for number in range(num_streams):
            self.add(create_request(f"{name}{number}", prompt, 100_000))

    def step(self) -> Step:
        """Schedule a step, and hear of the oldest one unless another may run ahead."""
        output = self.scheduler.schedule(self.now)
        step = Step(self.now, output.num_prompt_tokens)
        self.now += self._host_s / 2.0
        if output.has_news:
            self._submit(output)
        if output.req_ids:
            self.steps.append(step)
            if len(self._in_flight) < self.scheduler.max_steps_in_flight:
                return step
        if self._in_flight:
            self._hear()
        return step

    def run(self, num_steps: int, *, prompt: int = 0, max_tokens: int = 8) -> list[Step]:
        """Step; with ``prompt``, two requests of that many tokens wait at any time."""
        for _ in range(num_steps):
            while prompt and len(self.scheduler.waiting) < 2:
                self._num_prompts += 1
                self.add(create_request(f"prompt{self._num_prompts}", prompt, max_tokens))
            self.step()
        return self.steps[-num_steps:]

    def gaps(self, since: float = 0.0, *, name: str = "stream") -> list[float]:
        """Return the gaps between tokens that end after ``since``, of the requests whose id starts so."""
        times = [times for request_id, times in self.token_times.items() if request_id.startswith(name)]
        return [after - before for each in times for before, after in pairwise(each) if after > since]

    def p99_gap_s(self, since: float = 0.0) -> float:
        """Return the streams' gap that one in a hundred exceeds."""
        return statistics.quantiles(self.gaps(since), n=100)[-1]

    def prompt_tokens_per_s(self, since: float) -> float:
        """Return how fast prompts have been computed since then."""
        return sum(step.num_prompt_tokens for step in self.steps if step.now >= since) / (self.now - since)

    def _submit(self, output: SchedulerOutput) -> None:
        requests = self.scheduler.requests
        is_due = [requests[id_].num_computed_tokens >= requests[id_].num_tokens for id_ in output.req_ids]
        result = ModelRunnerOutput([7 if due else -1 for due in is_due])
        started = max(self.now, self._machine_free_at)
        if output.req_ids:
            result.execute_time_s = self._machine.time_step(output, started)
        self._machine_free_at = started + result.execute_time_s
        self._in_flight.append((output, result, self._machine_free_at))

    def _hear(self) -> None:
        output, result, ended = self._in_flight.popleft()
        self.now = max(self.now, ended) + self._host_s / 2.0
        for news in self.scheduler.update_from_output(output, result).as_records():
            self.token_times[news.request_id] += [self.now] * len(news.new_token_ids)


def create_simulation(
    machine: Machine | None = None, *, target_s: float = 0.0, host_s: float = 3e-4, **overrides: object
) -> Simulation:
    """Return a simulation with the server's budgets on a CPU and KV for everybody."""
    scheduler = create_scheduler(
        **{
            "num_blocks": 50_000,
            "block_size": 64,
            "max_model_len": 200_000,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": False,
            "target_itl_ms": target_s * 1e3,
            **overrides,
        }  # type: ignore[arg-type]
    )
    return Simulation(scheduler, machine or Machine(), host_s=host_s)
