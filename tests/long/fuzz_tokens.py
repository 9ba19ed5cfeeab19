"""Fuzz target of the detokenizer: any token ids, through tokenizers of each kind, in any pieces."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from engine_core.model.gguf_source import open_gguf
from server.config import default_cache_dir
from server.model_resolver import fetch_embedded_model
from server.output_text import OutputText
from server.stop_strings import StopStrings
from server.tokenizer import Tokenizer, load_tokenizer
from tests.long.fuzz_oracles import check_offsets, count_complete_chars, count_undecodable, cut, is_part
from tests.long.fuzz_texts import ANY_CHAR, CUTS, OutputSeen, expect_output, read_output
from tests.server.small_tokenizers import NASTY, SPECIAL, byte_level_metadata, sentencepiece_metadata

REPLACEMENT = "\ufffd"
# So many undecodable tokens in a row are shown as garbage, without waiting for what they may become.
MAX_PENDING_TOKENS = 64
KINDS = ("embedded", "smollm", "qwen2", "added", "gemma", "llama")
BYTE_LEVEL_KINDS = KINDS[:4]
# Matched whole; the library reads "é" alone as a byte, which no published vocabulary adds.
_ADDED = ("<tool>", "    ", "x y", "｜end▁of｜", "你 é")


@dataclass(frozen=True)
class TokenCase:
    """Ids behind a prompt, a text to be encoded, stop strings, and where the ids are cut."""

    kind: str
    ids: tuple[int, ...]
    prompt: tuple[int, ...] = ()
    text: str = ""
    stops: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()
    min_tokens: int = 0
    has_logprobs: bool = False


@functools.cache
def get_tokenizer(kind: str) -> Tokenizer:
    """Return one of KINDS: the embedded model's, or a small one of that family."""
    if kind == "embedded":
        path = fetch_embedded_model(default_cache_dir(), progress=print)
        return load_tokenizer(path, open_gguf(path).metadata)
    if kind in ("gemma", "llama"):
        metadata = sentencepiece_metadata(ggml__add_space_prefix=kind == "llama", ggml__add_eos_token=kind == "gemma")
        return load_tokenizer(Path("m.gguf"), metadata)
    metadata = byte_level_metadata("llama-bpe" if kind == "added" else kind)
    if kind == "added":
        metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *_ADDED]
        metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *[4] * len(_ADDED)]
    return load_tokenizer(Path("m.gguf"), metadata)


@functools.cache
def get_byte_ids(kind: str) -> dict[int, int]:
    """Return the id of each byte that is a token."""
    tokenizer = get_tokenizer(kind)
    data = {token_id: tokenizer.token_bytes(token_id) for token_id in range(tokenizer.num_token_ids)}
    return {part[0]: token_id for token_id, part in reversed(data.items()) if len(part) == 1}


def _spell(kind: str, data: bytes) -> list[int]:
    byte_ids = get_byte_ids(kind)
    return [byte_ids[byte] for byte in data if byte in byte_ids]


@st.composite
def token_ids(draw: st.DrawFn, kind: str, *, is_clean: bool) -> list[int]:
    """Draw runs of ids: texts, whole and spelt in bytes, special ones; unless clean strays too, and ids of no token."""
    tokenizer = get_tokenizer(kind)
    size = tokenizer.num_token_ids
    high = st.integers(0x80, 0xFF).map(lambda byte: bytes([byte]))
    special = [tokenizer.encode(text, False) for text in (*SPECIAL, "<s>", "</s>", "\n\n")]
    text = (
        st.text(ANY_CHAR, max_size=6)
        | st.text("aé你好😀 \u0301👩\u200dthe", max_size=8)
        | st.sampled_from([*NASTY, *_ADDED])
    )
    part = st.tuples(ANY_CHAR.map(str.encode), st.integers(0, 4), st.integers(0, 4)).map(
        lambda at: at[0][at[1] : at[2]]
    )
    clean = (
        text.map(lambda text: _spell(kind, text.encode())),
        text.map(lambda text: tokenizer.encode(text, False)),
        st.sampled_from(special),
    )
    stray = (
        st.lists(st.integers(0, size - 1), max_size=6),
        st.lists(high | part | st.just(REPLACEMENT.encode()), max_size=4).map(
            lambda data: _spell(kind, b"".join(data))
        ),
        st.sampled_from([[size - 1], [size], [size + 1], [size + 1000], [2**31], [2**32 - 1]]),
        st.tuples(high, st.integers(60, 70)).map(lambda at: _spell(kind, at[0] * at[1])),
    )
    runs = draw(st.lists(st.one_of(*clean, *([] if is_clean else stray)), max_size=8))
    return [token_id for ids in runs for token_id in ids]


