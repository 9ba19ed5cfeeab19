"""An HTTP/1.1 response and its server-sent events, taken apart as bytes come. Pure: no sockets, no clock.

Only what an answer to ``Connection: close`` needs. Bytes may be split anywhere.
"""

from __future__ import annotations

_MAX_HEAD_BYTES = 65_536
_MAX_SIZE_LINE_BYTES = 1_024
_CRLF = 2


class ResponseError(Exception):
    """The bytes are no HTTP response."""


class ResponseReader:
    """Finds the body in a response.

    Attributes:
        status: 0 until the head is complete.
        is_complete: The body has ended. One whose length the head does not tell ends with the connection.
    """

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self._rest = b""
        self._is_chunked = False
        self._num_left: int | None = 0

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes from the connection and return what of them is body.

        Raises:
            ResponseError: Whoever answers does not speak HTTP/1.1.
        """
        data = self._rest + data
        self._rest = b""
        if not self.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._rest = data
                if len(data) > _MAX_HEAD_BYTES:
                    raise ResponseError("the answer's head does not end")
                return b""
            self._read_head(data[:end])
            data = data[end + 4 :]
        return self._take_chunks(data) if self._is_chunked else self._take_plain(data)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ", 2)
        if not words[0].startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise ResponseError(f"the answer does not begin like HTTP/1.1: {first[:60]!r}")
        self.status = int(words[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._is_chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = headers.get(b"content-length", b"")
        self._num_left = int(length) if length.isdigit() else None
        if self._is_chunked:
            self._num_left = 0
        elif self._num_left == 0:
            self.is_complete = True

    def _take_plain(self, data: bytes) -> bytes:
        if self._num_left is None:
            return data
        body = data[: self._num_left]
        self._num_left -= len(body)
        self.is_complete = self._num_left == 0
        return body

    def _take_chunks(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        at = 0
        left = self._num_left or 0  # of the chunk at hand, its closing CRLF included
        while not self.is_complete and at < len(data):
            if left == 0:
                end = data.find(b"\r\n", at)
                if end < 0:
                    self._rest = data[at:]
                    if len(self._rest) > _MAX_SIZE_LINE_BYTES:
                        raise ResponseError("a chunk's size does not end")
                    break
                size = _read_size(data[at:end])
                at = end + _CRLF
                self.is_complete = size == 0
                left = size + _CRLF
                continue
            piece = data[at : at + left]
            at += len(piece)
            left -= len(piece)
            # The chunk's last two bytes are its CRLF: `missing` of them are still to come.
            missing = min(left, _CRLF)
            pieces.append(piece[: max(0, len(piece) - (_CRLF - missing))])
        self._num_left = left
        return b"".join(pieces)


class EventReader:
    """Finds the data of server-sent events. Source: the HTML standard, 9.2.6, without lone carriage returns."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """Take the next bytes of the body and return the data of each event that they complete."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._lines.append(line[5:].removeprefix(b" "))
            elif not line and self._lines:
                events.append(self._lines[0] if len(self._lines) == 1 else b"\n".join(self._lines))
                self._lines = []
        return events


def _read_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise ResponseError(f"a chunk's size is no number: {line[:60]!r}") from None
