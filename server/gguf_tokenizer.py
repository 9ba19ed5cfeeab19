"""A `tokenizers` pipeline rebuilt from a GGUF's metadata, with the ids that the original tokenizer gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine_core import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = _CONTRACTIONS + _WORDS_AND_REST % r"\p{N}{1,3}"
_QWEN2_PATTERN = _CONTRACTIONS + _WORDS_AND_REST % r"\p{N}"
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before byte-pair merging.

    Attributes:
        pattern: What a piece looks like; None = GPT-2's pattern, which ByteLevel brings along.
        has_single_digits: Digits are cut apart first.
        ignores_merges: A piece that is a token is taken whole.
        normalizes: Text is brought to Unicode's NFC.
        adds_bos: Where the file does not say.
    """

    pattern: str | None = None
    has_single_digits: bool = False
    ignores_merges: bool = False
    normalizes: bool = False
    adds_bos: bool = False


_GPT2 = _PreTokenizer()
_STARCODER = _PreTokenizer(has_single_digits=True)
_LLAMA3 = _PreTokenizer(_LLAMA3_PATTERN, ignores_merges=True, adds_bos=True)
_QWEN2 = _PreTokenizer(_QWEN2_PATTERN, normalizes=True)
# By tokenizer.ggml.pre, the name that llama.cpp's converter gives. Source: its llama-vocab.cpp.
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _PreTokenizer(_TEKKEN_PATTERN, ignores_merges=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class RebuiltTokenizer:
    """What the metadata amounts to.

    Attributes:
        pipeline: Text to ids and back; adds no special tokens by itself.
        bos_token: The token that starts a text, or None.
        eos_token: The token that ends one, or None.
        adds_bos: Encoding with special tokens puts ``bos_token`` in front.
        adds_eos: Likewise ``eos_token`` at the end.
    """

    pipeline: tokenizers.Tokenizer
    bos_token: str | None
    eos_token: str | None
    adds_bos: bool
    adds_eos: bool


def rebuild_tokenizer(metadata: Mapping[str, Any]) -> RebuiltTokenizer:
    """Build the tokenizer that a GGUF describes.

    Args:
        metadata: The file's metadata as plain Python values.

    Raises:
        CheckpointError: It describes none, or one of a kind that is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError("The GGUF file has no tokenizer (no tokenizer.ggml.tokens); use one that has.")
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        pre_tokenizer = _find_pre_tokenizer(metadata)
        pipeline, adds_bos = _build_byte_level(metadata, tokens, pre_tokenizer), pre_tokenizer.adds_bos
    elif kind == "llama":
        pipeline, adds_bos = _build_sentencepiece(metadata, tokens, kinds), True
    else:
        raise CheckpointError(f"The GGUF file's tokenizer is of kind {kind!r}; supported are 'gpt2' and 'llama'.")
    _add_tokens(pipeline, tokens, kinds)
    return RebuiltTokenizer(
        pipeline=pipeline,
        bos_token=_token(metadata, tokens, "bos"),
        eos_token=_token(metadata, tokens, "eos"),
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        adds_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )


def _token(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    # Backwards, so that of two equal tokens the first keeps its id.
    return {token: index for index, token in reversed(list(enumerate(tokens)))}


def _find_pre_tokenizer(metadata: Mapping[str, Any]) -> _PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        named = "names no pre-tokenizer" if name is None else f"names the pre-tokenizer {name!r}"
        raise CheckpointError(
            f"The GGUF file {named}; supported are {', '.join(_PRE_TOKENIZERS)}. "
            "Convert the model again, or use its directory with a tokenizer.json."
        )
    return _PRE_TOKENIZERS[name]


def _build_byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], pre_tokenizer: _PreTokenizer
) -> tokenizers.Tokenizer:
    merges = [_split_merge(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    pipeline = tokenizers.Tokenizer(
        _build_bpe(vocab=_vocabulary(tokens), merges=merges, ignore_merges=pre_tokenizer.ignores_merges)
    )
    if pre_tokenizer.normalizes:
        pipeline.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre_tokenizer.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre_tokenizer.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre_tokenizer.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer.pattern is None))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(steps)
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _build_bpe(**settings: Any) -> models.BPE:
    try:
        return models.BPE(**settings)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"The GGUF file's tokenizer contradicts itself: {error}.") from error


def _build_sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    """Build SentencePiece's BPE: spaces become ▁, and what no piece covers is spelled in bytes."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or len(kinds) != len(tokens):
        raise CheckpointError("The GGUF file's tokenizer has no score and type for every token; convert it again.")
    vocab = _vocabulary(tokens)
    pipeline = tokenizers.Tokenizer(
        _build_bpe(
            vocab=vocab,
            merges=_merges_from_scores(vocab, tokens, scores, kinds),
            unk_token=next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
            or _token(metadata, tokens, "unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE)
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if add_space else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    pipeline.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)
    return pipeline


def _merges_from_scores(
    vocab: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Return every way to put a piece together from two, best piece first, as merge rules.

    SentencePiece joins the two neighbours whose union scores best, which is a merge list ordered by the union's
    score. Control, user-defined and byte tokens never arise by joining.

    Source: generate_merges in transformers' tokenizer conversion, whose order of a piece's splits is kept.
    """
    pieces = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        token = tokens[index]
        if kinds[index] != _NORMAL or vocab[token] != index:
            continue
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def _add_tokens(pipeline: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Declare the tokens that are matched whole in the text before anything else. Only control tokens are skipped."""
    special = [t for t, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _UNKNOWN) and t]
    whole = [t for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED and t]
    pipeline.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    pipeline.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])
