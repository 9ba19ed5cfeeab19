"""What the operator reads of a load: a line of progress while it runs, and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from server.bench.load import Load
from server.bench.results import RequestResult
from server.bench.summary import PERCENTILES, Slo, Summary, is_complete
from server.startup_report import StartupReport

_TERMINAL_INTERVAL_S = 0.2
_LOG_INTERVAL_S = 10.0
_COLUMNS = (*(f"p{p}" for p in PERCENTILES), "max")


class LoadProgress:
    """Tells how far a load is.

    Args:
        report: Where to.
        num_requests: Of the load.
        clock: Seconds.
    """

    def __init__(
        self, report: StartupReport, num_requests: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._num_requests = num_requests
        self._clock = clock
        self._interval_s = _TERMINAL_INTERVAL_S if report.is_terminal else _LOG_INTERVAL_S
        self._start_s = self._last_s = clock()
        self._num_ended = self._num_failed = self._num_tokens = 0

    def take(self, result: RequestResult) -> None:
        """Count a result, and show how far it is unless that was shown a moment ago."""
        self._num_ended += 1
        if is_complete(result):
            self._num_tokens += result.num_output_tokens
        else:
            self._num_failed += 1
        now_s = self._clock()
        if now_s - self._last_s >= self._interval_s:
            self._last_s = now_s
            self._show()

    def clear(self) -> None:
        """Take the progress away; what follows stands in its place."""
        if self._report.is_terminal:
            self._report.overwrite("")

    def _show(self) -> None:
        failed = f", {self._num_failed:,} failed" if self._num_failed else ""
        rate = self._num_tokens / max(self._clock() - self._start_s, 1e-9)
        text = f"{self._num_ended:,}/{self._num_requests:,} requests{failed}, {rate:,.1f} tokens/s"
        if self._report.is_terminal:
            self._report.overwrite(text)
        else:
            self._report.line(text)


def describe_load(load: Load) -> str:
    """Return what is asked, in words."""
    pace = f"{load.rate:g} a second on average" if load.rate else f"{load.concurrency:,} at a time"
    prefix = f", the first {load.prefix_tokens:,} in common" if load.prefix_tokens else ""
    return (
        f"{load.num_requests:,} requests, {pace}: prompts of {load.prompt_tokens:,} tokens{prefix}, "
        f"answers of {load.output_tokens:,}"
    )


def format_summary(summary: Summary, slo: Slo | None = None) -> str:
    """Return the figures as lines."""
    return "\n".join(_lines(summary, slo))


def _lines(summary: Summary, slo: Slo | None) -> Iterator[str]:
    num_complete = summary.num_requests - summary.num_failed
    yield (
        f"{num_complete:,} complete, {summary.num_failed:,} failed in {summary.wall_s:,.1f} s: "
        f"{summary.output_tokens_per_s:,.1f} tokens/s, {summary.requests_per_s:,.2f} requests/s"
    )
    yield _describe_tokens(summary)
    if num_complete:
        yield f"{'milliseconds':<30}" + "".join(f"{name:>11}" for name in _COLUMNS)
        yield _row("to the first token", summary.ttft_ms)
        yield _row("between tokens", summary.itl_ms)
        yield _row("per token, mean of a request", summary.time_per_token_ms)
        yield _row("to the end", summary.e2e_ms)
    if slo is not None and summary.goodput_per_s is not None and summary.good_share is not None:
        yield (
            f"goodput: {summary.goodput_per_s:,.2f} requests/s, {summary.good_share:.0%} of the requests, "
            f"had {_describe_slo(slo)}"
        )
    for warning in summary.warnings:
        yield f"warning: {warning}"
    for error, count in summary.errors.items():
        yield f"failed {count:,} times: {error}"


def _describe_tokens(summary: Summary) -> str:
    prompt = "?" if summary.num_prompt_tokens is None else f"{summary.num_prompt_tokens:,}"
    cached = "" if summary.num_cached_tokens is None else f" ({summary.num_cached_tokens:,} from the cache)"
    counted = "" if summary.is_counted_by_server else ", counted by events: the server sends no usage"
    return f"tokens: {prompt} of prompts{cached}, {summary.num_output_tokens:,} of answers{counted}"


def _row(name: str, values: Mapping[str, float]) -> str:
    return f"{name:<30}" + "".join(f"{values[column]:>11,.1f}" if values else f"{'-':>11}" for column in _COLUMNS)


def _describe_slo(slo: Slo) -> str:
    ttft = [] if slo.ttft_ms is None else [f"their first token within {slo.ttft_ms:g} ms"]
    itl = [] if slo.itl_ms is None else [f"a further one every {slo.itl_ms:g} ms or less on average"]
    return " and ".join(ttft + itl)
