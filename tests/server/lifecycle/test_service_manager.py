from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.lifecycle.service_manager import ServiceManager


class Listener:
    """The manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(5)

    def read(self) -> dict[str, str]:
        message = self.socket.recv(4096).decode()
        return dict(line.split("=", 1) for line in message.split("\n"))


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    if request.param == "abstract" and not os.path.exists("/proc/net/unix"):
        pytest.skip("abstract sockets are Linux's")
    address = str(tmp_path / "notify") if request.param == "path" else f"@pointsman-test-{os.getpid()}"
    listener = Listener(address)
    with listener.socket:
        yield listener


def test_each_message_is_in_the_protocols_words(listener: Listener) -> None:
    manager = ServiceManager.from_environment({"NOTIFY_SOCKET": listener.address})
    manager.tell_status("Loading 50 %\nREADY=1")
    assert listener.read() == {"STATUS": "Loading 50 % READY=1"}, "a line more would be another message"
    manager.tell_ready("Serving m")
    assert listener.read() == {"READY": "1", "STATUS": "Serving m"}
    manager.feed_watchdog()
    assert listener.read() == {"WATCHDOG": "1"}
    manager.tell_stopping("Draining")
    assert listener.read() == {"STOPPING": "1", "STATUS": "Draining"}


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/no/such/socket"}])
def test_where_nobody_listens_nothing_happens(environment: dict[str, str]) -> None:
    manager = ServiceManager.from_environment(environment)
    manager.tell_ready("Serving")
    manager.feed_watchdog()
