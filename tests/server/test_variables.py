"""Misspelt variables are told with the nearest name; what others set under our prefix is left alone."""

from __future__ import annotations

import pytest

from server.config import field_names
from server.variables import describe_unknown_variable, find_unknown_variables


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("POINTSMAN_MAX_NUM_SEQ", "POINTSMAN_MAX_NUM_SEQS"),
        ("POINTSMAN_MAX_SEQS", "POINTSMAN_MAX_NUM_SEQS"),
        ("pointsman_port", "POINTSMAN_PORT"),
        ("POINTSMAN_KV_CACHE_BYTE", "POINTSMAN_KV_CACHE_BYTES"),
        ("POINTSMAN_XYZZY", None),
    ],
)
def test_a_misspelt_variable_is_found_with_the_nearest(variable: str, nearest: str | None) -> None:
    assert find_unknown_variables({variable: "1"}, field_names()) == {variable: nearest}


@pytest.mark.parametrize(
    "variable",
    [
        "POINTSMAN_MAX_NUM_SEQS",
        "POINTSMAN_PORT",
        "POINTSMAN_SERVICE_HOST",
        "POINTSMAN_SERVICE_PORT_HTTP",
        "POINTSMAN_PORT_8000_TCP_ADDR",
        "POINTSMAN_BENCH_CACHE",
        "PATH",
    ],
)
def test_what_has_a_meaning_is_left_alone(variable: str) -> None:
    assert find_unknown_variables({variable: "1"}, field_names()) == {}


def test_the_sentence_names_both_or_says_where_to_look() -> None:
    assert describe_unknown_variable("A", "B") == "A sets nothing and is ignored; did you mean B?"
    assert "--help" in describe_unknown_variable("A", None)
