"""`make compat`: real clients, unmodified, against a real server.

    python tests/compat/run.py [NAME ...]

Each client has an environment of its own under .compat/, made at its first run from tests/compat's pins and then
kept, and a script in checks/ that the environment's interpreter runs. Exit code 1 if any check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from tests.compat.clients import CLIENTS, ENVIRONMENTS, Client, EnvironmentNotMadeError
from tests.compat.tokenizer_files import write_tokenizer
from tests.e2e.server_process import ServerProcess

# One thread each: two servers, a router and a client share the cores, and compute threads wait for each other.
_SERVER_ARGS = ("--max-model-len", "2048", "--kv-cache-bytes", "512M", "--num-threads", "1")
_MAX_CHECK_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one client.

    Attributes:
        client: Which.
        num_ok: Checks that held.
        failed: Names of those that did not, or what else went wrong.
        seconds: The checks took.
    """

    client: Client
    num_ok: int
    failed: tuple[str, ...]
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Run the clients that are named, or all; return the exit code."""
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"clients to run, of {', '.join(names)}")
    wanted = parser.parse_args(arguments).names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"there is no client {', '.join(unknown)}; there are {', '.join(names)}")
    clients = [client for client in CLIENTS if not wanted or client.name in wanted]
    outcomes = [outcome for client in clients if (outcome := _make_environment(client))]
    ready = [client for client in clients if client.is_made()]
    if ready:
        _say("Starting the server")
        with ServerProcess(*_SERVER_ARGS) as server:
            outcomes += [_run_client(client, server) for client in ready]
    _print_table(outcomes)
    return int(any(outcome.failed for outcome in outcomes))


def _make_environment(client: Client) -> Outcome | None:
    """Make a client's environment where there is none of these pins; return an outcome only where that failed."""
    if client.is_made():
        return None
    started = time.monotonic()
    _say(f"{client.name}: making its environment, about {client.size_mb} MB ({client.versions})")
    try:
        client.make()
    except EnvironmentNotMadeError as error:
        _say(f"{client.name}: no environment: {error}")
        return Outcome(client, 0, ("no environment",), 0)
    _say(f"{client.name}: made in {time.monotonic() - started:.0f} s")
    return None


def _run_client(client: Client, server: ServerProcess) -> Outcome:
    with contextlib.ExitStack() as stack:
        arguments = [server.url]
        if client.needs_tokenizer:
            arguments.append(str(write_tokenizer(ENVIRONMENTS / "tokenizer")))
        if client.needs_second_server:
            second = stack.enter_context(ServerProcess(*_SERVER_ARGS))
            arguments += [second.url, str(second.process.pid)]
        started = time.monotonic()
        output = _run_checks(client, arguments)
        seconds = time.monotonic() - started
    log = ENVIRONMENTS / f"{client.name}.log"
    log.write_text(output, encoding="utf-8")
    lines = output.splitlines()
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    num_ok = sum(line.startswith("ok ") for line in lines)
    if not num_ok + len(failed):
        failed.append("its script did not run")
    _say(f"{client.name}: {num_ok} of {num_ok + len(failed)} checks hold, {seconds:.0f} s")
    if failed:
        _say(f"{output.rstrip()}\n(also in {log})")
    return Outcome(client, num_ok, tuple(failed), seconds)


def _run_checks(client: Client, arguments: list[str]) -> str:
    """Return what a check script printed; one that hangs or ends badly says so in a FAILED line of its own."""
    command = [*client.command, *arguments]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_MAX_CHECK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return f"{said}\nFAILED to end within {_MAX_CHECK_S:.0f} s\n"
    is_explained = done.returncode == 0 or "FAILED " in done.stdout
    return done.stdout if is_explained else f"{done.stdout}\nFAILED with exit code {done.returncode}\n"


def _print_table(outcomes: Sequence[Outcome]) -> None:
    rows = [
        (o.client.name, f"{o.num_ok} of {o.num_ok + len(o.failed)}", f"{o.seconds:.0f} s", o.client.versions)
        for o in outcomes
    ]
    header = ("client", "checks hold", "time", "versions")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for outcome in outcomes:
        for name in outcome.failed:
            _say(f"FAILED {outcome.client.name}: {name}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
