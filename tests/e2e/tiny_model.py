"""A model that any machine loads in no time and that says nothing sensible: for tests of everything around a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.gguf_files import llama_metadata, llama_tensors, write_gguf
from tests.server.small_tokenizers import byte_level_metadata

CONTEXT = 4096


def write_tiny_model(directory: Path) -> Path:
    """Write it as tiny.gguf, and return where. It has two layers, some 500 tokens and CONTEXT."""
    tokenizer = byte_level_metadata()
    tensors = llama_tensors()
    num_tokens = len(tokenizer["tokenizer.ggml.tokens"])
    embeddings = np.random.default_rng(1).standard_normal((num_tokens, 64)).astype(np.float32)
    tensors["token_embd.weight"] = embeddings
    return write_gguf(directory / "tiny.gguf", llama_metadata(llama__context_length=CONTEXT) | tokenizer, tensors)
