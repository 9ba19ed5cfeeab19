"""What a client makes of a stream: one reply of the form that a whole answer has. Asserts the order of its chunks."""

from __future__ import annotations

from typing import Any


def join_completion(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of /v1/completions, the usage chunk last."""
    *told, last = chunks
    joined: dict[int, dict[str, Any]] = {}
    for chunk in told:
        (piece,) = chunk["choices"]
        choice = joined.setdefault(piece["index"], {**piece, "text": "", "logprobs": None})
        assert not choice.get("is_ended"), "a choice has one finish chunk, and it is the last"
        choice["text"] += piece["text"]
        choice["logprobs"] = _join_columns(choice["logprobs"], piece["logprobs"])
        _end(choice, piece)
    return _build({**told[0]}, joined, last)


def join_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of /v1/chat/completions, the usage chunk last."""
    *told, last = chunks
    joined: dict[int, dict[str, Any]] = {}
    for chunk in told:
        (piece,) = chunk["choices"]
        if piece["index"] not in joined:
            assert piece["delta"] == {"role": "assistant", "content": ""}, "the role comes first, alone"
            message = {"role": "assistant", "content": "", "refusal": None}
            joined[piece["index"]] = {**piece, "message": message, "logprobs": None}
            del joined[piece["index"]]["delta"]
            continue
        choice = joined[piece["index"]]
        assert not choice.get("is_ended"), "a choice has one finish chunk, and it is the last"
        assert piece["delta"] == {} or piece["finish_reason"] is None
        choice["message"]["content"] += piece["delta"].get("content", "")
        if piece["logprobs"] is not None:
            content = [] if choice["logprobs"] is None else choice["logprobs"]["content"]
            choice["logprobs"] = {"content": content + piece["logprobs"]["content"], "refusal": None}
        _end(choice, piece)
    return _build({**told[0], "object": "chat.completion"}, joined, last)


def _join_columns(before: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any] | None:
    if before is None or new is None:
        return new if before is None else before
    return {name: before[name] + new[name] for name in before}


def _end(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
    choice["is_ended"] = piece["finish_reason"] is not None


def _build(base: dict[str, Any], joined: dict[int, dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
    choices = [joined[index] for index in sorted(joined)]
    assert all(choice.pop("is_ended") for choice in choices), "every choice ends"
    assert last["choices"] == [], "the usage comes last, alone"
    return {**base, "choices": choices, "usage": last["usage"]}
