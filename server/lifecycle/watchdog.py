"""The watchdog: a thread of its own that ends the process when the engine or the event loop stands still for too long.

It needs neither of the two to do so. Knows no HTTP; who tells the clients is its owner, as long as the loop still runs.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from server.engine_client import MAX_HEARTBEAT_AGE_S
from server.exit_codes import ExitCode

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_LOOKS_A_DEADLINE = 10
# So long does the owner have to tell the clients, before the process ends in any case.
GRACE_S = 5.0


class StallClock:
    """How long something has stood still, not counting time in which nothing in this process could move.

    Args:
        max_gap_s: Whoever looks later than this was kept from the processor itself, as all else was: no more counts.

    Attributes:
        stalled_s: Seconds; 0 while it moves.
    """

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self.stalled_s = 0.0

    def look(self, age_s: float, gap_s: float) -> None:
        """Take note.

        Args:
            age_s: Seconds since it last moved; 0 = it rests.
            gap_s: Seconds since the last look.
        """
        before_s = self.stalled_s if age_s > gap_s else 0.0
        self.stalled_s = before_s + min(age_s, gap_s, self._max_gap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogHooks:
    """What a watchdog calls.

    Attributes:
        read_engine_age: Seconds since the engine last moved, 0 where it need not. On the watchdog's thread, like those
            that do not say otherwise.
        post: Has a callback called on the event loop's thread; raises RuntimeError when the loop is closed.
        on_fine: At each look that finds all well.
        on_near_miss: On the loop's thread, when half of the deadline has passed.
        on_stuck: On the loop's thread, with a sentence, when all of it has. The process ends soon after.
        dump_stacks: Shows what every thread is doing.
        end_process: At once.
    """

    read_engine_age: Callable[[], float]
    post: Callable[[Callable[[], None]], object]
    on_fine: Callable[[], None]
    on_near_miss: Callable[[], None]
    on_stuck: Callable[[str], None]
    dump_stacks: Callable[[], None]
    end_process: Callable[[int], object] = os._exit


class Watchdog:
    """Looks at the engine and at the event loop twice a second, or ten times a deadline.

    Args:
        timeout_s: The deadline; 0 = there is none, and only ``on_fine`` is called.
        hooks: What it calls.
        clock: Seconds, monotonic.
    """

    def __init__(self, timeout_s: float, hooks: WatchdogHooks, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._hooks = hooks
        self._clock = clock
        self._look_s = min(_LOOK_S, timeout_s / _LOOKS_A_DEADLINE) if timeout_s else _LOOK_S
        self._engine, self._loop = StallClock(2 * self._look_s), StallClock(2 * self._look_s)
        self._last_look = self._asked_at = clock()
        self._is_answered = True
        self._has_warned = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start looking; call while the loop runs."""
        self._last_look = self._clock()
        self._thread.start()

    def stop(self) -> None:
        """Look no more, and let the process live."""
        self._stopped.set()

    def look(self) -> bool:
        """Look once; return whether the deadline has passed."""
        now = self._clock()
        gap_s, self._last_look = now - self._last_look, now
        self._engine.look(self._hooks.read_engine_age(), gap_s)
        self._loop.look(0.0 if self._is_answered else now - self._asked_at, gap_s)
        stalled_s = max(self._engine.stalled_s, self._loop.stalled_s)
        if self._is_answered:
            self._ask_loop(now)
        if stalled_s < MAX_HEARTBEAT_AGE_S:
            self._hooks.on_fine()
        if not self._timeout_s or stalled_s < self._timeout_s / 2:
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            self._warn()
        return 0 < self._timeout_s <= stalled_s

    def _ask_loop(self, now: float) -> None:
        self._asked_at, self._is_answered = now, False
        self._post(self._take_answer)

    def _take_answer(self) -> None:
        self._is_answered = True

    def _warn(self) -> None:
        logger.error("%s The process ends after %g s of that. What each thread does:", self._say(), self._timeout_s)
        self._hooks.dump_stacks()
        self._post(self._hooks.on_near_miss)

    def _say(self) -> str:
        if self._engine.stalled_s >= self._loop.stalled_s:
            return f"A step of the engine has not come to an end for {_format(self._engine.stalled_s)}."
        return f"The server's event loop has not moved for {_format(self._loop.stalled_s)}."

    def _post(self, callback: Callable[[], None]) -> None:
        try:
            self._hooks.post(callback)
        except RuntimeError:
            self.stop()  # the loop is closed: the process is on its way out

    def _run(self) -> None:
        while not self._stopped.wait(self._look_s):
            if self.look():
                self._end()
                return

    def _end(self) -> None:
        sentence = self._say()
        logger.critical("%s The process ends with exit code %d.", sentence, ExitCode.STUCK)
        self._hooks.dump_stacks()
        self._post(lambda: self._hooks.on_stuck(sentence))
        if not self._stopped.wait(GRACE_S):
            self._hooks.end_process(ExitCode.STUCK)


def _format(duration_s: float) -> str:
    return f"{duration_s:.0f} s" if duration_s >= 10 else f"{duration_s:.1f} s"


def dump_stacks() -> None:
    """Write to standard error what each thread of this process does, even if none lets go of the interpreter."""
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
