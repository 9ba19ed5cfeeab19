"""What the perplexity bench computes and says, and how it asks a server."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import httpx
import pytest

from tests.bench.perplexity import (
    PRECISIONS,
    REFERENCE,
    TEXT,
    Scored,
    build_figures,
    build_table,
    cut_windows,
    mean_difference,
    parse_weights_mib,
    perplexity,
    read_text,
    score_windows,
)
from tests.bench.progress import Progress, format_bar


def test_the_text_is_scored_without_the_line_that_tells_its_source() -> None:
    text = read_text(TEXT)
    assert text.startswith("Morning, dismal and wet,")
    assert "Public domain" in TEXT.read_text(encoding="utf-8").splitlines()[0]
    assert len(text) > 14_000


def test_a_text_of_unknown_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time", encoding="utf-8")
    with pytest.raises(ValueError, match="must begin with a line"):
        read_text(path)


def test_windows_cover_all_tokens_but_a_rest_of_one() -> None:
    assert cut_windows(range(8), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert cut_windows(range(7), 3) == [[0, 1, 2], [3, 4, 5]]


def test_perplexity_of_even_chances_is_their_number() -> None:
    assert perplexity([math.log(1 / 4)] * 3) == pytest.approx(4)
    assert perplexity([math.log(1 / 2), math.log(1 / 8)]) == pytest.approx(4)


def test_differences_count_in_both_directions() -> None:
    assert mean_difference([-1.0, -2.0], [-1.5, -1.5]) == pytest.approx(0.5)


def test_the_weights_are_read_from_the_start_report() -> None:
    report = "Pointsman 0.1.0\n  model    weights\nMemory\n  weights   1,257 MiB\n  KV cache  3,000 MiB: 1 block\n"
    assert parse_weights_mib(report) == 1257
    with pytest.raises(ValueError, match="does not say"):
        parse_weights_mib("Memory\n  KV cache  3,000 MiB\n")


def test_figures_stand_against_the_reference() -> None:
    figures = build_figures({REFERENCE: Scored([-1.0, -3.0], 500.0), "int8": Scored([-1.5, -3.5], 125.0)})
    assert figures[REFERENCE]["ratio"] == 1 and figures[REFERENCE]["mean_logprob_difference"] == 0
    assert figures["int8"]["ratio"] == pytest.approx(math.exp(0.5))
    assert figures["int8"]["mean_logprob_difference"] == pytest.approx(0.5)
    assert build_table(figures).to_markdown().splitlines()[2:] == [
        "| fp32 | 7.389 | 1.0000 | 0.0000 | 500 |",
        "| int8 | 12.182 | 1.6487 | 0.5000 | 125 |",
    ]


def test_every_precision_has_flags_of_its_own_and_the_reference_comes_first() -> None:
    assert next(iter(PRECISIONS)) == REFERENCE
    assert len(set(PRECISIONS.values())) == len(PRECISIONS) == 9


def test_windows_are_scored_without_their_first_tokens() -> None:
    asked: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        logprobs = [None, *(-float(token) for token in asked[-1]["prompt"][1:])]  # type: ignore[index]
        return httpx.Response(200, json={"choices": [{"logprobs": {"token_logprobs": logprobs}}]})

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server") as client:
        assert score_windows(client, [[1, 2, 3], [4, 5]]) == [-2.0, -3.0, -5.0]
    assert [(body["echo"], body["max_tokens"], body["logprobs"]) for body in asked] == [(True, 0, 0)] * 2


def test_a_refusal_is_told_in_the_servers_words() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, text="too long")

    with (
        httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://server") as client,
        pytest.raises(RuntimeError, match="400: too long"),
    ):
        score_windows(client, [[1, 2]])


def test_a_bar_fills_from_the_left() -> None:
    assert format_bar(3, 10, "int8") == "[#########.....................]  3/10  int8"


def test_away_from_a_terminal_each_part_takes_one_line() -> None:
    out = io.StringIO()
    progress = Progress(2, out)
    progress.show("fp32")
    progress.show("fp32")
    progress.advance("int8")
    progress.clear()
    assert [line.split("]")[1] for line in out.getvalue().splitlines()] == [" 0/2  fp32", " 1/2  int8"]
