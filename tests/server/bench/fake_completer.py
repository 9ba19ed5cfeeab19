"""What a load is sent to when there is no server."""

from __future__ import annotations

import asyncio
import itertools

from server.bench.results import RequestResult


class FakeCompleter:
    """Answers after a few turns of the event loop; each look at its clock moves it."""

    def __init__(self, step_s: float = 1.0) -> None:
        self.prompts: list[str] = []
        self.starts: list[float | None] = []
        self.num_running = self.most_running = 0
        self._times = itertools.count(0.0, step_s)

    def clock(self) -> float:
        return next(self._times)

    async def complete(self, prompt: str, max_tokens: int, start_s: float | None = None) -> RequestResult:
        self.prompts.append(prompt)
        self.starts.append(start_s)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(8):
            await asyncio.sleep(0)
        self.num_running -= 1
        now_s = self.clock()
        return RequestResult(start_s=now_s, token_times=[now_s], end_s=now_s, num_output_tokens=max_tokens)
