"""Files that are read again while the server runs: when they change, and on SIGHUP. Knows not what is in them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from engine_core import ConfigError

logger = logging.getLogger(__name__)

_INTERVAL_S = 5.0

_Stamp = tuple[int, int, int, bool] | None


@dataclass(slots=True)
class WatchedFiles:
    """Files that are read together. Make it before they are read for the first time, so that no change is missed.

    Attributes:
        what: What they are, for the log.
        paths: Links are followed: Kubernetes changes a mounted secret by pointing a link elsewhere.
        load: Reads them and puts them to use. Raises ConfigError and changes nothing where they are wrong.
    """

    what: str
    paths: tuple[Path, ...]
    load: Callable[[], None]
    _stamps: list[_Stamp] = field(init=False)

    def __post_init__(self) -> None:
        self._stamps = self._look()

    def take_change(self) -> bool:
        """Return whether one of them is another file, or has other content, than when this was last asked."""
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def check_regular(self) -> None:
        """Check that each is a regular file, or is not there, as of when this was last asked for a change.

        A pipe keeps whoever opens it until somebody writes, and that would be the event loop. At the start it may be
        one: a shell's <(...).

        Raises:
            ConfigError: One is something else.
        """
        for path, stamp in zip(self.paths, self._stamps, strict=True):
            if stamp is not None and not stamp[-1]:
                raise ConfigError(f"{path} is no regular file; put one there")

    def _look(self) -> list[_Stamp]:
        return [_stamp(path) for path in self.paths]


def _stamp(path: Path) -> _Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, stat.S_ISREG(status.st_mode)


class FileWatch:
    """Reads files again.

    Args:
        files: Which.
        interval_s: How often they are looked at.
    """

    def __init__(self, files: Sequence[WatchedFiles], interval_s: float = _INTERVAL_S) -> None:
        self._files = files
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running loop; without files there is nothing to begin, and SIGHUP keeps its usual meaning."""
        if not self._files:
            return
        self._schedule()
        # Elsewhere than on the main thread there are no signals; the files are still looked at.
        with contextlib.suppress(ValueError, RuntimeError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload_all)

    def stop(self) -> None:
        """End; does nothing where it never began."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        if self._look is not None:
            self._look.cancel()
        with contextlib.suppress(ValueError, RuntimeError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    def reload_all(self) -> None:
        """Read all of them again, changed or not."""
        for each in self._files:
            each.take_change()
            _reload(each)

    async def reload_changed(self) -> None:
        """Read again what has changed."""
        # A disk of the network may take its time to say so, and nobody's answer is to wait for it; nor is the process's
        # end, hence no thread of a pool: those are waited for.
        changed: Future[list[WatchedFiles]] = Future()
        threading.Thread(target=self._find_changes, args=(changed,), name="file-watch", daemon=True).start()
        for each in await asyncio.wrap_future(changed):
            _reload(each)

    def _find_changes(self, changed: Future[list[WatchedFiles]]) -> None:
        if changed.set_running_or_notify_cancel():
            changed.set_result([each for each in self._files if each.take_change()])

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def _tick(self) -> None:
        self._schedule()
        if self._look is None or self._look.done():  # else a disk does not answer: one thread that waits is enough
            self._look = asyncio.create_task(self.reload_changed())


def _reload(files: WatchedFiles) -> None:
    try:
        files.check_regular()
        files.load()
    except ConfigError as error:
        logger.error("%s: what was read before stays in use, because %s", files.what, error)
    else:
        logger.info("%s: read again", files.what)
