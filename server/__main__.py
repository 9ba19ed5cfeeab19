"""`pointsman` and `python -m server`. Told to stop while it starts, a server ends cleanly: there is nothing to lose."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from server.exit_codes import ExitCode


class StopAskedError(BaseException):
    """SIGTERM, before anything runs that would rather hear of it itself. Like KeyboardInterrupt no Exception."""


def main() -> int:
    """Run the command line and return the process's exit code."""
    signal.signal(signal.SIGTERM, _raise_stop)
    try:
        # Not at the top: its imports take most of a second, in which a service manager may change its mind.
        from server.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except StopAskedError:
        # Whoever waits for a file must not take it for written.
        return ExitCode.OK if sys.argv[1:2] == ["serve"] else ExitCode.INTERRUPTED


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise StopAskedError


if __name__ == "__main__":
    sys.exit(main())
