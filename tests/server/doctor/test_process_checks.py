"""Open files, port, clock and versions."""

from __future__ import annotations

import socket
import time

import pytest

from server.config import ServerConfig
from server.doctor.findings import Level
from server.doctor.process_checks import (
    check_clock,
    check_open_files,
    check_port,
    check_process,
    check_versions,
)


@pytest.mark.parametrize(
    ("limits", "level", "todo"),
    [
        ((65536, 65536), Level.OK, ""),
        ((-1, -1), Level.OK, ""),
        ((1024, 1048576), Level.NOTE, "ulimit -n 65536"),
        ((64, 4096), Level.WARNING, "ulimit -n 4096"),
        ((64, -1), Level.WARNING, "ulimit -n unlimited"),
    ],
)
def test_open_files(limits: tuple[int, int], level: Level, todo: str) -> None:
    found = check_open_files(limits)
    assert found.level is level and todo in found.todo


def test_a_port_that_is_taken_and_one_that_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = check_port("127.0.0.1", port)
        assert found.level is Level.ERROR
        assert "is taken by another program" in found.says and "choose another --port" in found.todo
    assert check_port("127.0.0.1", port).level is Level.OK
    assert check_port("127.0.0.1", 0).level is Level.OK


def test_the_clock() -> None:
    assert not list(check_clock(time.time()))
    (found,) = check_clock(12.0)
    assert found.level is Level.WARNING and "1970-01-01" in found.says


@pytest.mark.parametrize(
    ("torch", "level", "says"),
    [
        ("2.13.0+cpu", Level.OK, "torch 2.13.0+cpu"),
        ("2.11.0", Level.OK, "torch 2.11.0"),
        ("2.13.0+cu130", Level.NOTE, "for GPUs"),
        ("2.10.1", Level.ERROR, "torch 2.10.1"),
        ("", Level.ERROR, "without torch"),
    ],
)
def test_versions(torch: str, level: Level, says: str) -> None:
    found = check_versions((3, 11, 7), torch)
    assert found.level is level and says in found.says and "Python 3.11.7" in found.says


def test_a_build_for_cards_is_right_where_one_computes() -> None:
    assert check_versions((3, 11, 7), "2.13.0+cu130", uses_card=True).level is Level.OK


def test_this_process() -> None:
    topics = [finding.topic for finding in check_process(ServerConfig(port=0))]
    assert topics[0] == "open files" and "port" in topics and topics[-1] == "versions"
