"""A run's results as figures. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from server.bench.load import Load, LoadRun
from server.bench.results import RequestResult

PERCENTILES = (50, 90, 95, 99)
# Beyond this, prompts were not as long as asked: the server's tokenizer is of another kind.
_PROMPT_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps to, in milliseconds; None = no matter.

    Attributes:
        ttft_ms: Its first token came within this.
        itl_ms: Its mean time per further token is at most this. Source: DistServe's TTFT and TPOT.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def is_met_by(self, result: RequestResult) -> bool:
        """Return whether a complete answer is good."""
        return (self.ttft_ms is None or result.ttft_s * 1e3 <= self.ttft_ms) and (
            self.itl_ms is None or result.time_per_token_s * 1e3 <= self.itl_ms
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one run. Percentiles by name (p50 ... max), in milliseconds; empty without a complete answer.

    Attributes:
        num_requests: Sent.
        num_failed: Without a complete answer; their tokens do not count.
        num_wrong_length: Complete, but with another number of tokens than asked for.
        wall_s: From first start to last end.
        num_prompt_tokens: Of complete answers; None = the server does not count.
        num_cached_tokens: As above.
        num_output_tokens: Of complete answers.
        is_counted_by_server: Output tokens are the server's count; otherwise events, which may hold more than one.
        num_events: In which these tokens came.
        output_tokens_per_s: Over ``wall_s``.
        requests_per_s: Complete ones.
        goodput_per_s: Complete ones that kept to the SLO; None = no SLO.
        good_share: Of all requests; None as above.
        ttft_ms: When due to first token.
        itl_ms: Between one event and the next, over all requests.
        time_per_token_ms: Mean gap of each request.
        e2e_ms: When due to last token.
        errors: Sentence -> how often.
        warnings: What makes the figures doubtful.
    """

    num_requests: int
    num_failed: int
    num_wrong_length: int
    wall_s: float
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int
    is_counted_by_server: bool
    num_events: int
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float | None
    good_share: float | None
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    time_per_token_ms: dict[str, float]
    e2e_ms: dict[str, float]
    errors: dict[str, int]
    warnings: list[str]

    @property
    def is_clean(self) -> bool:
        """Whether every request got what it asked for."""
        return self.num_failed == 0 and self.num_wrong_length == 0

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return dataclasses.asdict(self)


def summarize(run: LoadRun, load: Load, slo: Slo | None = None) -> Summary:
    """Sum up a run.

    Args:
        run: At least one result.
        load: What was asked.
        slo: Of the goodput.
    """
    good = [result for result in run.results if is_complete(result)]
    num_good = None if slo is None else sum(map(slo.is_met_by, good))
    num_output = sum(result.num_output_tokens for result in good)
    return Summary(
        num_requests=len(run.results),
        num_failed=len(run.results) - len(good),
        num_wrong_length=sum(result.num_output_tokens != load.output_tokens for result in good),
        wall_s=run.wall_s,
        num_prompt_tokens=_total(result.num_prompt_tokens for result in good),
        num_cached_tokens=_total(result.num_cached_tokens for result in good),
        num_output_tokens=num_output,
        is_counted_by_server=bool(good) and all(result.has_usage for result in good),
        num_events=sum(len(result.token_times) for result in good),
        output_tokens_per_s=num_output / run.wall_s,
        requests_per_s=len(good) / run.wall_s,
        goodput_per_s=None if num_good is None else num_good / run.wall_s,
        good_share=None if num_good is None else num_good / len(run.results),
        ttft_ms=percentiles_ms([result.ttft_s for result in good]),
        itl_ms=percentiles_ms([gap for result in good for gap in result.gaps_s]),
        time_per_token_ms=percentiles_ms([r.time_per_token_s for r in good if r.num_output_tokens > 1]),
        e2e_ms=percentiles_ms([result.e2e_s for result in good]),
        errors=dict(Counter(find_error(result) for result in run.results if not is_complete(result))),
        warnings=list(_find_faults(good, load)),
    )


def is_complete(result: RequestResult) -> bool:
    """Return whether a request got an answer that can be timed."""
    return result.error is None and bool(result.token_times)


def find_error(result: RequestResult) -> str:
    """Return why a request has no complete answer."""
    return result.error or "the answer holds no token"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, between neighbours in proportion (as numpy does).

    Args:
        values: At least one, in rising order.
        percent: 0 to 100.
    """
    place = (len(values) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float]:
    """Return the percentiles and the maximum in milliseconds, by name; empty for no values."""
    values = sorted(seconds)
    if not values:
        return {}
    return {**{f"p{p}": percentile(values, p) * 1e3 for p in PERCENTILES}, "max": values[-1] * 1e3}


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _find_faults(good: Sequence[RequestResult], load: Load) -> Iterable[str]:
    for result in good:
        if result.num_output_tokens != load.output_tokens:
            yield (
                f"an answer has {result.num_output_tokens:,} tokens instead of {load.output_tokens:,}"
                f"{'' if result.has_usage else ' (counted by events: the server sends no usage)'}"
            )
            break
    for result in good:
        counted = result.num_prompt_tokens
        if counted is not None and abs(counted - load.prompt_tokens) > 1 + _PROMPT_TOLERANCE * load.prompt_tokens:
            yield f"a prompt has {counted:,} tokens by the server's count instead of {load.prompt_tokens:,}"
            break
