"""What a machine's limits say of the steps' times: percentages, tables, and which bars are met. Knows no kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.bench_report import Table
from tests.bench.limits_cases import CASES, Case, ModelSize

# Of the memory floor for one stream, of the multiplying rate for a long prompt.
MIN_READ_SHARE = 0.85
MIN_RATE_SHARE = 0.45
GOAL_RATE_SHARE = 0.60
_STREAM, _PREFILL = CASES[0].name, CASES[-1].name


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast the machine multiplies: operations per second, and with which instruction."""

    instruction: str
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What the probe found, with all threads at work.

    Attributes:
        num_threads: So many.
        read_bytes_per_s: Weights read from end to end.
        huge_page_bytes: Of the memory that was read.
        rates: Of bf16 and int8 products; int8 may be missing.
    """

    num_threads: int
    read_bytes_per_s: float
    huge_page_bytes: int
    rates: Mapping[str, Rate]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Limits:
        """Return what the probe printed."""
        rates = {name: Rate(**found[name]) for name in ("bf16", "int8") if found[name]}
        return cls(found["num_threads"], found["read_bytes_per_s"], found["huge_page_bytes"], rates)

    def best_of(self, other: Limits) -> Limits:
        """Return the higher figures of two probes of one machine."""
        rates = {
            name: max(rate, other.rates[name], key=lambda each: each.operations_per_s)
            for name, rate in self.rates.items()
        }
        read = max(self.read_bytes_per_s, other.read_bytes_per_s)
        return Limits(self.num_threads, read, max(self.huge_page_bytes, other.huge_page_bytes), rates)


@dataclass(slots=True)
class StepTime:
    """The best run of a case: seconds in all, and in each phase."""

    seconds: float = float("inf")
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A case against the limits: seconds that it took, and that reading and multiplying alone would take."""

    case: Case
    time: StepTime
    read_s: float
    multiply_s: float

    @property
    def read_share(self) -> float:
        """The memory floor, as a share of the time."""
        return self.read_s / self.time.seconds

    @property
    def rate_share(self) -> float:
        """The rate reached, as a share of the machine's."""
        return self.multiply_s / self.time.seconds


def judge(limits: Limits, size: ModelSize, times: Mapping[Case, StepTime]) -> list[Verdict]:
    """Hold each case against the limits of bf16."""
    read_s = size.weight_bytes / limits.read_bytes_per_s
    rate = limits.rates["bf16"].operations_per_s
    return [Verdict(case, time, read_s, size.operations(case) / rate) for case, time in times.items()]


def check_bars(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """Return each bar with what was required and what was reached."""
    by_name = {verdict.case.name: verdict for verdict in verdicts}
    bars: dict[str, dict[str, Any]] = {}
    if _STREAM in by_name:
        bars["read_share_of_one_row"] = _bar(by_name[_STREAM].read_share, MIN_READ_SHARE)
    if _PREFILL in by_name:
        share = by_name[_PREFILL].rate_share
        bars["rate_share_of_prefill"] = _bar(share, MIN_RATE_SHARE) | {"goal": GOAL_RATE_SHARE}
    return bars


def _bar(reached: float, required: float) -> dict[str, Any]:
    return {"reached": reached, "required": required, "is_met": reached >= required}


def build_limits_table(limits: Limits) -> Table:
    """Return what the machine can do."""
    rows = [("read weights", "prefetched loads", f"{limits.read_bytes_per_s / 1e9:.1f} GB/s")]
    for name, rate in limits.rates.items():
        rows.append((f"multiply {name}", rate.instruction, f"{rate.operations_per_s / 1e12:.2f} T/s"))
    return Table((f"limit of {limits.num_threads} threads", "with", "rate"), rows)


def build_steps_table(verdicts: Sequence[Verdict]) -> Table:
    """Return each step's time, its shares of the limits, and where the time went."""
    phases = list(verdicts[0].time.phases) if verdicts else []
    header = ["step", "ms", "memory floor", "multiplying rate", *(f"{phase} (ms)" for phase in phases)]
    rows = [
        [
            verdict.case.name,
            f"{verdict.time.seconds * 1e3:.2f}",
            f"{verdict.read_share:.0%}",
            f"{verdict.rate_share:.0%}",
            *(f"{verdict.time.phases[phase] * 1e3:.2f}" for phase in phases),
        ]
        for verdict in verdicts
    ]
    return Table(header, rows)


def build_figures(limits: Limits, size: ModelSize, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return all of it for programs."""
    rates = {
        name: {"instruction": rate.instruction, "operations_per_s": rate.operations_per_s}
        for name, rate in limits.rates.items()
    }
    return {
        "limits": {
            "num_threads": limits.num_threads,
            "read_bytes_per_s": limits.read_bytes_per_s,
            "huge_page_bytes": limits.huge_page_bytes,
            **rates,
        },
        "model": {
            "weight_bytes": size.weight_bytes,
            "num_layer_params": size.num_layer_params,
            "num_head_params": size.num_head_params,
        },
        "steps": {
            verdict.case.name: {
                "seconds": verdict.time.seconds,
                "read_share": verdict.read_share,
                "rate_share": verdict.rate_share,
                "phase_seconds": verdict.time.phases,
            }
            for verdict in verdicts
        },
        "bars": check_bars(verdicts),
    }
