"""The embedded model's tokenizer, rebuilt from its GGUF, against one built by hand from the same vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine_core.model.gguf_source import open_gguf
from server.bench.words import WORDS
from server.chat_template import ChatTemplate
from server.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.prompts import PROMPTS
from tests.server.small_tokenizers import CORPUS, NASTY

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def rebuilt(embedded_model: Path) -> Tokenizer:
    return load_tokenizer(embedded_model, open_gguf(embedded_model).metadata)


@pytest.fixture(scope="module")
def by_hand(embedded_model: Path) -> tokenizers.Tokenizer:
    """SmolLM2's published pipeline around what gguf's own reader finds."""
    reader = gguf.GGUFReader(embedded_model)

    def contents(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens, kinds = contents("tokens"), contents("token_type")
    merges = [tuple(merge.split(" ")) for merge in contents("merges")]
    pipeline = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pipeline.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    pipeline.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return pipeline


def test_texts_of_many_kinds_have_the_same_ids(rebuilt: Tokenizer, by_hand: tokenizers.Tokenizer) -> None:
    for text in [*NASTY, *CORPUS, *PROMPTS]:
        assert rebuilt.encode(text, add_special_tokens=True) == by_hand.encode(text).ids


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_has_the_same_ids_and_comes_back_in_a_stream(
    rebuilt: Tokenizer, by_hand: tokenizers.Tokenizer, text: str
) -> None:
    ids = rebuilt.encode(text, add_special_tokens=False)
    assert ids == by_hand.encode(text).ids
    # Not the text itself: this vocabulary lacks a few bytes that only unassigned characters have.
    detokenizer = rebuilt.decode_stream()
    assert "".join(detokenizer.feed([token_id]) for token_id in ids) + detokenizer.flush() == by_hand.decode(ids)


def test_its_chat_template_renders_and_encodes_to_special_tokens(rebuilt: Tokenizer) -> None:
    assert rebuilt.chat_template is not None
    prompt = ChatTemplate(rebuilt.chat_template, rebuilt.bos_token, rebuilt.eos_token).render(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rebuilt.encode(prompt, add_special_tokens=False).count(1) == 3


def test_what_ends_its_output(embedded_model: Path, rebuilt: Tokenizer) -> None:
    assert open_gguf(embedded_model).generation.eos_token_ids == {2}
    assert (rebuilt.bos_token, rebuilt.eos_token, rebuilt.vocab_size) == ("<|im_start|>", "<|im_end|>", 49152)


def test_a_word_of_the_load_generator_is_one_token(rebuilt: Tokenizer) -> None:
    assert [word for word in WORDS if len(rebuilt.encode(word, add_special_tokens=True)) != 1] == []
