from __future__ import annotations

import math

from server.generation import LikelyToken, TokenText
from server.logprob_replies import (
    build_chat_logprobs,
    build_completion_logprobs,
    build_prompt_logprobs,
    join_completion_logprobs,
    show_token,
)

FIRST = TokenText(7, b"One", 0)
SECOND = TokenText(8, b" two", 3, -1.5, 2, (LikelyToken(9, b" three", -0.5), LikelyToken(8, b" two", -1.5)))
HALF = TokenText(200, b"\xf0\x9f", 7, -0.25, 1)


def test_a_completions_logprobs_are_four_columns() -> None:
    assert build_completion_logprobs([FIRST, SECOND, HALF]) == {
        "tokens": ["One", " two", r"bytes:\xf0\x9f"],
        "token_logprobs": [None, -1.5, -0.25],
        "top_logprobs": [None, {" three": -0.5, " two": -1.5}, {r"bytes:\xf0\x9f": -0.25}],
        "text_offset": [0, 3, 7],
    }


def test_an_outputs_offsets_go_on_where_the_echoed_prompt_ends() -> None:
    joined = join_completion_logprobs(
        build_completion_logprobs([FIRST]), build_completion_logprobs([SECOND], base_offset=10)
    )
    assert joined["tokens"] == ["One", " two"]
    assert joined["text_offset"] == [0, 13]


def test_the_token_itself_is_always_among_the_likeliest() -> None:
    token = TokenText(1, b"x", 0, -9.0, 40, (LikelyToken(2, b"y", -0.1),))
    assert build_completion_logprobs([token])["top_logprobs"] == [{"y": -0.1, "x": -9.0}]


def test_of_two_tokens_that_look_alike_the_likelier_one_is_shown() -> None:
    token = TokenText(1, b"x", 0, -9.0, 40, (LikelyToken(2, b"x", -0.1),))
    assert build_completion_logprobs([token])["top_logprobs"] == [{"x": -0.1}]


def test_json_has_no_infinity() -> None:
    token = TokenText(1, b"x", 0, -math.inf, 40, (LikelyToken(2, b"y", -math.inf),))
    assert build_completion_logprobs([token])["token_logprobs"] == [-9999.0]
    assert build_chat_logprobs([token])["content"][0]["top_logprobs"][0]["logprob"] == -9999.0


def test_a_chats_logprobs_are_a_list_of_tokens_with_their_bytes() -> None:
    assert build_chat_logprobs([SECOND]) == {
        "content": [
            {
                "token": " two",
                "logprob": -1.5,
                "bytes": [32, 116, 119, 111],
                "top_logprobs": [
                    {"token": " three", "logprob": -0.5, "bytes": list(b" three")},
                    {"token": " two", "logprob": -1.5, "bytes": list(b" two")},
                ],
            }
        ],
        "refusal": None,
    }


def test_a_prompts_logprobs_are_vllms() -> None:
    rare = TokenText(5, b"z", 7, -8.0, 99, (LikelyToken(9, b"a", -0.5),))
    assert build_prompt_logprobs([FIRST, SECOND, rare]) == [
        None,
        {
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": " three"},
            "8": {"logprob": -1.5, "rank": 2, "decoded_token": " two"},
        },
        {
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "5": {"logprob": -8.0, "rank": 99, "decoded_token": "z"},
        },
    ]


def test_parts_of_characters_do_not_look_alike() -> None:
    assert len({show_token(bytes([byte])) for byte in range(256)}) == 256
    assert show_token("é".encode()) == "é"
