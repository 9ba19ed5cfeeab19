"""Does the model fit, and for how many: the engine's own forecast, and the findings that follow from it.

Imports the engine, hence torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_core import CheckpointError, ConfigError
from engine_core.engine import Checkpoint, Forecast, forecast, imagine_checkpoint, open_checkpoint
from server.chat_template import ChatTemplate, ChatTemplateError
from server.config import ServerConfig
from server.doctor.findings import Finding, error, note, warning
from server.doctor.units import format_size
from server.model_lookup import ModelPlace
from server.tokenizer import load_tokenizer

_FOR_HOST = "Use --kv-cache-dtype int8, give it more memory"
_FOR_CARD = "Raise --gpu-memory-utilization, stop what else is on the card"


@dataclass(frozen=True, slots=True)
class Fit:
    """What came of asking the engine.

    Attributes:
        checkpoint: Opened, or imagined from its config; None where neither was possible.
        forecast: None where there is no checkpoint, or the configuration does not suit it.
        findings: What there is to say.
    """

    checkpoint: Checkpoint | None
    forecast: Forecast | None
    findings: tuple[Finding, ...]


def find_fit(config: ServerConfig, place: ModelPlace, *, available: int) -> Fit:
    """Return whether a model fits.

    Args:
        config: The server's.
        place: Where the model is.
        available: Bytes that may be taken.
    """
    try:
        checkpoint = _open(place)
    except CheckpointError as failure:
        says, todo = str(failure).rstrip("."), "Fetch it again, or serve another model."
        return Fit(None, None, (error("model", says, todo),))
    if checkpoint is None:
        return Fit(None, None, tuple(_check_download_alone(place, available)))
    text = _check_text(checkpoint) if place.path is not None else ()
    try:
        found = forecast(config.to_engine_config(checkpoint.path), checkpoint, available=available)
    except ConfigError as failure:
        finding = error("settings", str(failure).rstrip("."), "Change or leave out that flag.")
        return Fit(checkpoint, None, (finding, *text))
    return Fit(checkpoint, found, (*_check_forecast(config, checkpoint, found), *text))


def _open(place: ModelPlace) -> Checkpoint | None:
    if place.path is not None:
        return open_checkpoint(place.path)
    return None if place.config_dir is None else imagine_checkpoint(Path(place.config_dir))


def _check_text(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """What turns text into tokens and back, which the engine does not know of."""
    try:
        tokenizer = load_tokenizer(checkpoint.path, checkpoint.gguf_metadata)
    except CheckpointError as failure:
        return (error("tokenizer", str(failure).rstrip("."), "Fetch the model again, with its tokenizer files."),)
    if tokenizer.chat_template is None:
        return (note("chat", "the model has no chat template: completions work, chat is refused"),)
    try:
        ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    except ChatTemplateError as failure:
        todo = "Completions work and chat is refused; a newer copy of the model may have it mended."
        return (warning("chat", str(failure).rstrip("."), todo),)
    return ()


def _check_download_alone(place: ModelPlace, available: int) -> Iterator[Finding]:
    """Nothing is known but the size: a quantised file takes about as much memory as it does on disk."""
    if place.download_bytes is None:
        return
    size = format_size(place.download_bytes)
    if place.download_bytes > available:
        says = f"the file is {size}, and {format_size(available)} are free"
        yield error("fit", says, "Give it more memory, or choose a smaller model.")
    else:
        yield note("fit", f"known exactly once the {size} are downloaded: until then its size is all there is to go by")


def _check_forecast(config: ServerConfig, checkpoint: Checkpoint, found: Forecast) -> Iterator[Finding]:
    if found.state is None:
        says, _, todo = found.problem.rpartition(": ")
        yield error("fit", says or found.problem, f"{todo[:1].upper()}{todo[1:]}.")
        return
    asked = config.max_model_len or checkpoint.arch.max_position_embeddings
    if found.state.max_model_len < asked:
        is_card = found.config.device.backend == "cuda"
        yield warning(
            "context",
            f"the KV cache holds {found.state.max_model_len:,} tokens, fewer than the context of {asked:,}: requests "
            "end there",
            f"{_FOR_CARD if is_card else _FOR_HOST}, or say so with --max-model-len.",
        )
    elif found.state.num_blocks * found.state.block_size < 2 * asked:
        yield note("context", "fewer than two requests of full length fit at once; shorter ones share the cache")
