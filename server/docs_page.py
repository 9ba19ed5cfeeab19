"""/docs: the OpenAPI document as one page of plain HTML. Pure: a document in, HTML out.

No scripts and nothing from elsewhere: it works where there is no internet, and under the strictest content policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

# What the page may do, as its own header: show itself.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = """
:root { color-scheme: light dark; --line: #d5d9de; --soft: #5b6570; --accent: #0b62a8; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a4148; --soft: #9aa5b0; --accent: #6cb6f5; }
  body { background: #15191d; color: #e4e8ec; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 0.9em ui-monospace, monospace; }
a { color: var(--accent); }
h2 { border-bottom: 1px solid var(--line); padding-bottom: 0.3rem; margin-top: 2.5rem; }
h3 { margin: 2rem 0 0.3rem; }
.method { display: inline-block; min-width: 3.5rem; font-weight: 700; color: var(--accent); }
.soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
nav li { list-style: none; }
nav ul { padding: 0; }
"""
_LIMITS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("exclusiveMaximum", "< {}"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
)
_CODE = re.compile(r"`([^`]+)`")


def render_docs(document: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        document: OpenAPI 3.1. Everything in it is escaped.
    """
    info = document["info"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document.get("components", {}).get("schemas", {})
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<p>{_render_text(info.get('description', ''))} "
        f'The same for programs: <a href="openapi.json">openapi.json</a>.</p>\n'
        f"<nav><ul>\n{''.join(_render_link(*operation) for operation in operations)}</ul></nav>\n"
        f"<h2>Endpoints</h2>\n{''.join(_render_operation(*operation) for operation in operations)}"
        f"<h2>Types</h2>\n{''.join(_render_schema(name, schema) for name, schema in schemas.items())}"
        "</body>\n</html>\n"
    )


def _render_link(method: str, path: str, operation: Mapping[str, Any]) -> str:
    name = f'<span class="method">{method}</span> <a href="#{_anchor(method, path)}"><code>{escape(path)}</code></a>'
    return f'<li>{name} <span class="soft">{_render_text(operation.get("description", ""))}</span></li>\n'


def _render_operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    head = f'<h3 id="{_anchor(method, path)}"><span class="method">{method}</span> <code>{escape(path)}</code></h3>\n'
    text = f"<p>{_render_text(operation.get('description', ''))}</p>\n"
    body = operation.get("requestBody")
    asked = f"<p>Body: {_render_content(body['content'])}</p>\n" if body else ""
    rows = [
        (f"<code>{escape(status)}</code>", _render_content(response["content"]), _render_text(response["description"]))
        for status, response in operation["responses"].items()
    ]
    return head + text + asked + _render_table(("status", "answer", "meaning"), rows)


def _render_content(content: Mapping[str, Any]) -> str:
    return "<br>".join(
        f'{_render_type(part["schema"])} <span class="soft">{escape(media)}</span> '
        f"{_render_text(part['schema'].get('description', ''))}"
        for media, part in content.items()
    )


def _render_schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(field)}</code>{' *' if field in required else ''}",
            _render_type(part),
            _render_text(part.get("description", "")),
        )
        for field, part in schema.get("properties", {}).items()
    ]
    text = f"<p>{_render_text(schema.get('description', ''))}</p>\n"
    return f'<h3 id="{_anchor(name)}"><code>{escape(name)}</code></h3>\n{text}' + _render_table(
        ("field (* = always there)", "type", ""), rows
    )


def _render_type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).rsplit("/", 1)[1]
        return f'<a href="#{_anchor(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        return " or ".join(_render_type(part) for part in schema["anyOf"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_render_type(schema.get('items', {}))}{_render_limits(schema)}"
    return f"{escape(str(schema.get('type', 'anything')))}{_render_limits(schema)}"


def _render_limits(schema: Mapping[str, Any]) -> str:
    limits = [text.format(schema[key]) for key, text in _LIMITS if key in schema]
    return f" {escape(', '.join(limits))}" if limits else ""


def _render_table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}</table></div>\n' if body else ""


def _render_text(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _anchor(*parts: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", " ".join(parts)).strip("-")
