from __future__ import annotations

import json

import pytest

from server.bench.results import AnswerTally, RequestResult, describe_refusal, find_message


def take(*events: object, start_s: float = 0.0) -> RequestResult:
    """Count events that come one a second."""
    result = RequestResult(start_s=start_s)
    tally = AnswerTally(result)
    for index, event in enumerate(events):
        tally.take(event.encode() if isinstance(event, str) else json.dumps(event).encode(), start_s + index + 1.0)
    assert tally.is_done == (bool(result.error) or "[DONE]" in events)
    return result


def token(text: str = "a", finish_reason: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": finish_reason}], **more}


def test_times_and_counts_of_an_answer() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    result = take(token(), token(), token("b", "length"), {"choices": [], "usage": usage}, "[DONE]", start_s=10.0)
    assert (result.num_prompt_tokens, result.num_cached_tokens, result.num_output_tokens) == (7, 5, 4)
    assert (result.ttft_s, result.gaps_s, result.e2e_s) == (1.0, [1.0, 1.0], 3.0)
    # Four tokens came in three events: three further ones in two seconds.
    assert result.time_per_token_s == pytest.approx(2 / 3)


def test_without_usage_events_are_counted() -> None:
    result = take(token(), token(""), token(), "[DONE]")
    assert (result.num_output_tokens, result.has_usage, result.num_prompt_tokens) == (3, False, None)


def test_a_closing_event_without_text_is_no_token() -> None:
    assert take(token(), token("", "length"), "[DONE]").num_output_tokens == 1


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_text_that_looks_like_the_protocol_is_text(separators: tuple[str, str]) -> None:
    texts = ['"error"', '"prompt_tokens"', '"finish_reason":null', "[DONE]", "data: "]
    result = take(*(json.dumps(token(text), separators=separators) for text in texts), "[DONE]")
    assert (result.num_output_tokens, result.error) == (len(texts), None)


def test_usage_in_every_event_counts_as_the_last_one_says() -> None:
    events = [token(usage={"prompt_tokens": 3, "completion_tokens": n}) for n in (1, 2)]
    result = take(*events, "[DONE]")
    assert (result.num_output_tokens, len(result.token_times)) == (2, 2)


def test_a_null_error_is_none() -> None:
    assert take(token(error=None), "[DONE]").error is None


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, "the stream holds an error: out of memory"),
        ({"error": "gone"}, "the stream holds an error: gone"),
        ("{nonsense", "an event is no JSON object: b'{nonsense'"),
        ("[1]", "an event is no JSON object"),
    ],
)
def test_an_error_in_the_stream_ends_the_answer(event: object, complaint: str) -> None:
    result = take(token(), event)
    assert result.error is not None and result.error.startswith(complaint)


def test_one_token_has_no_time_per_token() -> None:
    assert take(token(), "[DONE]").time_per_token_s == 0.0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": {"message": "no such\\nmodel", "type": "x"}}', "the server answered 404: no such model"),
        (b'{"object": "error", "message": "no such model"}', "the server answered 404: no such model"),
        (b'{"detail": "Not Found"}', "the server answered 404: Not Found"),
        (b"<html>\xff</html>", "the server answered 404: <html>\ufffd</html>"),
        (b"", "the server answered 404"),
    ],
)
def test_a_refusal_shows_what_the_server_said(body: bytes, told: str) -> None:
    assert describe_refusal(404, body) == told


def test_a_long_refusal_is_cut() -> None:
    assert len(describe_refusal(400, b"x" * 10_000)) < 500


def test_an_error_of_unknown_shape_is_shown_as_it_is() -> None:
    assert find_message({"error": {"reason": 7}}) == '{"reason": 7}'
