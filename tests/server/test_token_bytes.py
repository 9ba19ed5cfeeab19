from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models

from server.gguf_tokenizer import rebuild_tokenizer
from server.token_bytes import build_token_bytes
from tests.server.small_tokenizers import NASTY, SPECIAL, sentencepiece_metadata, train_byte_level

PIPELINES = {"byte level": train_byte_level(), "sentence piece": rebuild_tokenizer(sentencepiece_metadata()).pipeline}


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("text", NASTY)
def test_the_bytes_of_a_texts_tokens_are_the_texts_bytes(kind: str, text: str) -> None:
    pipeline = PIPELINES[kind]
    token_bytes = build_token_bytes(pipeline)
    ids = pipeline.encode(text, add_special_tokens=False).ids
    joined = b"".join(map(token_bytes, ids)).decode(errors="replace")
    decoded = pipeline.decode(ids, skip_special_tokens=False)
    # Some kinds put a space before the first word, which decoding drops again.
    assert joined in (decoded, f" {decoded}")
    assert text in joined or kind == "sentence piece"


def test_a_special_token_stands_for_its_own_text_and_an_unknown_id_for_nothing() -> None:
    pipeline = PIPELINES["byte level"]
    token_bytes = build_token_bytes(pipeline)
    for token in SPECIAL:
        assert token_bytes(pipeline.token_to_id(token)) == token.encode()
    assert token_bytes(10**6) == b""


def test_a_part_of_a_character_is_a_part_of_its_bytes() -> None:
    pipeline = PIPELINES["byte level"]
    token_bytes = build_token_bytes(pipeline)
    parts = [token_bytes(token_id) for token_id in pipeline.encode("नम\U0001f9ff", add_special_tokens=False).ids]
    assert len(parts) > 3
    with pytest.raises(UnicodeDecodeError):
        parts[-1].decode()


def test_a_vocabulary_without_a_decoder_is_text() -> None:
    pipeline = tokenizers.Tokenizer(models.WordLevel({"word": 0, "é": 1}, unk_token="word"))
    token_bytes = build_token_bytes(pipeline)
    assert (token_bytes(0), token_bytes(1)) == (b"word", "é".encode())
