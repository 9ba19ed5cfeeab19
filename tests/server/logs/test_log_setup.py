"""The log of a whole process: each test runs one, since a process sets its log up once."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from server.logs.log_setup import set_up_logging

ROOT = Path(__file__).parents[3]
HEAD = """
import logging, sys
from server.logs.log_setup import set_up_logging
from server.startup_report import StartupReport
"""


def run(code: str) -> str:
    """What a process writes to standard error, a pipe."""
    command = [sys.executable, "-W", "always", "-c", HEAD + code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return result.stderr


def read_json(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_in_a_pipe_everything_is_json() -> None:
    code = """
out = set_up_logging("info", "auto", sys.stderr)
StartupReport(out).line("Memory\\n  weights  100 MiB")
logging.getLogger("uvicorn.error").warning("from a library\\nin two lines")
logging.getLogger("engine_core.core").info("from the engine")
import warnings
warnings.warn("from Python")
import threading
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start(); thread.join()
raise KeyError("nobody catches this")
"""
    lines = read_json(run(code))
    assert [(line["logger"], line["level"]) for line in lines] == [
        ("server.startup", "info"),
        ("server.startup", "info"),
        ("uvicorn.error", "warning"),
        ("engine_core.core", "info"),
        ("py.warnings", "warning"),
        ("server.log", "critical"),
        ("server.log", "critical"),
    ]
    assert [line["message"] for line in lines[:3]] == ["Memory", "  weights  100 MiB", "from a library\nin two lines"]
    assert "ZeroDivisionError" in lines[5]["exception"] and "worker" in lines[5]["message"]
    assert "nobody catches this" in lines[6]["exception"]


def test_in_a_pipe_text_can_be_asked_for() -> None:
    code = """
out = set_up_logging("info", "human", sys.stderr)
StartupReport(out).line("Memory\\n  weights  100 MiB")
logging.getLogger("server.requests").info("a line")
"""
    first, second, third = run(code).splitlines()
    assert (first, second) == ("Memory", "  weights  100 MiB")
    assert third.endswith(" INFO    server.requests: a line")


def test_on_a_terminal_it_is_text_and_progress_overwrites_itself() -> None:
    code = """
out = set_up_logging("info", "auto", sys.stderr)
report = StartupReport(out)
report.overwrite("50%")
report.line("done")
logging.getLogger("server").info("a line")
"""
    parent, child = pty.openpty()
    subprocess.run([sys.executable, "-c", HEAD + code], cwd=ROOT, stderr=child, check=True, timeout=60)
    os.close(child)
    text = os.read(parent, 10_000).decode().replace("\r\n", "\n")
    os.close(parent)
    assert text.startswith("\r\x1b[K50%\ndone\n")
    assert text.endswith(" INFO    server: a line\n")


def test_the_level_holds_for_all_but_what_the_operator_is_to_read() -> None:
    code = """
out = set_up_logging("error", "json", sys.stderr)
StartupReport(out).line("Stopping")
for name in ("server", "uvicorn", "engine_core"):
    logging.getLogger(name).warning("no")
    logging.getLogger(name).error("yes")
"""
    assert [line["message"] for line in read_json(run(code))] == ["Stopping", "yes", "yes", "yes"]


def test_libraries_are_heard_from_warnings_on_unless_all_is_wanted() -> None:
    code = """
set_up_logging({level!r}, "json", sys.stderr)
logging.getLogger("httpx").info("chatter")
logging.getLogger("opentelemetry.sdk").warning("trouble that is told elsewhere")
"""
    assert run(code.format(level="info")) == ""
    assert len(run(code.format(level="debug")).splitlines()) == 2


def test_a_library_that_comes_with_an_output_of_its_own_is_heard_once() -> None:
    code = """
from huggingface_hub.utils import logging as hub_logging
assert logging.getLogger("huggingface_hub").handlers, "else this guards against nothing"
set_up_logging("info", "json", sys.stderr)
hub_logging.get_logger("huggingface_hub.utils").warning("Retrying")
"""
    assert [line["message"] for line in read_json(run(code))] == ["Retrying"]


def test_a_process_that_logs_already_is_left_alone() -> None:
    root = logging.getLogger()
    handlers, level, out = list(root.handlers), root.level, io.StringIO()
    assert handlers, "pytest has some"
    assert set_up_logging("debug", "json", out) is out
    assert (root.handlers, root.level) == (handlers, level)
