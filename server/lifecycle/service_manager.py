"""What the service manager is told, where there is one: systemd's notification protocol. Knows nothing of the server.

Source: sd_notify(3).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

# The manager reads its socket at once; should it not, nobody must wait for it for long.
_SEND_S = 1.0


class ServiceManager:
    """Whoever started this process and watches it. Every method may be called from any thread, and never raises.

    Args:
        address: Of its socket: a path, or a name in the abstract namespace behind an ``@``. None = there is nobody.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ServiceManager:
        """Return the one that NOTIFY_SOCKET names."""
        return cls(environment.get("NOTIFY_SOCKET") or None)

    def tell_status(self, text: str) -> None:
        """Say in a line what goes on."""
        self._send(f"STATUS={' '.join(text.split())}")

    def tell_ready(self, text: str) -> None:
        """Say that requests are served from now on, and what goes on."""
        self._send(f"READY=1\nSTATUS={text}")

    def tell_stopping(self, text: str) -> None:
        """Say that the end has begun, and how."""
        self._send(f"STOPPING=1\nSTATUS={text}")

    def feed_watchdog(self) -> None:
        """Say that all is well; whoever hears nothing for too long starts the process anew."""
        self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_SEND_S)
            sock.sendto(message.encode(), self._address)
