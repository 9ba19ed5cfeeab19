"""YAML, as much of it as the files here need. Texts are quoted or stand in blocks: none is taken for a number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

Yaml = str | int | float | bool | Mapping[str, "Yaml"] | Sequence["Yaml"]

_STEP = "  "


def format_yaml(value: Mapping[str, Yaml], comment: str = "") -> str:
    """Return a document.

    Args:
        value: The document.
        comment: Stands at its head; lines without the ``#``.
    """
    head = [f"# {line}" for line in comment.splitlines()]
    return "\n".join([*head, *_lines(value, "")]) + "\n"


def _lines(value: Yaml, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _entry(f"{indent}{key}:", each, indent + _STEP)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            if isinstance(each, Mapping) and each:
                first, *rest = _lines(each, indent + _STEP)
                yield f"{indent}- {first.lstrip()}"
                yield from rest
            else:
                yield f"{indent}- {_format_scalar(each)}"


def _entry(head: str, value: Yaml, indent: str) -> Iterator[str]:
    if isinstance(value, str) and ("\n" in value or '"' in value):
        yield f"{head} |-"
        for line in value.split("\n"):
            yield f"{indent}{line}".rstrip()
    elif isinstance(value, str | int | float) or not value:
        yield f"{head} {_format_scalar(value)}"
    else:
        yield head
        yield from _lines(value, indent)


def _format_scalar(value: Yaml) -> str:
    # A JSON value is a YAML value; text keeps its letters.
    return json.dumps(value, ensure_ascii=False)
