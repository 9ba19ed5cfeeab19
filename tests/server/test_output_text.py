from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core import TokenLogprobs
from server.generation import LikelyToken, Prompt, TokenText
from server.gguf_tokenizer import rebuild_tokenizer
from server.output_text import OutputText, Piece, build_prompt_tokens
from server.stop_strings import StopStrings
from server.tokenizer import Tokenizer
from tests.server.fake_engine import CharDecodeStream, HoldingDecodeStream, char_bytes
from tests.server.small_tokenizers import NASTY, sentencepiece_metadata, train_byte_level

TOKENIZERS = [Tokenizer(train_byte_level()), Tokenizer(rebuild_tokenizer(sentencepiece_metadata()).pipeline)]


def create_text(
    stops: Sequence[str] = (),
    *,
    decoder: type[CharDecodeStream] = CharDecodeStream,
    min_tokens: int = 0,
    shows_stop: bool = False,
) -> OutputText:
    return OutputText(
        decoder([]), StopStrings(stops), token_bytes=char_bytes, min_tokens=min_tokens, shows_stop=shows_stop
    )


def entries(token_ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5 - index, 1) for index, token_id in enumerate(token_ids)]


def read_in_pieces(text: OutputText, token_ids: Sequence[int], cuts: Sequence[int], *, has_logprobs: bool) -> Piece:
    """Everything that comes of feeding the tokens in pieces, as one."""
    logprobs = entries(token_ids)
    bounds = [0, *sorted({cut % (len(token_ids) + 1) for cut in cuts}), len(token_ids)]
    shown, tokens = "", list[TokenText]()
    for start, stop in itertools.pairwise(bounds):
        is_last = stop == len(token_ids) and start == bounds[-2]
        piece = text.read(token_ids[start:stop], logprobs[start:stop] if has_logprobs else None, is_last=is_last)
        shown += piece.text
        tokens += piece.tokens
        if piece.stop_string is not None:
            return Piece(shown, tuple(tokens), piece.stop_string)
    return Piece(shown, tuple(tokens))


def chars(text: str) -> list[int]:
    return list(map(ord, text))


@given(
    text=st.text("ab<>é", max_size=30),
    stops=st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    min_tokens=st.integers(0, 8),
    shows_stop=st.booleans(),
    decoder=st.sampled_from([CharDecodeStream, HoldingDecodeStream]),
)
def test_text_tokens_and_stop_are_the_same_however_the_tokens_come(
    text: str,
    stops: list[str],
    cuts: list[int],
    min_tokens: int,
    shows_stop: bool,
    decoder: type[CharDecodeStream],
) -> None:
    def read(cuts: Sequence[int], *, has_logprobs: bool) -> Piece:
        output = create_text(stops, decoder=decoder, min_tokens=min_tokens, shows_stop=shows_stop)
        return read_in_pieces(output, chars(text), cuts, has_logprobs=has_logprobs)

    every = range(len(text))
    whole = read(every, has_logprobs=True)
    assert read(cuts, has_logprobs=True) == whole
    plain = read(every, has_logprobs=False)
    assert (plain.text, plain.stop_string, plain.tokens) == (whole.text, whole.stop_string, ())


@given(text=st.text("ab<>é", max_size=30), stops=st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=3))
def test_every_token_whose_text_is_shown_is_told_once_with_its_place(text: str, stops: list[str]) -> None:
    piece = read_in_pieces(create_text(stops), chars(text), range(len(text)), has_logprobs=True)
    assert [token.offset for token in piece.tokens] == list(range(len(piece.text)))
    assert b"".join(token.data for token in piece.tokens).decode() == piece.text


def test_a_token_waits_until_its_text_is_sure_to_be_shown() -> None:
    output = create_text(["END"])
    assert [token.offset for token in output.read(chars("aE"), entries(chars("aE"))).tokens] == [0]
    assert output.read(chars("N"), entries(chars("N"))) == Piece("", num_tokens=1)
    piece = output.read(chars("x"), entries(chars("x")))
    assert (piece.text, [token.offset for token in piece.tokens]) == ("ENx", [1, 2, 3])


def test_tokens_behind_a_stop_string_are_never_told() -> None:
    ids = chars("oneEND two")
    piece = create_text(["END"]).read(ids, entries(ids))
    assert (piece.text, piece.stop_string, len(piece.tokens)) == ("one", "END", 3)
    shown = create_text(["END"], shows_stop=True).read(ids, entries(ids))
    assert (shown.text, shown.stop_string, len(shown.tokens)) == ("oneEND", "END", 6)


def test_the_stopping_token_has_a_logprob_that_is_not_told() -> None:
    piece = create_text().read(chars("ab"), entries(chars("ab$")), is_last=True)
    assert (piece.text, len(piece.tokens)) == ("ab", 2)


def test_no_stop_string_ends_within_the_first_tokens_though_one_may_begin_there() -> None:
    assert create_text(["ab"], min_tokens=4).read(chars("ababab")) == Piece("abab", (), "ab", 6)
    assert create_text(["ab"], min_tokens=3).read(chars("ababab")) == Piece("ab", (), "ab", 4)
    assert create_text(["ab"], min_tokens=9).read(chars("ababab"), is_last=True) == Piece("ababab", num_tokens=6)


def test_what_stands_behind_a_stop_string_is_not_read_however_it_comes() -> None:
    assert create_text(["b"]).read(chars("abcd")) == Piece("a", (), "b", 2)


def test_a_stop_string_in_the_last_held_back_character_is_found() -> None:
    output = create_text(["b"], decoder=HoldingDecodeStream)
    assert output.read(chars("ab"), is_last=True) == Piece("a", (), "b", 2)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte level", "sentence piece"])
@pytest.mark.parametrize("text", [text for text in NASTY if text])
def test_offsets_count_complete_characters_with_a_real_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, False)
    output = OutputText(tokenizer.decode_stream(), StopStrings(()), token_bytes=tokenizer.token_bytes)
    piece = read_in_pieces(output, ids, range(len(ids)), has_logprobs=True)
    assert [token.token_id for token in piece.tokens] == ids
    offsets = [token.offset for token in piece.tokens]
    for index, offset in enumerate(offsets):
        stream = tokenizer.decode_stream()
        before = "".join(stream.feed([token_id]) for token_id in ids[:index])
        assert offset == len(before)
        assert piece.text.startswith(before)


def test_the_likeliest_tokens_come_with_their_bytes() -> None:
    entry = TokenLogprobs(ord("a"), -1.0, 2, (ord("é"), ord("a")), (-0.5, -1.0))
    (token,) = create_text().read(chars("a"), [entry]).tokens
    assert token == TokenText(
        ord("a"), b"a", 0, -1.0, 2, (LikelyToken(ord("é"), "é".encode(), -0.5), LikelyToken(ord("a"), b"a", -1.0))
    )


def test_nothing_predicts_a_prompts_first_token() -> None:
    prompt = Prompt(chars("abc"), "abc", (0, 1, 2))
    tokens = build_prompt_tokens(prompt, entries(chars("bc")), char_bytes)
    assert [(token.data, token.offset, token.logprob) for token in tokens] == [
        (b"a", 0, None),
        (b"b", 1, -0.5),
        (b"c", 2, -1.5),
    ]
    assert build_prompt_tokens(Prompt(chars("a")), [], char_bytes) == (TokenText(ord("a"), b"a", 0),)
