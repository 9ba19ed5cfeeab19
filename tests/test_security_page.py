"""SECURITY.md's table: each vulnerability once, and each test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("<!-- cves -->")[2].partition("<!-- /cves -->")[0].strip().splitlines()[2:]
]


def test_every_row_has_a_test_or_says_why_there_is_none() -> None:
    assert len(ROWS) > 20
    for numbers, lesson, here, test in ROWS:
        assert re.fullmatch(r"CVE-\d{4}-\d{4,5}(, CVE-\d{4}-\d{4,5})*", numbers), numbers
        assert lesson and here
        assert test or here.startswith("does not apply: "), numbers


def test_every_vulnerability_stands_there_once() -> None:
    numbers = [number for row in ROWS for number in row[0].split(", ")]
    assert len(set(numbers)) == len(numbers) >= 50


def test_every_test_that_is_named_exists() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", sources))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 25
    assert named <= defined, sorted(named - defined)
