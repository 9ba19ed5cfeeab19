"""`pointsman bench`: flags to a load, a load to figures. Imports nothing of an engine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.bench.client import BenchClient, fetch_model_name, run_in_loop
from server.bench.load import Load, LoadRun, run_load
from server.bench.report import LoadProgress, describe_load, format_summary
from server.bench.summary import Slo, Summary, summarize
from server.bench.target import BenchError, Target, parse_target
from server.exit_codes import ExitCode
from server.flag_values import as_argparse_type, parse_factor, parse_int
from server.startup_report import StartupReport

DESCRIPTION = """Put a load on a server of OpenAI's API and tell how it held up. Answers are streamed from
/v1/completions, greedily and to their full length (ignore_eos); prompts are random words of one token each. Times
count from when a request was due, the connection included. Exit code: 0 = every request got what it asked for;
1 = some did not; 64 = a flag makes no sense, or nothing answers there; 74 = the JSON cannot be written;
130 = interrupted."""
_DEFAULT_URL = "http://127.0.0.1:8000"
_WARM_UP_SEED = -1


class BenchFileError(Exception):
    """The JSON cannot be written. The message is a sentence for the operator."""


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load."""
    add = parser.add_argument
    load = Load(num_requests=64, concurrency=8, prompt_tokens=256)
    add("url", metavar="URL", nargs="?", default=_DEFAULT_URL, help=f"Base URL. [default: {_DEFAULT_URL}]")
    add("--model", metavar="NAME", help="Name of the model in requests. [default: the first that the server lists]")
    add("--api-key", metavar="KEY", help="Sent as a bearer token. [default: none]")
    _add_number(parser, "--requests", parse_int(1), load.num_requests, "Requests to send.")
    pace = parser.add_mutually_exclusive_group()
    _add_number(pace, "--concurrency", parse_int(1), load.concurrency, "Streams at a time, one request after another.")
    _add_number(
        pace, "--rate", parse_factor, 0.0, "Requests a second on average, at random (Poisson); 0 = closed loop."
    )
    _add_number(parser, "--prompt-tokens", parse_int(1), load.prompt_tokens, "Length of a prompt.")
    _add_number(parser, "--prefix-tokens", parse_int(0), 0, "Of these, how many all prompts have in common.")
    _add_number(parser, "--output-tokens", parse_int(1), load.output_tokens, "Length of an answer.")
    _add_number(parser, "--warmup", parse_int(0), 1, "Requests before it, which do not count.")
    _add_number(parser, "--seed", parse_int(0), 0, "Of prompts and arrivals.")
    _add_number(parser, "--timeout-s", parse_factor, 600.0, "A request that takes longer has failed; 0 = no limit.")
    add("--slo-ttft-ms", metavar="MS", type=as_argparse_type(parse_factor), help="Goodput: first token within this.")
    add("--slo-itl-ms", metavar="MS", type=as_argparse_type(parse_factor), help="Goodput: mean time per further token.")
    add("--json", metavar="FILE", help="Write the figures as JSON; - = stdout, and nothing else there.")


def run_bench(arguments: argparse.Namespace, report: StartupReport) -> int:
    """Run the load that the flags describe, and write its figures.

    Args:
        arguments: Of ``add_bench_flags``.
        report: Gets progress; the figures too where stdout is taken by the JSON.

    Raises:
        BenchError: It cannot be run.
        BenchFileError: See there.
    """
    target = parse_target(arguments.url, arguments.api_key)
    load, slo = _build_load(arguments), _build_slo(arguments)
    model, run = run_in_loop(_run(target, arguments, load, report))
    summary = summarize(run, load, slo)
    text = format_summary(summary, slo)
    if arguments.json == "-":
        report.line(text)
    else:
        print(text, flush=True)
    if arguments.json:  # last: where it cannot be written, the load has not been in vain
        _write_json(arguments.json, _build_json(target, model, load, slo, summary))
    return ExitCode.OK if summary.is_clean else ExitCode.SOME_FAILED


async def _run(target: Target, arguments: argparse.Namespace, load: Load, report: StartupReport) -> tuple[str, LoadRun]:
    model = arguments.model or await fetch_model_name(target)
    report.line(f"{target.url}, {model}: {describe_load(load)}")
    client = BenchClient(target, model, timeout_s=arguments.timeout_s)
    if arguments.warmup:
        # Of another seed: else the load would find its own prompts in the server's cache.
        warm_up = dataclasses.replace(load, num_requests=arguments.warmup, rate=0.0, seed=_WARM_UP_SEED)
        await run_load(client, warm_up)
    progress = LoadProgress(report, load.num_requests)
    try:
        return model, await run_load(client, load, on_result=progress.take)
    finally:
        progress.clear()


def _build_load(arguments: argparse.Namespace) -> Load:
    if arguments.prefix_tokens >= arguments.prompt_tokens:
        raise BenchError(
            f"--prefix-tokens {arguments.prefix_tokens} leaves nothing of prompts of {arguments.prompt_tokens} tokens, "
            "and they shall differ: make --prompt-tokens larger."
        )
    return Load(
        num_requests=arguments.requests,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        prompt_tokens=arguments.prompt_tokens,
        prefix_tokens=arguments.prefix_tokens,
        output_tokens=arguments.output_tokens,
        seed=arguments.seed,
    )


def _build_slo(arguments: argparse.Namespace) -> Slo | None:
    slo = Slo(arguments.slo_ttft_ms, arguments.slo_itl_ms)
    return None if slo == Slo() else slo


def _build_json(target: Target, model: str, load: Load, slo: Slo | None, summary: Summary) -> dict[str, Any]:
    return {
        "url": target.url,
        "model": model,
        "load": dataclasses.asdict(load),
        "slo": dataclasses.asdict(slo) if slo else None,
        **summary.to_json(),
    }


def _write_json(file: str, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchFileError(f"{file} cannot be written ({error.strerror}); give another --json.") from None


def _add_number(
    parser: argparse._ActionsContainer, name: str, parse: Callable[[str], Any], default: float, help: str
) -> None:
    parser.add_argument(
        name, metavar="N", type=as_argparse_type(parse), default=default, help=f"{help} [default: {default:g}]"
    )
