from __future__ import annotations

from pathlib import Path

from server.field_docs import describe_fields
from server.protocol import CHAT_FIELDS, COMPLETION_FIELDS
from server.wire_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest


def test_the_readme_lists_the_fields_as_they_are() -> None:
    readme = Path("README.md").read_text()
    start, end = "<!-- fields -->\n", "<!-- /fields -->"
    assert readme.partition(start)[2].partition(end)[0] == describe_fields(), (
        "README.md: put what describe_fields() returns between its marks"
    )


def test_every_field_that_a_table_knows_is_listed() -> None:
    listed = describe_fields()
    assert [name for name in {**COMPLETION_FIELDS, **CHAT_FIELDS} if f"`{name}`" not in listed] == []


def test_every_honoured_field_says_what_it_does() -> None:
    for wire_type in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest):
        assert [name for name, field in wire_type.model_fields.items() if not field.description] == []
