"""Tokenizers from a directory and from GGUF metadata: ids as the original gives them, affixes, refusals."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from engine_core import CheckpointError
from server.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tests.server.small_tokenizers import (
    NASTY,
    byte_level_metadata,
    sentencepiece_metadata,
    train_byte_level,
)

GGUF = Path("model.gguf")
PRES = ["gpt-2", "smollm", "llama-bpe", "qwen2"]
SPM_TEXT = st.text(alphabet="then dwornig世你好\né😀T.", max_size=40)


def write_directory(path: Path, config: dict[str, Any] | None = None, post_processor: Any = None) -> Path:
    pipeline = train_byte_level()
    if post_processor is not None:
        pipeline.post_processor = post_processor
    pipeline.save(str(path / "tokenizer.json"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (path / "tokenizer_config.json").write_text(json.dumps({**tokens, **(config or {})}))
    return path


# ---------------------------------------------------------------------- rebuilt from a GGUF
@pytest.mark.parametrize("pre", PRES)
@pytest.mark.parametrize("text", NASTY)
def test_a_rebuilt_byte_level_tokenizer_gives_the_originals_ids(pre: str, text: str) -> None:
    rebuilt = load_tokenizer(GGUF, byte_level_metadata(pre))
    assert rebuilt.encode(text, add_special_tokens=False) == train_byte_level(pre).encode(text).ids


@given(text=st.text())
def test_any_text_survives_the_round_trip(text: str) -> None:
    # Special tokens that a text spells out are skipped when decoded.
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    tokenizer = load_tokenizer(GGUF, byte_level_metadata())
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_many_ids_are_decoded_by_the_call_that_lets_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, text = load_tokenizer(GGUF, byte_level_metadata()), "então 世" * 2000
    ids = tokenizer.encode(text, add_special_tokens=False)
    monkeypatch.setattr(tokenizer, "_pipeline", SimpleNamespace(decode_batch=tokenizer._pipeline.decode_batch))
    assert tokenizer.decode(ids) == text


def test_the_metadatas_tokens_template_and_size() -> None:
    tokenizer = load_tokenizer(GGUF, byte_level_metadata(chat_template="{{ messages }}"))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.vocab_size == train_byte_level().get_vocab_size()
    assert load_tokenizer(GGUF, byte_level_metadata()).chat_template is None


@pytest.mark.parametrize(
    ("metadata", "prefix", "suffix"),
    [
        (byte_level_metadata("smollm"), [], []),
        (byte_level_metadata("llama-bpe"), [1], []),
        (byte_level_metadata("llama-bpe", ggml__add_bos_token=False), [], []),
        (byte_level_metadata("smollm", ggml__add_bos_token=True, ggml__add_eos_token=True), [1], [2]),
        (sentencepiece_metadata(), [1], []),
        (sentencepiece_metadata(ggml__add_bos_token=False), [], []),
    ],
)
def test_bos_and_eos_are_added_where_the_file_or_its_kind_says(
    metadata: dict[str, Any], prefix: list[int], suffix: list[int]
) -> None:
    tokenizer = load_tokenizer(GGUF, metadata)
    plain = tokenizer.encode("the world", add_special_tokens=False)
    assert tokenizer.encode("the world", add_special_tokens=True) == [*prefix, *plain, *suffix]


def test_user_defined_tokens_are_matched_whole_and_shown() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = load_tokenizer(GGUF, metadata)
    ids = tokenizer.encode("a<tool>b", add_special_tokens=False)
    assert len(ids) == 3
    assert ids[1] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "a<tool>b"


def reference_sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE by its definition: join the neighbours whose union scores best, leftmost first."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    pieces = {token: index for index, token in enumerate(tokens) if kinds[index] == 1}
    scores = metadata["tokenizer.ggml.scores"]
    ids: list[int] = []
    for part in re.split("(\n\n)", text):
        if part == "\n\n":
            ids.append(tokens.index(part))
            continue
        symbols = list(("▁" + part if part and metadata["tokenizer.ggml.add_space_prefix"] else part).replace(" ", "▁"))
        while True:
            unions = [(-scores[pieces[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces]
            if not unions:
                break
            _, i = min(unions)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        for symbol in symbols:
            ids += [pieces[symbol]] if symbol in pieces else [tokens.index(f"<0x{b:02X}>") for b in symbol.encode()]
    return ids


@pytest.mark.parametrize("add_space_prefix", [False, True])
@given(text=SPM_TEXT)
def test_a_rebuilt_sentencepiece_tokenizer_joins_by_score(add_space_prefix: bool, text: str) -> None:
    metadata = sentencepiece_metadata(ggml__add_space_prefix=add_space_prefix)
    tokenizer = load_tokenizer(GGUF, metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference_sentencepiece(text, metadata)
    if not add_space_prefix:
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, "has no tokenizer"),
        (byte_level_metadata(ggml__model="bert"), "of kind 'bert'; supported are 'gpt2' and 'llama'"),
        (
            byte_level_metadata(ggml__pre="poro-chat"),
            "names the pre-tokenizer 'poro-chat'; supported are default, gpt-2",
        ),
        (byte_level_metadata(ggml__pre=None), "names no pre-tokenizer"),
        (byte_level_metadata(ggml__merges=["q zebra"]), "contradicts itself"),
        (sentencepiece_metadata(ggml__scores=[0.0]), "no score and type for every token"),
    ],
)
def test_a_gguf_without_a_usable_tokenizer_is_refused(metadata: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load_tokenizer(GGUF, metadata)


# ---------------------------------------------------------------------- a directory
def test_a_directory_with_a_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path), {})
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.encode(NASTY[2], add_special_tokens=True) == train_byte_level().encode(NASTY[2]).ids


def test_special_tokens_map_fills_in_what_the_config_leaves_out(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|endoftext|>", "eos_token": "x"}')
    tokenizer = load_tokenizer(tmp_path, {})
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("add_bos_token", "has_post_processor", "expected"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False), (True, True, True)],
)
def test_add_bos_token_wins_over_the_post_processor(
    add_bos_token: bool | None, has_post_processor: bool, expected: bool, tmp_path: Path
) -> None:
    post = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    config = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    tokenizer = load_tokenizer(write_directory(tmp_path, config, post if has_post_processor else None), {})
    assert (tokenizer.encode("fox", add_special_tokens=True)[0] == 1) is expected
    assert tokenizer.encode("fox", add_special_tokens=False)[0] != 1


def test_trainings_truncation_and_padding_are_undone(tmp_path: Path) -> None:
    write_directory(tmp_path)
    pipeline = train_byte_level()
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=4)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, {})
    assert tokenizer.decode(tokenizer.encode("x", False)) == "x"
    assert len(tokenizer.encode("x " * 50, False)) > 50


def test_chat_templates_in_the_order_of_their_files(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "of the list"}]
    write_directory(tmp_path, {"chat_template": named})
    assert load_tokenizer(tmp_path, {}).chat_template == "of the list"
    write_directory(tmp_path, {"chat_template": "of the config"})
    assert load_tokenizer(tmp_path, {}).chat_template == "of the config"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the json"}')
    assert load_tokenizer(tmp_path, {}).chat_template == "of the json"
    (tmp_path / "chat_template.jinja").write_text("of the jinja: é")
    assert load_tokenizer(tmp_path, {}).chat_template == "of the jinja: é"


def test_a_directory_with_a_sentencepiece_model_alone_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, only tokenizer\.model.*save_pretrained"):
        load_tokenizer(tmp_path, {})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} cannot be read"):
        load_tokenizer(tmp_path, {})


# ---------------------------------------------------------------------- text
@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\udc80\ud83d"])
def test_lone_surrogates_become_replacement_characters(text: str) -> None:
    tokenizer = load_tokenizer(GGUF, byte_level_metadata())
    replaced = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == replaced


def test_bos_stands_before_the_text_and_eos_behind_all_of_it() -> None:
    tokenizer = load_tokenizer(GGUF, sentencepiece_metadata(ggml__add_eos_token=True))
    ids, offsets = tokenizer.encode_with_offsets("the world</s>", add_special_tokens=True)
    assert (ids[0], ids[-2:]) == (1, [2, 2])  # the text's own </s>, then the added one
    assert offsets == [0, 0, 3, 7, 8, 9, 13]


def test_ids_beyond_the_vocabulary_decode_to_nothing() -> None:
    tokenizer: Tokenizer = load_tokenizer(GGUF, byte_level_metadata())
    assert tokenizer.decode([tokenizer.vocab_size + 5, *tokenizer.encode("fox", False)]) == "fox"


class PanicException(BaseException):
    pass


class PanickingPipeline:
    def __getattr__(self, name: str) -> Any:
        def panic(*args: Any, **kwargs: Any) -> Any:
            raise PanicException("index out of bounds")

        return panic


def test_a_panic_in_the_library_is_an_exception_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(train_byte_level())
    monkeypatch.setattr(tokenizer, "_pipeline", PanickingPipeline())
    monkeypatch.setattr(tokenizer, "_token_bytes", PanickingPipeline().id_to_token)
    for call in (
        lambda: tokenizer.encode("a", False),
        lambda: tokenizer.encode_with_offsets("a", False),
        lambda: tokenizer.decode([1]),
        lambda: tokenizer.decode_with_offsets([1]),
        lambda: tokenizer.token_bytes(1),
        lambda: tokenizer.decode_stream([1]),
    ):
        with pytest.raises(TokenizerError, match="index out of bounds"):
            call()


def test_other_errors_and_interrupts_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(train_byte_level())
    for error in (KeyboardInterrupt, OverflowError):

        def fail(*args: Any, error: type[BaseException] = error, **kwargs: Any) -> str:
            raise error

        monkeypatch.setattr(tokenizer, "_pipeline", SimpleNamespace(decode=fail))
        with pytest.raises(error):
            tokenizer.decode([1])