@st.composite
def token_cases(draw: st.DrawFn) -> TokenCase:
    """Draw one case; its stop strings are parts of what the ids say."""
    kind = draw(st.sampled_from(KINDS))
    is_clean = draw(st.booleans())
    ids = draw(token_ids(kind, is_clean=is_clean))
    text = get_tokenizer(kind).decode(ids)
    at = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), max_size=2))
    return TokenCase(
        kind,
        tuple(ids),
        tuple(draw(st.just([]) | token_ids(kind, is_clean=is_clean))),
        draw(st.text(ANY_CHAR, max_size=20) | st.sampled_from(NASTY)),
        tuple(stop for start, length in at if (stop := text[start : start + length])),
        tuple(draw(CUTS)),
        draw(st.integers(0, 5)),
        draw(st.booleans()),
    )


def check_tokens(case: TokenCase) -> None:
    """Check streams, offsets and bytes on one case."""
    tokenizer = get_tokenizer(case.kind)
    pieces = _stream(tokenizer, case.prompt, [[token_id] for token_id in case.ids])
    streamed = "".join(pieces)
    assert "".join(_stream(tokenizer, case.prompt, cut(case.ids, case.cuts))) == streamed
    assert "".join(_stream(tokenizer, case.prompt, [case.ids])) == streamed
    _check_output_text(tokenizer, case, pieces)
    _check_whole(tokenizer, case, streamed)
    _check_decode_offsets(tokenizer, case)
    _check_encode_offsets(tokenizer, case)


def _stream(tokenizer: Tokenizer, prompt: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[str]:
    stream = tokenizer.decode_stream(prompt)
    return [*[stream.feed(piece) for piece in pieces], stream.flush()]


def _check_output_text(tokenizer: Tokenizer, case: TokenCase, pieces: Sequence[str]) -> None:
    expected = expect_output(pieces, case.stops, min_tokens=case.min_tokens, shows_stop=False)
    output = OutputText(
        tokenizer.decode_stream(case.prompt),
        StopStrings(case.stops),
        token_bytes=tokenizer.token_bytes,
        min_tokens=case.min_tokens,
    )
    seen = read_output(output, case.ids, case.cuts, has_logprobs=case.has_logprobs)
    assert seen == OutputSeen(expected.text, expected.stop, expected.offsets if case.has_logprobs else ())


def _check_whole(tokenizer: Tokenizer, case: TokenCase, streamed: str) -> None:
    before, whole = tokenizer.decode(case.prompt), tokenizer.decode([*case.prompt, *case.ids])
    if REPLACEMENT not in whole:
        assert before + streamed == whole
    elif not case.prompt:
        # A special token is skipped, even between the bytes of a character.
        data = [b"" if _is_special(tokenizer, token_id) else tokenizer.token_bytes(token_id) for token_id in case.ids]
        if case.kind in BYTE_LEVEL_KINDS:
            assert streamed == whole or count_undecodable(data) > MAX_PENDING_TOKENS
        else:
            # Decoded whole, a stray byte spoils all bytes beside it; a stream has shown complete characters already.
            assert is_part(whole.replace(REPLACEMENT, ""), streamed)
            assert is_part(streamed.replace(REPLACEMENT, ""), b"".join(data).decode(errors="replace"))


def _is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    return tokenizer.decode([token_id]) == "" != tokenizer.decode([token_id], skip_special_tokens=False)


def _check_decode_offsets(tokenizer: Tokenizer, case: TokenCase) -> None:
    text, offsets = tokenizer.decode_with_offsets(case.ids)
    check_offsets(offsets, len(case.ids), text)
    whole = tokenizer.decode(case.ids, skip_special_tokens=False)
    data = [tokenizer.token_bytes(token_id) for token_id in case.ids]
    if REPLACEMENT not in whole:
        assert text == whole
        _check_places(offsets, data, text)
    if case.kind in BYTE_LEVEL_KINDS:
        assert whole == b"".join(data).decode(errors="replace")


def _check_encode_offsets(tokenizer: Tokenizer, case: TokenCase) -> None:
    ids, offsets = tokenizer.encode_with_offsets(case.text, add_special_tokens=False)
    assert ids == tokenizer.encode(case.text, add_special_tokens=False)
    check_offsets(offsets, len(ids), case.text)
    _check_places(offsets, list(map(tokenizer.token_bytes, ids)), case.text)
    # What the tokenizer adds stands before the text, or behind all of it.
    with_affixes, their_offsets = tokenizer.encode_with_offsets(case.text, add_special_tokens=True)
    num_before = next(n for n in range(len(with_affixes) + 1) if with_affixes[n : n + len(ids)] == ids)
    num_behind = len(with_affixes) - len(ids) - num_before
    assert their_offsets == [*[0] * num_before, *offsets, *[len(case.text)] * num_behind]


def _check_places(offsets: Sequence[int], data: Sequence[bytes], text: str) -> None:
    """Where the tokens' bytes are the text's, each offset is the number of complete characters before it."""
    joined = b"".join(data)
    if joined not in (text.encode(), b" " + text.encode()):
        return
    num_added = len(joined) - len(text.encode())  # the space before the first word, which no text shows
    counts = [count_complete_chars(b"".join(data[:index])) for index in range(len(data))]
    assert list(offsets) == [max(count - num_added, 0) for count in counts]
