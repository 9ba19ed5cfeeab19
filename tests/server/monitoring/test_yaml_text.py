import yaml

from server.monitoring.yaml_text import Yaml, format_yaml

DOCUMENT: dict[str, Yaml] = {
    "text": "no: # yes",
    "number": 5,
    "share": 0.5,
    "flag": True,
    "time": "5m",
    "word": "on",
    "expr": 'up{job="x"} == 0',
    "lines": "1. one: two\n2. three\n\n  indented",
    "empty": [],
    "nested": {"list": ["a", 'say "b"', 3, {"key": "k", "deeper": {"and": ["so", "on"]}}, {"other": {}}]},
}


def test_what_is_written_is_read_back() -> None:
    assert yaml.safe_load(format_yaml(DOCUMENT)) == DOCUMENT


def test_the_comment_stands_at_the_head() -> None:
    text = format_yaml({"a": 1}, "one\ntwo")
    assert text == "# one\n# two\na: 1\n"


def test_what_has_quotes_stands_in_a_block_and_is_left_as_it_is() -> None:
    assert '  up{job="x"} == 0\n' in format_yaml(DOCUMENT)
