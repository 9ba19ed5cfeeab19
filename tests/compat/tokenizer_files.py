"""The embedded model's tokenizer as a directory that transformers loads, for clients that count tokens themselves."""

from __future__ import annotations

import json
from pathlib import Path

from engine_core.model.gguf_source import open_gguf
from server.config import default_cache_dir
from server.gguf_tokenizer import rebuild_tokenizer
from server.model_resolver import fetch_embedded_model


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json, and return the folder."""
    metadata = open_gguf(fetch_embedded_model(default_cache_dir(), progress=print)).metadata
    rebuilt = rebuild_tokenizer(metadata)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": rebuilt.bos_token,
        "eos_token": rebuilt.eos_token,
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    rebuilt.pipeline.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
