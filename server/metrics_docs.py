"""The README's list of metrics, in Markdown, from the one table."""

from __future__ import annotations

from server.metric_row import CONTEXT_TOKENS, MetricRow
from server.metrics_table import TABLE

_NOTES = """\
Every series of the engine also has the labels `model_name` and `engine` (always "0"). Besides these there are
`process_*` and `python_*` of the process itself. vLLM's figures that have no meaning here do not exist: multi-modal
cache, LoRA, KV connectors, sleep beyond `awake`, FLOPS, websockets, sampled KV blocks.
"""


def metrics_table() -> str:
    """Return what the README says of the metrics: those that count, those that repeat one, the buckets."""
    own = [row for row in TABLE if not row.alias_of]
    aliases = [row for row in TABLE if row.alias_of]
    lines = ["| metric | type | labels | unit | what it is | what it tells |", "|---|---|---|---|---|---|"]
    lines += [_describe(row) for row in own]
    lines += ["", _NOTES, "Second names, for dashboards and autoscalers that ask for them:", ""]
    lines += ["| metric | shows |", "|---|---|"]
    lines += [f"| `{row.name}` | `{row.alias_of}` |" for row in aliases]
    lines += ["", "Buckets:", "", "| of | upper bounds |", "|---|---|"]
    lines += [f"| {names} | {_tell_bounds(bounds)} |" for bounds, names in _group_by_bounds(own).items()]
    return "\n".join(lines) + "\n"


def _describe(row: MetricRow) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    if row.values:
        labels += ": " + ", ".join(row.values)
    return f"| `{row.name}` | {row.kind} | {labels} | {row.unit} | {row.help} | {row.tells} |"


def _group_by_bounds(rows: list[MetricRow]) -> dict[tuple[float, ...], str]:
    groups: dict[tuple[float, ...], list[str]] = {}
    for row in rows:
        if row.buckets:
            groups.setdefault(row.buckets, []).append(f"`{row.name}`")
    return {bounds: ", ".join(names) for bounds, names in groups.items()}


def _tell_bounds(bounds: tuple[float, ...]) -> str:
    if bounds == CONTEXT_TOKENS:
        return "1, 2, 5, 10, 20, 50 ... up to the context"
    return ", ".join(f"{bound:g}" for bound in bounds)
