from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from server.prompt_threads import PromptThreads

SHORT, LONG = 1_000, 1_000_000


@pytest.fixture
def threads() -> Iterator[PromptThreads]:
    made = PromptThreads()
    yield made
    made.close()


class Work:
    """Blocks its thread until the test lets it go; counts how many run at once."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.has_begun = threading.Semaphore(0)
        self.num_running = self.max_running = 0
        self._lock = threading.Lock()

    def block(self) -> str:
        with self._lock:
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
        self.has_begun.release()
        assert self.go_on.wait(10)
        with self._lock:
            self.num_running -= 1
        return "done"


async def begin(work: Work, num: int = 1) -> None:
    for _ in range(num):
        assert await asyncio.to_thread(work.has_begun.acquire, timeout=10)


async def test_what_no_generation_waits_for_holds_none_up(threads: PromptThreads) -> None:
    aside = Work()
    jobs = [asyncio.create_task(threads.run_aside(SHORT, aside.block)) for _ in range(50)]
    await begin(aside)
    assert await asyncio.wait_for(threads.run(SHORT, str.upper, "ab"), 10) == "AB"
    assert await asyncio.wait_for(threads.run(LONG, str.upper, "ab"), 10) == "AB"
    aside.go_on.set()
    assert set(await asyncio.gather(*jobs)) == {"done"}
    assert aside.max_running == 1


async def test_long_texts_hold_up_no_short_ones(threads: PromptThreads) -> None:
    work = Work()
    jobs = [asyncio.create_task(threads.run(LONG, work.block)) for _ in range(3)]
    await begin(work)
    assert await asyncio.wait_for(threads.run(SHORT, str.upper, "ab"), 10) == "AB"
    work.go_on.set()
    await asyncio.gather(*jobs)


async def test_no_two_long_texts_are_in_memory_at_once_whoever_sent_them(threads: PromptThreads) -> None:
    work = Work()
    jobs = [asyncio.create_task(threads.run(LONG, work.block)) for _ in range(2)]
    jobs += [asyncio.create_task(threads.run_aside(LONG, work.block)) for _ in range(2)]
    await begin(work)
    work.go_on.set()
    await asyncio.gather(*jobs)
    assert work.max_running == 1


async def test_the_end_is_told_of_work_that_goes_on_and_not_of_work_that_waits(threads: PromptThreads) -> None:
    work = Work()
    jobs = [asyncio.create_task(threads.run_aside(LONG, work.block)) for _ in range(2)]
    await begin(work)
    for job in jobs:
        job.cancel()
    await asyncio.wait(jobs)
    threads.close()
    told = [threads.is_working]  # nobody waits for it any more, and no thread can be told so
    work.go_on.set()
    await asyncio.to_thread(threads._aside.shutdown)
    told.append(threads.is_working)
    assert told == [True, False] and work.max_running == 1
