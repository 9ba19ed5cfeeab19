"""`python -m server.healthcheck [PATH]`: asks the server of the same container how it is. For HEALTHCHECK lines.

It is started anew every few seconds, so it imports next to nothing, config.py least of all, and reads the three
variables it needs by itself. A port that is given as a flag is unknown here: in a container set POINTSMAN_PORT.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

_TIMEOUT_S = 4.0
_MAX_ANSWER_BYTES = 65_536
# What serve may listen on for everybody, and how it is reached from beside it.
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return 0 when the answer is 200, else 1, as Docker wants it; say why in a line, which `docker inspect` shows.

    Args:
        arguments: What to ask instead of /health, such as /ready.
        environment: As os.environ.
    """
    path = arguments[0] if arguments else "/health"
    try:
        status, body = ask(path, environment)
    except (OSError, ValueError) as error:
        print(f"{path} does not answer: {error}")
        return 1
    print(f"{path} answers {status}: {body}")
    return 0 if status == 200 else 1


def ask(path: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """Return the status and body of a GET.

    Raises:
        OSError: Nothing answers.
        ValueError: The port is no number, or what answers does not speak HTTP.
    """
    host = environment.get("POINTSMAN_HOST", "127.0.0.1").strip("[]")
    address = (_REACHED_AT.get(host, host), int(environment.get("POINTSMAN_PORT", "8000")))
    with socket.create_connection(address, _TIMEOUT_S) as plain:
        connection = _wrap_in_tls(plain) if environment.get("POINTSMAN_SSL_CERTFILE") else plain
        with connection:
            request = f"GET {path} HTTP/1.1\r\nHost: localhost:{address[1]}\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode("ascii"))
            answer = _read(connection)
    head, _, body = answer.partition("\r\n\r\n")
    protocol, _, rest = head.partition(" ")
    if not protocol.startswith("HTTP/") or not rest[:3].isdigit():
        raise ValueError(f"no HTTP, but {answer[:40]!r}")
    return int(rest[:3]), body.strip()


def _read(connection: socket.socket) -> str:
    answer = b""
    while len(answer) < _MAX_ANSWER_BYTES and (part := connection.recv(_MAX_ANSWER_BYTES)):
        answer += part
    return answer.decode("utf-8", "replace")


def _wrap_in_tls(plain: socket.socket) -> socket.socket:
    import ssl  # here: it costs more than all the rest, and few need it

    # Whose certificate it is does not matter: this never leaves the container, and no secret is sent.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
