"""Text to token ids and back, through the `tokenizers` library: from a tokenizer.json or rebuilt from a GGUF.

Knows what the tokenizer's own files say (bos, eos, chat template), nothing of requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from engine_core import CheckpointError
from server.detokenizer import IncrementalDetokenizer, OwnTexts
from server.gguf_tokenizer import rebuild_tokenizer
from server.json_text import scrub_surrogates
from server.token_bytes import build_token_bytes, joins_bytes

# So few are decoded in 1 ms, and each token of an answer is.
_MAX_INLINE_IDS = 4096


class TokenizerError(Exception):
    """The library has panicked: a bug of its own, or a tokenizer that contradicts itself."""


class Tokenizer:
    """A model's tokenizer. Encoding, and decoding what is long, release the GIL; both may run in any thread.

    What the library does wrong raises a TokenizerError: a panic in its Rust comes as a BaseException, which hardly
    anybody expects.

    Args:
        pipeline: The library's tokenizer.
        bos_token: The token that starts a text, or None.
        eos_token: The token that ends one, or None.
        chat_template: Jinja source, or None where the model has none.

    Attributes:
        bos_token: As given.
        eos_token: As given.
        chat_template: As given.
    """

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        # A tokenizer.json may carry training's truncation and padding; prompts are neither cut nor filled here.
        pipeline.no_truncation()
        pipeline.no_padding()
        self._pipeline = pipeline
        self._token_bytes = build_token_bytes(pipeline)
        self._own_texts = OwnTexts(self.decode) if joins_bytes(pipeline) else None
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. The model's embedding may have more rows."""
        return self._pipeline.get_vocab_size(with_added_tokens=True)

    @property
    def num_token_ids(self) -> int:
        """One more than the highest id that has a text."""
        return max(self._pipeline.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. Special tokens that the text spells out are recognised.

        Args:
            text: Any string; lone surrogates count as U+FFFD.
            add_special_tokens: Put BOS (and EOS) where this tokenizer does: True for a plain prompt, False for a
                rendered chat, whose template has written them already.
        """
        # encode() holds the GIL to its end, 2.8 s for 4 MB, and the event loop with it; a batch of one lets go of it.
        try:
            batch = self._pipeline.encode_batch_fast([scrub_surrogates(text)], add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise _tame(error) from error
        return batch[0].ids

    def encode_with_offsets(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """Return the ids of a text, and for each the number of characters before it; arguments as encode."""
        try:
            encoding = self._pipeline.encode_batch([scrub_surrogates(text)], add_special_tokens=add_special_tokens)[0]
        except BaseException as error:
            raise _tame(error) from error
        offsets: list[int] = []
        end = 0
        for (start, stop), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            # Some tokenizers leave a word's space out of its span: what lies between two tokens belongs to the second.
            # BOS and EOS have none at all.
            offsets.append(end if is_added else max(min(start, end), offsets[-1] if offsets else 0))
            end = max(end, stop)
        return encoding.ids, offsets

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the whole text of some ids, U+FFFD where bytes are no character."""
        ids = list(token_ids)
        try:
            if len(ids) > _MAX_INLINE_IDS:
                # decode() holds the GIL to its end, 0.5 s for 2 M ids; a batch of one lets go of it.
                return self._pipeline.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            return self._pipeline.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _tame(error) from error

    def decode_with_offsets(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of some ids, special tokens spelt out, and for each the complete characters before it."""
        stream = IncrementalDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=False))
        text = ""
        offsets = []
        for token_id in token_ids:
            offsets.append(len(text))
            text += stream.feed([token_id])
        return text + stream.flush(), offsets

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token stands for; it may be a part of a character. Nothing for an id that is not known."""
        try:
            return self._token_bytes(token_id)
        except BaseException as error:
            raise _tame(error) from error

    def decode_stream(self, prompt_token_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        """Return a decoder for one output.

        Args:
            prompt_token_ids: The prompt that it continues: some tokenizers need it to keep the first word's space.
        """
        if self._own_texts is not None:
            return IncrementalDetokenizer(self.decode, own_texts=self._own_texts)
        return IncrementalDetokenizer(self.decode, prompt_token_ids)


def _tame(error: BaseException) -> BaseException:
    """Return an error as it is, and an Exception for a panic, whose own class nobody can import."""
    if type(error).__name__ == "PanicException":
        return TokenizerError(f"the tokenizer library has panicked: {error}")
    return error


def load_tokenizer(path: Path, gguf_metadata: Mapping[str, Any]) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Args:
        path: A checkpoint directory or a .gguf file.
        gguf_metadata: The file's metadata; empty for a directory.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    return _load_directory(path) if path.is_dir() else _load_gguf(gguf_metadata)


def _load_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    rebuilt = rebuild_tokenizer(metadata)
    _set_affixes(
        rebuilt.pipeline,
        rebuilt.bos_token if rebuilt.adds_bos else None,
        rebuilt.eos_token if rebuilt.adds_eos else None,
    )
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        rebuilt.pipeline,
        bos_token=rebuilt.bos_token,
        eos_token=rebuilt.eos_token,
        chat_template=template if isinstance(template, str) else None,
    )


def _load_directory(path: Path) -> Tokenizer:
    pipeline = _read_pipeline(path)
    config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
    bos_token, eos_token = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    _apply_add_bos(pipeline, config, bos_token, eos_token)
    return Tokenizer(
        pipeline, bos_token=bos_token, eos_token=eos_token, chat_template=_find_chat_template(path, config)
    )


def _read_pipeline(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        pieces = next((p.name for p in sorted(path.glob("*.model"))), None)
        only = f", only {pieces}, which is not read" if pieces else ""
        raise CheckpointError(
            f"{path} has no tokenizer.json{only}. Make one with transformers' "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY), or use a GGUF of the model."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return value


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _apply_add_bos(
    pipeline: tokenizers.Tokenizer, config: Mapping[str, Any], bos_token: str | None, eos_token: str | None
) -> None:
    """Let tokenizer_config.json's add_bos_token win over tokenizer.json where the two disagree."""
    wanted = config.get("add_bos_token")
    bos_id = pipeline.token_to_id(bos_token) if bos_token is not None else None
    if not isinstance(wanted, bool) or bos_id is None:
        return
    if (bos_id in pipeline.encode("", add_special_tokens=True).ids[:1]) != wanted:
        _set_affixes(
            pipeline, bos_token if wanted else None, eos_token if config.get("add_eos_token") is True else None
        )


def _set_affixes(pipeline: tokenizers.Tokenizer, prefix: str | None, suffix: str | None) -> None:
    # Under aliases: a token's own text may hold characters that mean something in a template.
    affixes = {"prefix": prefix, "suffix": suffix}
    present = [
        {"id": alias, "ids": [pipeline.token_to_id(token)], "tokens": [token]}
        for alias, token in affixes.items()
        if token is not None
    ]
    single = [name for name in ("prefix", "$A", "suffix") if name == "$A" or affixes[name] is not None]
    pipeline.post_processor = TemplateProcessing(single=single, special_tokens=present)


def _find_chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template in transformers' order of files; of several named ones, the one called default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
