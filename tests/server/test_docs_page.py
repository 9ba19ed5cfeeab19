from __future__ import annotations

import re
from typing import Any

from server.docs_page import render_docs
from server.openapi import build_document
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import build_app, connect


def create_document(**operation: Any) -> dict[str, Any]:
    described = {"description": "d", "responses": {"200": {"description": "Fine", "content": {}}}, **operation}
    return {"info": {"title": "T", "version": "1"}, "paths": {"/p": {"get": described}}}


async def test_docs_are_served_and_load_nothing_from_anywhere() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:", response.text)


def test_every_path_is_listed_and_every_link_leads_somewhere() -> None:
    document = build_document(build_app(FakeEngineClient()))
    page = render_docs(document)
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    links = re.findall(r'href="#([^"]+)"', page)
    assert links and set(links) <= set(ids)


def test_text_is_escaped_and_backticks_are_code() -> None:
    page = render_docs(create_document(description="<script>alert(1)</script> of `n`"))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page and "<code>n</code>" in page


def test_types_are_words() -> None:
    fields = {
        "a": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        "b": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Other"}},
        "c": {"enum": ["x", "y"]},
        "d": {},
    }
    page = render_docs(
        {**create_document(), "components": {"schemas": {"S": {"properties": fields, "required": ["a"]}}}}
    )
    assert "<code>a</code> *</td><td>integer ≥ 1 or null<" in page
    assert '<td>list of <a href="#Other">Other</a> at least 1 items<' in page
    assert "<code>&quot;x&quot;</code> or <code>&quot;y&quot;</code>" in page
    assert "<code>d</code></td><td>anything<" in page
