"""The README's list of request fields, made from the tables that the server itself reads by."""

from __future__ import annotations

import json

from pydantic import BaseModel

from server.protocol import CHAT_FIELDS, COMPLETION_FIELDS, FieldTable, Treatment
from server.wire_types import ChatRequest, CompletionRequest

_ENDPOINTS: tuple[tuple[str, type[BaseModel], FieldTable], ...] = (
    ("completions", CompletionRequest, COMPLETION_FIELDS),
    ("chat", ChatRequest, CHAT_FIELDS),
)


def describe_fields() -> str:
    """Return the list in Markdown: honoured ones with what they do, then the inert and the refused ones by name."""
    return "\n".join([*_list_honoured(), "", _list_inert(), "", *_list_refused()]) + "\n"


def _list_honoured() -> list[str]:
    lines = ["| field | where | what it does |", "|---|---|---|"]
    meanings: dict[tuple[str, str], list[str]] = {}
    for endpoint, wire_type, _ in _ENDPOINTS:
        for name, field in wire_type.model_fields.items():
            meanings.setdefault((name, field.description or ""), []).append(endpoint)
    for (name, meaning), endpoints in sorted(meanings.items()):
        where = "both" if len(endpoints) == len(_ENDPOINTS) else endpoints[0]
        lines.append(f"| `{name}` | {where} | {meaning} |")
    return lines


def _list_inert() -> str:
    names = sorted({name for _, _, table in _ENDPOINTS for name in _get_names(table, Treatment.INERT)})
    return f"Taken, without effect: {_join(names)}."


def _list_refused() -> list[str]:
    return [
        f"Refused in {endpoint} unless they say what happens anyway: "
        + ", ".join(_show_refused(name, table) for name in _get_names(table, Treatment.REFUSED))
        + ".\n"
        for endpoint, _, table in _ENDPOINTS
    ]


def _get_names(table: FieldTable, treatment: Treatment) -> list[str]:
    return sorted(name for name, rule in table.items() if rule.treatment is treatment)


def _show_refused(name: str, table: FieldTable) -> str:
    no_ops = table[name].no_ops
    return f"`{name}`" + (f" (`{json.dumps(no_ops[0])}`)" if no_ops else "")


def _join(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
