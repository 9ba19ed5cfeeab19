"""The command line: arguments to a command, errors to a sentence and an exit code.

With config.py the only reader of argv and the environment.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import metadata
from typing import NoReturn

from engine_core import CapacityError, CheckpointError, ConfigError, EngineError, survey_cuda
from server.access.keygen import DESCRIPTION as KEYGEN_DESCRIPTION
from server.access.keygen import add_keygen_flags, run_keygen
from server.access.setup import open_access
from server.batch.files import BatchFileError, open_files
from server.bench.command import DESCRIPTION as BENCH_DESCRIPTION
from server.bench.command import BenchFileError, add_bench_flags, run_bench
from server.bench.target import BenchError
from server.config import HTTP_FIELDS, ServerConfig, add_flags, build_config, field_names
from server.exit_codes import ExitCode
from server.http.listener import ListenError, bind
from server.lifecycle.service_manager import ServiceManager
from server.lifecycle.standard_streams import settle_standard_streams
from server.logs.config_hash import ServerStart, compute_config_hash
from server.logs.log_output import flush_log
from server.logs.log_setup import set_up_logging
from server.logs.tracing import load_tracing
from server.model_resolver import ModelResolveError, fetch_embedded_model, resolve_model
from server.startup_report import StartupReport
from server.variables import describe_unknown_variable, find_unknown_variables

logger = logging.getLogger(__name__)

_DESCRIPTION = "Pointsman, an LLM serving daemon with OpenAI's HTTP API."
_BATCH_DESCRIPTION = """Run OpenAI batch lines ({"custom_id", "method": "POST", "url", "body"}) offline, in one process.
OUT.jsonl is written as OUT.jsonl.partial and renamed when it is complete. Exit code: 0 = every line has an answer with
status 200; 1 = complete, but some lines hold an error; 70 = the engine died, and lines from there on say so;
74 = a file cannot be read or written; 130 = interrupted, and the answers so far are in OUT.jsonl.partial."""
_DOCTOR_DESCRIPTION = """Say before loading whether a model fits, with how much KV cache and for how many requests,
which kernels and threads would compute it and why, and what on this machine is wrong, with what to do about it. Takes
the flags that serve would get. Kernels that are not built yet are built, as serve would. Exit code: 0 = all is well;
1 = it runs, but something is worth changing; 65 = the model does not fit or cannot be read; else what serve would end
with."""
_ENV_NOTE = "Every flag is also an environment variable: --max-num-seqs is POINTSMAN_MAX_NUM_SEQS. A flag wins."
# Four a number of rows, hence for 16 numbers of rows: measured, 40 MB after 40 of them instead of 100, and no more.
_MAX_CACHED_PROGRAMS = 64

_Command = Callable[[argparse.Namespace, ServerConfig, StartupReport], int]

# The most special first: the first class that matches decides.
_EXIT_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (ConfigError, ExitCode.USAGE),
    (ModelResolveError, ExitCode.NO_MODEL),
    (CheckpointError, ExitCode.BAD_MODEL),
    (ListenError, ExitCode.PORT_TAKEN),
    (BatchFileError, ExitCode.FILE_ERROR),
    (BenchError, ExitCode.USAGE),
    (BenchFileError, ExitCode.FILE_ERROR),
    (CapacityError, ExitCode.OUT_OF_MEMORY),
    (EngineError, ExitCode.ENGINE_DIED),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    Args:
        argv: Without the program's name; None = the process's own.
    """
    arguments = build_parser().parse_args(argv)
    report = StartupReport(manager=ServiceManager.from_environment(os.environ))
    try:
        if arguments.command == "bench":  # no engine of ours, hence none of its settings
            return run_bench(arguments, report)
        if arguments.command == "keygen":
            return run_keygen(arguments, report)
        _bound_library_memory(os.environ)
        return _run(arguments, os.environ, report)
    except KeyboardInterrupt:
        report.line("Interrupted.")
        return ExitCode.INTERRUPTED
    except tuple(kind for kind, _ in _EXIT_CODES) as error:
        report.line(f"pointsman: {error}")
        return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
    finally:
        settle_standard_streams()


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one sentence: the twenty lines of usage would bury it."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"pointsman: {message}; --help lists what there is\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser("pointsman", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pointsman {get_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP", description=_DESCRIPTION, epilog=_ENV_NOTE, allow_abbrev=False
    )
    add_flags(serve)
    _add_batch(commands)
    add_bench_flags(
        commands.add_parser(
            "bench", help="put a load on a server and time it", description=BENCH_DESCRIPTION, allow_abbrev=False
        )
    )
    add_keygen_flags(
        commands.add_parser("keygen", help="make an API key", description=KEYGEN_DESCRIPTION, allow_abbrev=False)
    )
    fetch = commands.add_parser(
        "fetch", help="download the embedded model, unless it is there", epilog=_ENV_NOTE, allow_abbrev=False
    )
    add_flags(fetch, only=("cache_dir",))
    _add_doctor(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say whether a model fits and what is in its way, loading nothing",
        description=_DOCTOR_DESCRIPTION,
        epilog=_ENV_NOTE,
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="One JSON object instead of text; sizes are in bytes.")
    add_flags(doctor)


def _add_batch(commands: argparse._SubParsersAction[_Parser]) -> None:
    batch = commands.add_parser(
        "batch",
        help="answer a file of requests, without a port",
        description=_BATCH_DESCRIPTION,
        epilog=_ENV_NOTE,
        allow_abbrev=False,
    )
    batch.add_argument("input", metavar="IN.jsonl", help="OpenAI's batch lines; - reads standard input")
    batch.add_argument("output", metavar="OUT.jsonl", help="one line of answer each, in order; - is standard output")
    batch.add_argument("--force", action="store_true", help="Overwrite OUT.jsonl and OUT.jsonl.partial.")
    # Whatever POINTSMAN_HOST says: nothing listens.
    batch.set_defaults(host="127.0.0.1")
    add_flags(batch, only=field_names() - HTTP_FIELDS)


def get_version() -> str:
    """Return the installed version of Pointsman; of a source tree that was never installed there is none."""
    try:
        return metadata.version("pointsman")
    except metadata.PackageNotFoundError:
        return "0+source"


def _run(arguments: argparse.Namespace, environment: Mapping[str, str], report: StartupReport) -> int:
    config = build_config(vars(arguments), environment)
    if config.otlp_traces_endpoint is not None:
        load_tracing()  # refused before anything else is done
    commands: dict[str, _Command] = {"serve": _serve, "batch": _batch, "fetch": _fetch, "doctor": _doctor}
    report.redirect(set_up_logging(config.log_level, config.log_format, sys.stderr))
    if arguments.command != "doctor":  # which has more to say of them
        for variable, nearest in find_unknown_variables(environment, field_names()).items():
            report.line(f"pointsman: {describe_unknown_variable(variable, nearest)}")
    try:
        return commands[arguments.command](arguments, config, report)
    finally:
        # How it ended is told as text, whatever the log's format: to whoever started it.
        flush_log()
        report.redirect(None)


def _fetch(arguments: argparse.Namespace, config: ServerConfig, report: StartupReport) -> int:
    path = fetch_embedded_model(config.cache_dir, progress=report.line)
    report.line(f"The embedded model is at {path}.")
    return ExitCode.OK


def _doctor(arguments: argparse.Namespace, config: ServerConfig, report: StartupReport) -> int:
    try:
        # Not at the top, as for _serve.
        from server.doctor.command import run_doctor
    except ImportError as error:
        report.line(f"pointsman: {error}: install what is missing, with `make setup` or `pip install pointsman`")
        return ExitCode.ENGINE_DIED
    return run_doctor(config, version=get_version(), as_json=arguments.json)


def _batch(arguments: argparse.Namespace, config: ServerConfig, report: StartupReport) -> int:
    if config.log_level != "debug":
        # A line for each request's end would bury the progress, and the output says the same.
        logging.getLogger("server.requests").setLevel(logging.WARNING)
    # The files first, as for _serve its port.
    with open_files(arguments.input, arguments.output, force=arguments.force) as (source, output):
        _check_card(config)
        model = resolve_model(config.model, progress=report.line, cache_dir=config.cache_dir)
        from server.serving import run_batch

        return run_batch(config, model=model, source=source, output=output, report=report, version=get_version())


def _serve(arguments: argparse.Namespace, config: ServerConfig, report: StartupReport) -> int:
    access = open_access(config)
    # The port first: it is not worth a download to learn that it is taken.
    with bind(config.host, config.port) as sock:
        _check_card(config)
        model = resolve_model(config.model, progress=report.line, cache_dir=config.cache_dir)
        logger.info(ServerStart(get_version(), compute_config_hash(config)))
        # Not at the top: it imports torch, and --version, --help and every mistake above are answered without.
        from server.serving import serve

        return serve(config, model=model, sock=sock, report=report, version=get_version(), access=access)


def _check_card(config: ServerConfig) -> None:
    """Look for the card that was asked for: nor is it worth a download to learn that there is none."""
    if config.backend == "cuda":
        survey_cuda().demand()


def _bound_library_memory(environment: MutableMapping[str, str]) -> None:
    """Let oneDNN keep few of the programs that it makes for each number of rows a step has: 3 MB each, 1,024 of them.

    Read when it is loaded. Whoever sets the variables knows better.
    """
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        environment.setdefault(variable, str(_MAX_CACHED_PROGRAMS))
