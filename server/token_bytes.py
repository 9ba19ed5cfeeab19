"""What one token stands for, in bytes: text hides it where a character spans several tokens. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"


def build_token_bytes(pipeline: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """Return the function from a token's id to its bytes; an id that the tokenizer does not know has none.

    Args:
        pipeline: Its decoder tells how its vocabulary is written: bytes in disguise, or text with fallback bytes.
    """
    added = {token_id: token.content.encode() for token_id, token in pipeline.get_added_tokens_decoder().items()}
    read = _read_byte_level if "ByteLevel" in _decoder_types(pipeline) else _read_with_fallback

    def token_bytes(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id]
        token = pipeline.id_to_token(token_id)
        return b"" if token is None else read(token)

    return token_bytes


def joins_bytes(pipeline: tokenizers.Tokenizer) -> bool:
    """Tell whether a text is its tokens' bytes joined, whichever tokens stand next to each other."""
    return _decoder_types(pipeline) == {"ByteLevel"}


def _decoder_types(pipeline: tokenizers.Tokenizer) -> set[str]:
    decoder = pipeline.decoder
    state: Any = json.loads(decoder.__getstate__()) if decoder is not None else {}
    parts = state.get("decoders") or [state]
    return {part.get("type", "") for part in parts}


def _read_with_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_WORD_START, " ").encode()


def _read_byte_level(token: str) -> bytes:
    if all(char in _BYTE_OF_CHAR for char in token):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    return token.encode()


def _build_byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100 on.

    Source: Radford et al., GPT-2's byte-level BPE (2019).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _build_byte_alphabet()
