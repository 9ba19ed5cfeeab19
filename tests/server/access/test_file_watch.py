from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from engine_core import ConfigError
from server.access import file_watch
from server.access.file_watch import FileWatch, WatchedFiles


class Reader:
    """Reads a file, and refuses one that holds `bad`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.texts: list[str] = []
        self.has_read = asyncio.Event()

    def __call__(self) -> None:
        text = self._path.read_text()
        if text == "bad":
            raise ConfigError("it is bad")
        self.texts.append(text)
        self.has_read.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one")
    return path


def test_a_file_is_read_again_when_it_has_changed_and_not_before(path: Path) -> None:
    reader = Reader(path)
    watch = FileWatch([WatchedFiles("the file", (path,), reader)])
    asyncio.run(watch.reload_changed())
    assert reader.texts == []
    path.write_text("three")
    asyncio.run(watch.reload_changed())
    asyncio.run(watch.reload_changed())
    assert reader.texts == ["three"]


def test_a_link_that_is_pointed_elsewhere_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes renews a mounted secret: same name, same size, even the same time."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    reader = Reader(link)
    watch = FileWatch([WatchedFiles("the file", (link,), reader)])
    link.unlink()
    link.symlink_to(tmp_path / "b")
    asyncio.run(watch.reload_changed())
    assert reader.texts == ["b"]


def test_what_makes_no_sense_leaves_all_as_it_was_and_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader(path)
    watch = FileWatch([WatchedFiles("the file", (path,), reader)])
    path.write_text("bad")
    with caplog.at_level(logging.ERROR):
        asyncio.run(watch.reload_changed())
    assert reader.texts == []
    assert "the file: what was read before stays in use, because it is bad" in caplog.text
    path.write_text("good again")
    asyncio.run(watch.reload_changed())
    assert reader.texts == ["good again"]


def test_what_became_a_pipe_is_not_opened(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody writes into it: whoever opened it, the event loop, would wait for ever."""
    num_read = 0

    def read() -> None:
        nonlocal num_read
        num_read += 1

    watch = FileWatch([WatchedFiles("the file", (path,), read)])
    path.unlink()
    os.mkfifo(path)
    with caplog.at_level(logging.ERROR):
        asyncio.run(watch.reload_changed())
        watch.reload_all()
    assert caplog.text.count("is no regular file") == 2 and num_read == 0
    path.unlink()
    path.write_text("a file again")
    asyncio.run(watch.reload_changed())
    assert num_read == 1


def test_a_file_that_goes_and_comes_back_is_read(path: Path) -> None:
    reader = Reader(path)
    files = WatchedFiles("the file", (path,), reader)
    path.unlink()
    assert files.take_change() and not files.take_change()
    path.write_text("back")
    assert files.take_change()


async def test_sighup_reads_all_again_until_it_is_stopped(path: Path) -> None:
    reader = Reader(path)
    watch = FileWatch([WatchedFiles("the file", (path,), reader)], interval_s=3600)
    watch.start()
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(reader.has_read.wait(), 10)
    watch.stop()
    assert reader.texts == ["one"]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


async def test_changes_are_found_by_themselves(path: Path) -> None:
    reader = Reader(path)
    watch = FileWatch([WatchedFiles("the file", (path,), reader)], interval_s=0.01)
    path.write_text("changed")  # noqa: ASYNC240 - a few bytes
    watch.start()
    await asyncio.wait_for(reader.has_read.wait(), 10)
    watch.stop()
    assert reader.texts == ["changed"]


async def test_a_disk_that_does_not_answer_holds_up_one_thread_and_nobody_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_answer = threading.Semaphore(0), threading.Event()

    def stat_slowly(path: Path) -> os.stat_result:
        assert threading.current_thread() is not threading.main_thread(), "the event loop's"
        asked.release()
        assert may_answer.wait(10)
        return stat(path)

    stat, reader = os.stat, Reader(path)
    watch = FileWatch([WatchedFiles("the file", (path,), reader)], interval_s=0.01)
    path.write_text("changed")  # noqa: ASYNC240 - a few bytes
    monkeypatch.setattr(file_watch.os, "stat", stat_slowly)
    watch.start()
    assert await asyncio.to_thread(asked.acquire, timeout=10)
    await asyncio.sleep(0.05)
    assert not asked.acquire(blocking=False), "it is not asked again before it has answered"
    may_answer.set()
    await asyncio.wait_for(reader.has_read.wait(), 10)
    watch.stop()
    assert reader.texts == ["changed"]


def test_a_disk_that_never_answers_does_not_hold_up_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = FileWatch([WatchedFiles("the file", (path,), Reader(path))], interval_s=0.01)
    is_asked, may_answer = threading.Event(), threading.Event()

    def never_answer(path: Path) -> None:
        is_asked.set()
        may_answer.wait(10)

    async def serve() -> None:
        watch.start()
        assert await asyncio.to_thread(is_asked.wait, 10)
        watch.stop()

    monkeypatch.setattr(file_watch, "_stamp", never_answer)
    started = time.monotonic()
    asyncio.run(serve())  # which waits for the loop's own threads, too
    assert time.monotonic() - started < 5
    may_answer.set()


async def test_without_files_a_hangup_keeps_its_meaning() -> None:
    before = signal.getsignal(signal.SIGHUP)
    watch = FileWatch(())
    watch.start()
    assert signal.getsignal(signal.SIGHUP) == before
    watch.stop()
