"""`pointsman keygen`: a new API key, and the line by which a server knows it without holding it."""

from __future__ import annotations

import argparse

from server.access.api_keys import format_digest_line, generate_key, parse_key_name, parse_key_scopes
from server.flag_values import as_argparse_type
from server.startup_report import StartupReport

DESCRIPTION = """Make an API key. Standard output gets the key, for whoever is to use it, and nothing else; standard
error gets the line for the server's --api-keys-file, which holds only the key's digest. The key is kept nowhere. As
--api-key the key alone is a user's, without NAME and SCOPE: give NAME:SCOPE:KEY, or the line."""


def add_keygen_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "name",
        metavar="NAME",
        type=as_argparse_type(parse_key_name),
        help="Who uses it: letters, digits, dots, dashes and underscores. Logs and metrics show it.",
    )
    parser.add_argument(
        "--scope",
        metavar="SCOPE",
        type=as_argparse_type(parse_key_scopes),
        default="user",
        help="What it opens: user, admin or metrics, or several joined by +; the line says so. [default: user]",
    )


def run_keygen(arguments: argparse.Namespace, report: StartupReport) -> int:
    """Make and show a key; return the exit code."""
    key = generate_key()
    report.line(format_digest_line(arguments.name, arguments.scope, key))
    print(key, flush=True)
    return 0
