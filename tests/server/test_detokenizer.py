"""Incremental detokenisation: however the tokens are split, the text is the whole one, in complete characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.detokenizer import IncrementalDetokenizer, OwnTexts
from server.token_bytes import joins_bytes
from server.tokenizer import Tokenizer, load_tokenizer
from tests.server.small_tokenizers import NASTY, byte_level_metadata, sentencepiece_metadata

BYTE_LEVEL = load_tokenizer(Path("m.gguf"), byte_level_metadata())
SENTENCEPIECE = load_tokenizer(Path("m.gguf"), sentencepiece_metadata(ggml__add_space_prefix=False))
LLAMA = load_tokenizer(Path("m.gguf"), sentencepiece_metadata(ggml__add_space_prefix=True))
ALL = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, LLAMA], ids=["bytes", "pieces", "llama"])
# Surrogates cannot be encoded, and U+FFFD in a text looks like what is being tested for.
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30)
MULTI_BYTE = st.text(alphabet="aé你好😀 \u0301👩\u200d", max_size=20)


def stream(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = tokenizer.decode_stream()
    return [*[detokenizer.feed(piece) for piece in pieces], detokenizer.flush()]


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


@ALL
@given(text=TEXT | MULTI_BYTE, cuts=st.lists(st.integers(0, 99), max_size=8))
def test_every_split_gives_the_whole_text_in_complete_characters(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for pieces in (split(ids, cuts), [[token_id] for token_id in ids]):
        parts = stream(tokenizer, pieces)
        assert "".join(parts) == tokenizer.decode(ids)
        assert "\ufffd" not in "".join(parts)


@pytest.mark.parametrize("text", NASTY)
def test_token_by_token_gives_the_whole_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert "".join(stream(BYTE_LEVEL, [[token_id] for token_id in ids])) == BYTE_LEVEL.decode(ids)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=50))
def test_any_ids_at_all_give_the_whole_text(ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, [[token_id] for token_id in ids])) == BYTE_LEVEL.decode(ids)


@given(ids=st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), max_size=50))
def test_stray_bytes_cost_a_stream_no_letter(ids: list[int]) -> None:
    streamed = "".join(stream(SENTENCEPIECE, [[token_id] for token_id in ids]))
    whole = SENTENCEPIECE.decode(ids)
    if "\ufffd" not in whole:
        assert streamed == whole
    # Decoded whole, a stray byte spoils the bytes next to it too; a stream has shown those already.
    rest = iter(streamed)
    assert all(character in rest for character in whole.replace("\ufffd", ""))


def test_a_character_is_shown_with_its_last_byte() -> None:
    ids = SENTENCEPIECE.encode("😀", add_special_tokens=False)
    assert len(ids) == 4
    assert stream(SENTENCEPIECE, [[token_id] for token_id in ids]) == ["", "", "", "😀", ""]


def test_text_before_an_incomplete_character_does_not_wait_for_it() -> None:
    first, *rest = BYTE_LEVEL.encode("x🤖", add_special_tokens=False)
    assert len(rest) > 1
    assert stream(BYTE_LEVEL, [[first, rest[0]], rest[1:]]) == ["x", "🤖", ""]


def test_an_incomplete_character_is_told_at_the_end_only() -> None:
    ids = SENTENCEPIECE.encode("好é😀", add_special_tokens=False)[:-1]
    *parts, last = stream(SENTENCEPIECE, [[token_id] for token_id in ids])
    assert "".join(parts) == "好é"
    assert set(last) == {"\ufffd"}


def test_a_stray_byte_does_not_spoil_what_follows() -> None:
    stray = SENTENCEPIECE.encode("😀", add_special_tokens=False)[0]
    letters = SENTENCEPIECE.encode("the", add_special_tokens=False)
    for before in ("好", "😀"):
        shown = SENTENCEPIECE.encode(before, add_special_tokens=False)
        ids = [*shown, stray, *letters]
        assert "".join(stream(SENTENCEPIECE, [[token_id] for token_id in ids])) == f"{before}\ufffdthe"


def test_endless_garbage_is_shown_and_does_not_pile_up() -> None:
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return "\ufffd" * len(ids)

    detokenizer = IncrementalDetokenizer(decode)
    text = "".join(detokenizer.feed([7]) for _ in range(1000)) + detokenizer.flush()
    assert len(text) == 1000
    assert max(decoded) < 200


def test_special_tokens_are_not_shown() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>fox<|im_end|>", add_special_tokens=False)
    assert "".join(stream(BYTE_LEVEL, [[token_id] for token_id in ids])) == "fox"


def test_endless_special_tokens_do_not_pile_up() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return LLAMA.decode(ids)

    detokenizer = IncrementalDetokenizer(decode)
    the, world = LLAMA.encode("the", False), LLAMA.encode("the world", False)[1:]
    parts = [detokenizer.feed(the), *[detokenizer.feed([1]) for _ in range(500)], detokenizer.feed(world)]
    assert "".join(parts) == "the world"
    assert max(lengths) < 100


def test_a_completion_keeps_its_first_words_space() -> None:
    prompt = LLAMA.encode("the", add_special_tokens=True)
    word = LLAMA.encode("the world", add_special_tokens=True)[len(prompt) :]
    detokenizer = LLAMA.decode_stream(prompt)
    assert detokenizer.feed(word) + detokenizer.flush() == " world"
    assert LLAMA.decode(word) == "world"  # what decoding the output alone would give


def test_a_special_token_midway_keeps_the_next_words_space() -> None:
    world = LLAMA.encode("the world", add_special_tokens=False)[1:]
    parts = stream(LLAMA, [LLAMA.encode("the", False), [1], [2], world])
    assert "".join(parts) == "the world"


def test_the_rest_of_a_character_that_the_prompt_began_is_no_character() -> None:
    *prompt, last = SENTENCEPIECE.encode("the 😀", add_special_tokens=False)
    detokenizer = SENTENCEPIECE.decode_stream(prompt)
    parts = [detokenizer.feed([last]), detokenizer.feed(SENTENCEPIECE.encode("and", False)), detokenizer.flush()]
    assert parts == ["", "\ufffdand", ""]


@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, LLAMA], ids=["pieces", "llama"])
def test_a_prompt_that_ends_in_bytes_does_not_spoil_the_characters_after_it(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    for prompt in (smile * 2, [*smile, *smile[:2]]):  # the context begins, or ends, within a character
        detokenizer = tokenizer.decode_stream(prompt)
        assert "".join(detokenizer.feed([token_id]) for token_id in smile) == "😀"


def test_a_prompt_of_nothing_but_replacement_characters_keeps_the_next_words_space() -> None:
    detokenizer = LLAMA.decode_stream(LLAMA.encode("\ufffd" * 3, add_special_tokens=False))
    assert detokenizer.feed(LLAMA.encode("the", add_special_tokens=False)) == " the"


def test_a_stray_byte_spoils_no_text_that_comes_in_the_same_step() -> None:
    zero, stray = 4 + ord("0"), 4 + 0x80
    for pieces in ([[zero, stray]], [[zero], [stray]]):
        assert "".join(stream(SENTENCEPIECE, pieces)) == "0\ufffd"


def test_no_tokens_no_text() -> None:
    detokenizer = BYTE_LEVEL.decode_stream()
    assert (detokenizer.feed([]), detokenizer.flush()) == ("", "")


def test_a_token_of_whole_characters_is_decoded_once_whatever_stands_before_it() -> None:
    decoded: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        decoded.append(ids)
        return BYTE_LEVEL.decode(ids)

    ids = BYTE_LEVEL.encode("you and you and 你 you", add_special_tokens=False)
    streams = [IncrementalDetokenizer(decode, own_texts=texts) for texts in [OwnTexts(decode)] * 2]
    for each in streams:
        assert "".join(each.feed([token_id]) for token_id in ids) == "you and you and 你 you"
    alone = [token_ids[0] for token_ids in decoded if len(token_ids) == 1 and BYTE_LEVEL.decode(token_ids).isascii()]
    assert len(alone) == len(set(alone)) > 3


def test_only_tokens_that_join_their_bytes_are_looked_up() -> None:
    assert [joins_bytes(each._pipeline) for each in (BYTE_LEVEL, SENTENCEPIECE, LLAMA)] == [True, False, False]
