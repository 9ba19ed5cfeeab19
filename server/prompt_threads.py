"""Where text is rendered and tokenised, so that neither ever holds up the event loop. Knows nothing of the work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

_NUM_THREADS = 4
# Longer texts have one thread for all of them: tokenising 16 MB takes seconds and 3 GB, and nobody should wait behind
# it, nor should four of them run at once.
_LONG_TEXT_CHARS = 256 * 1024

P = ParamSpec("P")
T = TypeVar("T")


class PromptThreads:
    """Runs text work beside the event loop.

    What no generation waits for has one thread of its own: to count the tokens of 250,000 characters takes a fifth of a
    second, and one client could send so many such texts at once that every prompt waited for minutes. Of texts that are
    longer, one is worked on at a time, whoever sent it.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="prompts-long")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="prompts-aside")
        self._long_turn = threading.Lock()
        self._in_hand: set[Future[Any]] = set()

    @property
    def is_working(self) -> bool:
        """Whether a thread works on a text; it cannot be told to leave it, and the interpreter's end waits for it."""
        return any(each.running() for each in list(self._in_hand))

    def close(self) -> None:
        """Let the threads go; work in hand is finished first, work that waits is dropped."""
        for executor in (self._short, self._long, self._aside):
            executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``work`` on a thread and return what it returns.

        Args:
            num_chars: How much text it reads.
            work: What to call.
            args: With these.
            kwargs: And these.
        """
        executor = self._long if num_chars > _LONG_TEXT_CHARS else self._short
        return await self._run_on(executor, num_chars, lambda: work(*args, **kwargs))

    async def run_aside(self, num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do as ``run`` does, for what no generation waits for: of long texts one at a time, else none is held up."""
        return await self._run_on(self._aside, num_chars, lambda: work(*args, **kwargs))

    async def _run_on(self, executor: ThreadPoolExecutor, num_chars: int, call: Callable[[], T]) -> T:
        def take_turn() -> T:
            with self._long_turn:
                return call()

        is_long = num_chars > _LONG_TEXT_CHARS
        future = executor.submit(take_turn if is_long else call)
        self._in_hand.add(future)
        future.add_done_callback(self._in_hand.discard)
        return await asyncio.wrap_future(future)
