from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from server.exit_codes import ExitCode
from server.lifecycle.watchdog import StallClock, Watchdog, WatchdogHooks


@dataclass
class World:
    """An engine, a loop and a process that do what a test says, on a clock that it moves."""

    now: float = 100.0
    engine_moved: float | None = None  # when it last did; None = it rests
    is_loop_alive: bool = True
    heard: list[str] = field(default_factory=list)

    def create(self, timeout_s: float) -> Watchdog:
        hooks = WatchdogHooks(
            read_engine_age=lambda: 0.0 if self.engine_moved is None else self.now - self.engine_moved,
            post=self._post,
            on_fine=lambda: self.heard.append("fine"),
            on_near_miss=lambda: self.heard.append("near miss"),
            on_stuck=self.heard.append,
            dump_stacks=lambda: self.heard.append("stacks"),
            end_process=lambda code: self.heard.append(f"exit {code}"),
        )
        return Watchdog(timeout_s, hooks, lambda: self.now)

    def _post(self, callback: Callable[[], None]) -> None:
        if self.is_loop_alive:
            callback()

    def look(self, watchdog: Watchdog, seconds: float) -> bool:
        """Look twice a second for so long; return whether the deadline passed."""
        has_passed = False
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            has_passed = watchdog.look() or has_passed
        return has_passed

    def take_heard(self) -> list[str]:
        heard, self.heard = [what for what in self.heard if what != "fine"], []
        return heard


def test_an_engine_that_rests_or_moves_is_never_stuck() -> None:
    world = World()
    watchdog = world.create(10)
    assert not world.look(watchdog, 100)
    for _ in range(20):
        world.engine_moved = world.now
        assert not world.look(watchdog, 4)
    assert world.take_heard() == []


def test_half_of_the_deadline_is_a_near_miss_told_once_and_all_of_it_the_end() -> None:
    world = World()
    watchdog = world.create(10)
    world.engine_moved = world.now
    assert not world.look(watchdog, 4.5)
    assert world.take_heard() == []
    assert not world.look(watchdog, 5)
    assert world.take_heard() == ["stacks", "near miss"]
    assert world.look(watchdog, 0.5)


def test_after_a_near_miss_that_passed_another_one_is_told_again() -> None:
    world = World()
    watchdog = world.create(10)
    for _ in range(2):
        world.engine_moved = world.now
        assert not world.look(watchdog, 6)
        world.engine_moved = None
        assert not world.look(watchdog, 1)
    assert world.take_heard() == ["stacks", "near miss"] * 2


def test_a_loop_that_does_not_answer_is_as_bad() -> None:
    world = World()
    watchdog = world.create(10)
    world.look(watchdog, 1)
    world.is_loop_alive = False
    assert not world.look(watchdog, 9.5)
    assert world.take_heard() == ["stacks"], "and nobody there to count it"
    assert world.look(watchdog, 1)


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    world = World()
    watchdog = world.create(10)
    world.engine_moved = world.now
    world.look(watchdog, 2)
    world.now += 3600  # SIGSTOP, SIGCONT: this thread is the first to run again
    assert not watchdog.look()
    world.engine_moved = world.now
    assert not world.look(watchdog, 4)
    assert world.take_heard() == []


def test_the_service_manager_is_fed_only_while_all_is_well() -> None:
    world = World()
    watchdog = world.create(0)
    world.look(watchdog, 2)
    assert world.heard == ["fine"] * 4
    world.engine_moved = world.now
    assert not world.look(watchdog, 1000)
    assert world.heard == ["fine"] * 7, "less than 2 s old is well; and without a deadline that is all"


@pytest.mark.parametrize(
    ("looks", "stalled_s"),
    [
        ([(0.0, 0.5), (0.0, 0.5)], 0.0),
        ([(0.3, 0.5)], 0.3),
        ([(0.3, 0.5), (0.8, 0.5), (1.3, 0.5)], 1.3),
        ([(0.3, 0.5), (0.8, 0.5), (0.1, 0.5)], 0.1),
        ([(0.3, 0.5), (60.3, 60.0)], 1.3),
        ([(59.0, 60.0)], 1.0),
    ],
)
def test_a_stall_is_as_long_as_somebody_looked(looks: list[tuple[float, float]], stalled_s: float) -> None:
    clock = StallClock(1.0)
    for age_s, gap_s in looks:
        clock.look(age_s, gap_s)
    assert clock.stalled_s == pytest.approx(stalled_s)


class ThreadWorld:
    """A real thread over a real loop, and an engine that never moves again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("server.lifecycle.watchdog.GRACE_S", 0.05)
        self.exits: list[int] = []
        self.has_ended = threading.Event()
        self.sentences: list[str] = []
        self.is_stuck = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.watchdog = Watchdog(
            0.2,
            WatchdogHooks(
                read_engine_age=lambda: 1e9,
                post=self._loop.call_soon_threadsafe,
                on_fine=lambda: None,
                on_near_miss=lambda: None,
                on_stuck=self._take_stuck,
                dump_stacks=lambda: None,
                end_process=self._end,
            ),
        )

    def _take_stuck(self, sentence: str) -> None:
        self.sentences.append(sentence)
        self.is_stuck.set()

    def _end(self, code: int) -> None:
        self.exits.append(code)
        self.has_ended.set()


async def test_the_owner_is_told_and_may_end_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ThreadWorld(monkeypatch)
    world.watchdog.start()
    async with asyncio.timeout(5):
        await world.is_stuck.wait()
    world.watchdog.stop()
    await asyncio.to_thread(world.watchdog._thread.join, 5)
    (sentence,) = world.sentences
    assert re.fullmatch(r"A step of the engine has not come to an end for 0\.[1-9] s\.", sentence), sentence
    assert world.exits == []


async def test_an_owner_that_does_not_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ThreadWorld(monkeypatch)
    world.watchdog.start()
    # The loop stands still here.
    assert world.has_ended.wait(5)
    assert world.exits == [ExitCode.STUCK]
    assert world.sentences == []
