"""Standard output and error at the end of the process: what cannot be written must not change the exit code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def settle_standard_streams() -> None:
    """Write out what the two still hold, or drop it where that cannot be: a full disk, a pipe whose reader left.

    Else the interpreter tries again as its last act, fails, and ends with 120 whatever the command returned.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
