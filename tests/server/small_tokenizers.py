"""Small tokenizers for tests, trained on the spot, and the same as GGUF metadata."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's the dog's day, they'll say; we've seen 1234567 of them.",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(100):\n\tprint(i)  # comment\r\n",
    "héllo naïve café — Ω≈ç√ 你好世界 日本語のテキスト Привет мир नमस्ते",
    "emoji: 😀😀 👩‍👩‍👧 🇩🇪 and   runs    of     spaces\n\n\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NASTY = [
    "",
    " ",
    "Hello world",
    "  leading and trailing  ",
    "tabs\t\tand\r\nlines\n\n\n\nend",
    "1234567890 12 3.14159 ١٢٣",
    "it's they'll WE'VE i'M",
    "def f(x):\n        return x[0]\n",
    "你好，世界！日本語のテキスト。",
    "😀 👩‍👩‍👧 🇩🇪 e\u0301 é",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|> x<|endoftext|>",
    "mixed 中文 and English123 with_under_scores-and-dashes",
    "nul \x00 bell \x07 nbsp\u00a0zero\u200bwidth",
    "a" * 300,
]
# fmt: off
SENTENCE_PIECES = (
    "▁t", "he", "in", "er", "▁a", "▁the", "on", "▁s", "at", "re", "▁w", "or", "你好", "▁世", "ing", "▁▁", "▁an", "and",
    "▁and", "▁wor", "▁world",
)
# fmt: on
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_steps(pre: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    """Spell out what a published tokenizer.json of this kind does before merging."""
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = LLAMA3_PATTERN if pre == "llama-bpe" else LLAMA3_PATTERN.replace("{1,3}", "")
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def _train(pre: str) -> str:
    pipeline = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    pipeline.pre_tokenizer = byte_level_steps(pre)
    pipeline.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        pipeline.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
    )
    pipeline.train_from_iterator(CORPUS, trainer)
    return pipeline.to_str()


def train_byte_level(pre: str = "smollm") -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer of about 500 tokens, of the kind that ``tokenizer.ggml.pre`` names."""
    return tokenizers.Tokenizer.from_str(_train(pre))


def byte_level_metadata(pre: str = "smollm", **overrides: Any) -> dict[str, Any]:
    """Return the GGUF metadata that a converter would write for train_byte_level(pre)."""
    model = json.loads(_train(pre))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata |= {f"tokenizer.{name.replace('__', '.')}": value for name, value in overrides.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(**overrides: Any) -> dict[str, Any]:
    """Return the metadata of a small SentencePiece BPE: control, byte and user-defined tokens, pieces by rank."""
    ranked = list(SENTENCE_PIECES)
    letters = list("abcdefghijklmnopqrstuvwxyzTé.,你好世界")
    tokens = ["<unk>", "<s>", "</s>", "\n\n", *[f"<0x{byte:02X}>" for byte in range(256)], *ranked, "▁", *letters]
    kinds = [2, 3, 3, 4, *[6] * 256, *[1] * (len(ranked) + 1 + len(letters))]
    num_unranked = 4 + 256
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * num_unranked + [-float(rank) for rank in range(len(tokens) - num_unranked)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.{name.replace('__', '.')}": value for name, value in overrides.items()}
