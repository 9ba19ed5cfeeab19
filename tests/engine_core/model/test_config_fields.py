"""Typed reads: right values come through, wrong ones are named with their file, key and value."""

from __future__ import annotations

import pytest

from engine_core.errors import CheckpointError
from engine_core.model.config_fields import ConfigFields

FIELDS = ConfigFields(
    {"whole": 3, "real": 2.5, "yes": True, "word": "silu", "words": ["a"], "inner": {"whole": 9}, "null": None},
    "config.json",
)


def test_reads() -> None:
    assert FIELDS.count("whole") == 3
    assert FIELDS.number("whole") == 3.0
    assert FIELDS.positive("real") == 2.5
    assert FIELDS.flag("yes") is True
    assert FIELDS.text("word") == "silu"
    assert FIELDS.texts("words") == ["a"]
    inner = FIELDS.section("inner")
    assert inner is not None
    assert inner.count("whole") == 9


@pytest.mark.parametrize("key", ["null", "absent"])
def test_null_is_absent(key: str) -> None:
    assert FIELDS.optional_int(key) is None
    assert FIELDS.optional_number(key) is None
    assert FIELDS.flag(key) is False
    assert FIELDS.texts(key) is None
    assert FIELDS.section(key) is None
    for read in (FIELDS.count, FIELDS.number, FIELDS.positive, FIELDS.text):
        with pytest.raises(CheckpointError, match=rf"config\.json does not say {key}"):
            read(key)


def test_defaults_fill_what_is_absent_but_not_null() -> None:
    fields = FIELDS.with_defaults({"whole": 1, "null": 1, "absent": 1})
    assert (fields.count("whole"), fields.optional_int("null"), fields.count("absent")) == (3, None, 1)


@pytest.mark.parametrize("method", ["count", "number", "text", "texts", "section", "flag"])
def test_wrong_type_is_named(method: str) -> None:
    wrong = {"count": "real", "number": "yes", "text": "whole", "texts": "word", "section": "words", "flag": "whole"}
    key = wrong[method]
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is .*; it must be"):
        getattr(FIELDS, method)(key)


def test_section_names_itself_in_errors() -> None:
    inner = FIELDS.section("inner")
    assert inner is not None
    with pytest.raises(CheckpointError, match=r"config\.json inner does not say other"):
        inner.count("other")


def test_more_layers_than_any_model_has_are_refused_before_anything_is_built_for_each() -> None:
    fields = ConfigFields({"layers": 2**31, "few": 62}, "config.json")
    assert fields.num_layers("few") == 62
    with pytest.raises(CheckpointError, match="layers is 2147483648; it must be at most 10000"):
        fields.num_layers("layers")
