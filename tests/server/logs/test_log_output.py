from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TextIO

import pytest

from server.logs.log_output import LogOutput, LogOutputHandler, QueuedText, StreamWriter, exit_process

ROOT = Path(__file__).parents[3]


class Disk:
    """Takes bytes, unless it is full or held."""

    def __init__(self) -> None:
        self.data = b""
        self.error: OSError | None = None
        self.is_free = threading.Event()
        self.is_free.set()

    def write(self, data: bytes) -> None:
        self.is_free.wait()
        if self.error is not None:
            raise self.error
        self.data += data

    @property
    def lines(self) -> list[str]:
        return self.data.decode().splitlines()


def create_output(disk: Disk, max_bytes: int = 1000) -> LogOutput:
    return LogOutput(disk.write, lambda num_lost: f"lost {num_lost}", max_bytes)


def test_lines_are_written_in_order() -> None:
    disk = Disk()
    output = create_output(disk)
    for number in range(10):
        output.put(f"{number}\n")
    assert output.flush(10)
    assert disk.lines == list("0123456789")


def test_a_finaliser_may_write_while_its_own_thread_is_writing() -> None:
    """It may run between any two steps of that thread; here it comes while the lock is held."""
    disk = Disk()
    output = create_output(disk)

    def write() -> None:
        with output._lock:
            output.put("collected\n")

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and output.flush(10)
    assert disk.lines == ["collected"]


def test_nobody_waits_for_a_reader_that_is_stuck_and_what_is_lost_is_told() -> None:
    disk = Disk()
    output = create_output(disk, max_bytes=10)
    disk.is_free.clear()
    for number in range(100):
        output.put(f"{number:04}\n")  # two of them fit, the one that is being written included
    assert not output.flush(0.01)
    disk.is_free.set()
    assert output.flush(10)
    assert disk.lines == ["0000", "lost 98", "0001"]
    output.put("on\n")
    assert output.flush(10)
    assert disk.lines[3:] == ["on"]


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    disk = Disk()
    output = create_output(disk)
    disk.error = OSError(28, "No space left on device")
    for _ in range(3):
        output.put("gone\n")
    assert output.flush(10)
    disk.error = None
    output.put("back\n")
    assert output.flush(10)
    assert disk.lines == ["back", "lost 3"]


def test_waiting_text_is_bounded_again_once_it_is_written() -> None:
    disk = Disk()
    output = create_output(disk, max_bytes=8)
    for _ in range(50):
        output.put("1234567\n")
        assert output.flush(10)
    assert disk.lines == ["1234567"] * 50


def test_a_record_that_cannot_be_made_a_line_is_a_lost_one() -> None:
    class Broken(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            if record.msg == "bad":
                raise ZeroDivisionError
            return super().format(record)

    disk = Disk()
    output = create_output(disk)
    handler = LogOutputHandler(output)
    handler.setFormatter(Broken())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info("bad")
    logger.info("good")
    handler.flush()
    assert disk.lines == ["good", "lost 1"]


def test_the_operators_text_keeps_its_place_among_the_lines() -> None:
    disk = Disk()
    output = create_output(disk)
    text = QueuedText(output, is_terminal=True)
    output.put("before\n")
    text.write("text\n")
    text.flush()
    output.put("after\n")
    assert output.flush(10)
    assert disk.lines == ["before", "text", "after"]
    assert text.isatty() and not QueuedText(output, is_terminal=False).isatty()


def open_pipe() -> tuple[int, TextIO]:
    reader, writer = os.pipe()
    return reader, os.fdopen(writer, "w")


def test_a_stream_with_a_file_is_written_past_its_buffer() -> None:
    reader, stream = open_pipe()
    StreamWriter(stream)(b"line\n")
    assert os.read(reader, 100) == b"line\n"
    stream.close()
    os.close(reader)


def test_a_stream_without_a_file_is_written_to() -> None:
    stream = io.StringIO()
    StreamWriter(stream)("zwölf\n".encode())
    assert stream.getvalue() == "zwölf\n"


def test_a_pipe_that_somebody_made_non_blocking_is_waited_for() -> None:
    reader, stream = open_pipe()
    os.set_blocking(stream.fileno(), False)
    data = b"x" * 300_000 + b"\n"
    thread = threading.Thread(target=StreamWriter(stream), args=(data,))
    thread.start()
    received = b""
    while len(received) < len(data):
        received += os.read(reader, 65536)
    thread.join()
    assert received == data
    stream.close()
    os.close(reader)


def test_after_a_torn_line_the_next_one_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, stream = open_pipe()
    write = os.write
    results: list[int | OSError] = [3, OSError(28, "No space left on device")]

    def tear(fd: int, data: memoryview) -> int:
        result = results.pop(0) if results else len(data)
        if isinstance(result, OSError):
            raise result
        return write(fd, data[:result])

    monkeypatch.setattr(os, "write", tear)
    writer = StreamWriter(stream)
    with pytest.raises(OSError, match="No space"):
        writer(b"torn line\n")
    writer(b"next\n")
    writer(b"last\n")
    assert os.read(reader, 100) == b"tor\nnext\nlast\n"
    stream.close()
    os.close(reader)


def test_a_closed_stream_costs_lines_and_nothing_else() -> None:
    reader, stream = open_pipe()
    os.close(reader)
    output = LogOutput(StreamWriter(stream), str)
    for _ in range(3):
        output.put("nobody reads\n")
    assert output.flush(10)
    stream.close()


# The child logs far more than a pipe holds, to a reader that never reads, and says on its other pipe how that went.
STUCK = """
import logging, sys, time
from server.logs.log_output import exit_process
from server.logs.log_setup import set_up_logging
text = set_up_logging("info", sys.argv[1], sys.stderr)
started = time.monotonic()
for number in range(20_000):
    logging.getLogger("test").info("line %d %s", number, "x" * 500)
    text.write("words for the operator\\n")
print(time.monotonic() - started < 20, flush=True)
if sys.argv[2] == "at once":
    exit_process(3)
"""


@pytest.mark.parametrize("ending", ["at once", "in order"])
@pytest.mark.parametrize("log_format", ["json", "human"])
def test_a_process_whose_log_nobody_reads_works_and_ends(log_format: str, ending: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, log_format, ending], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read() == b"True\n"
    assert process.wait(20) == (3 if ending == "at once" else 0)
    process.stdout.close()
    process.stderr.close()


def test_the_last_lines_are_written_before_the_process_is_ended() -> None:
    code = (
        "import logging, sys\n"
        "from server.logs.log_output import exit_process\n"
        "from server.logs.log_setup import set_up_logging\n"
        "set_up_logging('info', 'human', sys.stderr)\n"
        "for n in range(2000): logging.getLogger('test').info('line %d', n)\n"
        "exit_process(4)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 4
    assert len(result.stderr.splitlines()) == 2000 and result.stderr.endswith("line 1999\n")


def test_exit_process_is_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    exit_process(5)
    assert codes == [5]
