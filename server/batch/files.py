"""The two files of a batch: read lazily, line by line, and written beside the final name until all of it is there."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

# A body may have 16 MiB; what is around it, and the escapes a client wrote in it, must fit too.
MAX_LINE_BYTES = 32 * 1024 * 1024
STANDARD = "-"


class BatchFileError(Exception):
    """A file cannot be read, or not be written. The message is a sentence for the operator."""


class BatchInput:
    """Where lines come from. It is read once, from front to back, by one thread; others may ask how far it is.

    Args:
        name: A path, or ``-`` for standard input.
        max_line_bytes: A longer line is cut: it comes as None.

    Attributes:
        num_lines: Read so far.
        is_at_end: Everything has been read, so that `num_lines` is all there are.

    Raises:
        BatchFileError: It cannot be opened.
    """

    def __init__(self, name: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._is_standard = name == STANDARD
        try:
            self._file = _get_standard(sys.stdin, "input") if self._is_standard else open(name, "rb")  # noqa: SIM115
        except OSError as error:
            raise BatchFileError(f"{name} cannot be read ({error.strerror}); name another input.") from None
        self._num_bytes = 0
        self.num_lines = 0
        self.is_at_end = False

    def get_share_read(self) -> float | None:
        """Return how much of it has been read, 0 to 1; None where it has no size: a pipe, a device."""
        size = self._get_size()
        return min(self._num_bytes / size, 1.0) if size else None

    def __iter__(self) -> Iterator[bytes | None]:
        """Yield the lines that are not blank; None for one that is too long to be held.

        Raises:
            BatchFileError: Reading failed.
        """
        while piece := self._read_piece():
            is_cut = len(piece) == self._max_line_bytes and not piece.endswith(b"\n")
            if is_cut:
                self._skip_line()
            elif not piece.strip():
                continue
            self.num_lines += 1
            yield None if is_cut else piece
        self.is_at_end = True

    def __enter__(self) -> BatchInput:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_standard:
            self._file.close()

    def is_file(self, other: Path | BinaryIO) -> bool:
        """Return whether this input is a regular file, and the one at this path, or open as this file."""
        try:
            here = os.fstat(self._file.fileno())
            there = other.stat() if isinstance(other, Path) else os.fstat(other.fileno())
            return stat.S_ISREG(here.st_mode) and os.path.samestat(here, there)
        except OSError:
            return False

    def _get_size(self) -> int:
        try:
            return os.fstat(self._file.fileno()).st_size
        except OSError:
            return 0

    def _skip_line(self) -> None:
        while piece := self._read_piece():
            if piece.endswith(b"\n"):
                return

    def _read_piece(self) -> bytes:
        try:
            piece = self._file.readline(self._max_line_bytes)
        except OSError as error:
            raise BatchFileError(f"The input cannot be read any further ({error.strerror}).") from None
        self._num_bytes += len(piece)
        return piece


class BatchOutput:
    """Where answers go: ``NAME.partial``, renamed to ``NAME`` by ``finish``; or a stream, written as it comes.

    Args:
        name: A path, or ``-`` for standard output. What is no regular file, such as a pipe, is written directly.
        force: Overwrite what is there.

    Attributes:
        num_lines: Written so far.

    Raises:
        BatchFileError: It exists, or cannot be created.
    """

    def __init__(self, name: str, *, force: bool) -> None:
        self._name = name
        self.num_lines = 0
        self._force = force
        if name == STANDARD or _is_special(name):
            self._partial_path: Path | None = None
            self._file = _get_standard(sys.stdout, "output") if name == STANDARD else _open_for_writing(Path(name))
            return
        self._partial_path = _partial_of(Path(name))
        for path in (Path(name), self._partial_path):
            _check_free(path, force=force)
        self._file = _open_for_writing(self._partial_path)

    @property
    def partial_path(self) -> Path | None:
        """Where an incomplete output lies; None of a stream."""
        return self._partial_path

    def write_line(self, line: bytes) -> None:
        """Write one line, at once: whoever reads a pipe waits for it, and an interrupted run keeps it.

        Raises:
            BatchFileError: The disk is full, or the reader has left.
        """
        try:
            self._file.write(line + b"\n")
            self._file.flush()
            self.num_lines += 1
        except OSError as error:
            raise BatchFileError(f"The output cannot be written any further ({error.strerror}).") from None

    def finish(self) -> None:
        """Give the complete output its name.

        Raises:
            BatchFileError: Somebody else has taken it meanwhile, or it cannot be closed or renamed.
        """
        if self._partial_path is None:
            return
        try:
            self._file.close()
        except OSError as error:
            raise BatchFileError(f"The output cannot be written to its end ({error.strerror}).") from None
        if Path(self._name).exists() and not self._force:
            raise BatchFileError(f"{self._name} has appeared meanwhile, and is not overwritten.")
        try:
            os.replace(self._partial_path, self._name)
        except OSError as error:
            raise BatchFileError(f"{self._partial_path} cannot be renamed ({error.strerror}); rename it.") from None

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close; what holds no answer leaves no file."""
        if self._name != STANDARD:
            # What could not be written has been told, and is tried once more here.
            with contextlib.suppress(OSError):
                self._file.close()
        if self._partial_path is not None and not self.num_lines:
            self._partial_path.unlink(missing_ok=True)


@contextlib.contextmanager
def open_files(input_name: str, output_name: str, *, force: bool) -> Iterator[tuple[BatchInput, BatchOutput]]:
    """Open both files of a batch, and close them at the end.

    Raises:
        BatchFileError: One cannot be opened, the output exists, or it or its partial file is the input.
    """
    with BatchInput(input_name) as source:
        _check_apart(source, output_name)
        with BatchOutput(output_name, force=force) as output:
            yield source, output


def _get_standard(stream: TextIO | None, name: str) -> BinaryIO:
    if stream is None:  # as Python has it where a parent process closed it
        raise BatchFileError(f"Standard {name} is closed; name a file instead of {STANDARD}.")
    return stream.buffer


def _check_apart(source: BatchInput, output_name: str) -> None:
    # Opening for writing empties a file, so this comes before anything is opened.
    if output_name == STANDARD:
        if source.is_file(_get_standard(sys.stdout, "output")):
            raise BatchFileError("Standard output goes to the input's own file; send it to another.")
        return
    path = Path(output_name)
    for written in (path, _partial_of(path)):
        if source.is_file(written):
            raise BatchFileError(f"{written} is the input as well; name another output than {output_name}.")


def _check_free(path: Path, *, force: bool) -> None:
    mode = _mode_of(path)
    if not mode:
        return
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise BatchFileError(f"{path} is {what} and is not overwritten; move it away, or name another output.")
    if not force:
        raise BatchFileError(f"{path} exists; move it away, name another output, or overwrite it with --force.")


def _partial_of(path: Path) -> Path:
    return Path(f"{path}.partial")


def _open_for_writing(path: Path) -> BinaryIO:
    try:
        return open(path, "wb")
    except OSError as error:
        raise BatchFileError(f"{path} cannot be written ({error.strerror}); name another output.") from None


def _is_special(name: str) -> bool:
    mode = _mode_of(Path(name))
    return mode != 0 and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _mode_of(path: Path) -> int:
    """0 of what is not there, or cannot be looked at: opening it says why."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0
