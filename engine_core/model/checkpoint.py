"""A checkpoint on disk, checked before anything is loaded: its ArchSpec, its tensors' names and shapes, its defaults.

Reads headers and JSON, never a tensor's data, and unpickles nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_core.errors import CheckpointError
from engine_core.model.arch import ArchSpec, arch_from_config
from engine_core.model.config_fields import ConfigFields
from engine_core.model.gguf_source import open_gguf
from engine_core.model.safetensors_source import SafetensorsSource, find_safetensors
from engine_core.model.weights import GenerationDefaults, ImaginedSource, WeightSource

_MAX_NAMED = 5
_READABLE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files, opened and found complete.

    Attributes:
        path: The directory or .gguf file.
        arch: What the decoder is built from.
        weights: The tensors, by Hugging Face name.
        generation: What the checkpoint says about generating.
        gguf_metadata: A GGUF's key-value pairs (the tokenizer is among them); empty for a directory.
    """

    path: Path
    arch: ArchSpec
    weights: WeightSource
    generation: GenerationDefaults
    gguf_metadata: Mapping[str, Any] = field(default_factory=dict)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a directory of safetensors files or a .gguf file, and check that every tensor is there in its shape.

    Raises:
        CheckpointError: The path, a file, a config key or a tensor is missing, broken or not supported.
    """
    if path.is_dir():
        return _open_directory(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    if path.exists():
        raise CheckpointError(f"{path} is neither a directory with a config.json nor a .gguf file.")
    raise CheckpointError(f"{path} does not exist.")


def imagine_checkpoint(directory: Path) -> Checkpoint:
    """Return the checkpoint that a directory's config.json promises, though none of its weights are there yet.

    Its tensors have shapes and a stored dtype, to be measured by; they cannot be read.

    Raises:
        CheckpointError: The config is missing, broken or of no supported architecture.
    """
    config = _read_json(directory / "config.json")
    arch = arch_from_config(config)
    return Checkpoint(directory, arch, ImaginedSource(expected_shapes(arch)), _generation_defaults(directory, config))


def expected_shapes(arch: ArchSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that the decoder reads."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, arch.hidden_size),
        "model.norm.weight": (arch.hidden_size,),
    }
    if not arch.tie_word_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, arch.hidden_size)
    layer = _layer_shapes(arch)
    for index in range(arch.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(arch: ArchSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    q_size, kv_size = arch.num_q_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, arch.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, arch.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, arch.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, arch.o_bias),
        "mlp.gate_proj": (inner, hidden, arch.mlp_bias),
        "mlp.up_proj": (inner, hidden, arch.mlp_bias),
        "mlp.down_proj": (hidden, inner, arch.mlp_bias),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if arch.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    if arch.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (arch.head_dim,), "self_attn.k_norm.weight": (arch.head_dim,)}
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def _open_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} has no config.json, so it is no checkpoint in Hugging Face's form.{_hint_at_gguf(path)}"
        )
    # Files before config: a directory of pickles is refused as such, whatever its architecture.
    files = find_safetensors(path)
    config = _read_json(path / "config.json")
    arch = arch_from_config(config)
    weights = SafetensorsSource(files)
    _check_tensors(arch, weights.shapes)
    _check_dtypes(arch, weights.dtypes)
    return Checkpoint(path, arch, weights, _generation_defaults(path, config))


def _hint_at_gguf(directory: Path) -> str:
    ggufs = sorted(directory.glob("*.gguf"))
    return f" Name a .gguf file in it, such as {ggufs[0]}." if ggufs else ""


def _open_gguf(path: Path) -> Checkpoint:
    gguf = open_gguf(path)
    arch = arch_from_config(gguf.config)
    _check_tensors(arch, gguf.weights.shapes)
    return Checkpoint(path, arch, gguf.weights, gguf.generation, gguf.metadata)


def _check_tensors(arch: ArchSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare what the decoder needs with what is there. More than needed is fine: towers, caches, a tied head."""
    expected = expected_shapes(arch)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise CheckpointError(f"{_listed('tensor', missing)} missing from the checkpoint.")
    wrong = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if shapes[name] != shape
    ]
    if wrong:
        raise CheckpointError(f"{_listed('tensor', wrong)} not of the shape that the config implies.")


def _check_dtypes(arch: ArchSpec, dtypes: Mapping[str, str]) -> None:
    unreadable = [f"{name} ({dtypes[name]})" for name in expected_shapes(arch) if dtypes[name] not in _READABLE_DTYPES]
    if unreadable:
        raise CheckpointError(f"{_listed('tensor', unreadable)} not stored as F32, F16 or BF16.")


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    subject = f"1 {what} is" if len(names) == 1 else f"{len(names)} {what}s are"
    return f"{', '.join(names[:_MAX_NAMED])}{more}: {subject}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return value


def _generation_defaults(path: Path, config: Mapping[str, Any]) -> GenerationDefaults:
    file = path / "generation_config.json"
    fields = ConfigFields(_read_json(file) if file.is_file() else {}, file.name)
    nested = ConfigFields(config, "config.json").section("text_config")
    model = ConfigFields(config, "config.json").with_defaults(nested.raw if nested else {})
    return GenerationDefaults(
        eos_token_ids=_token_ids(fields, "eos_token_id") or _token_ids(model, "eos_token_id"),
        temperature=_sampling_default(fields, "temperature", lambda value: 0.0 <= value < math.inf, "0 or more"),
        top_p=_sampling_default(fields, "top_p", lambda value: 0.0 < value <= 1.0, "above 0 and at most 1"),
        top_k=_top_k(fields),
        min_p=_sampling_default(fields, "min_p", lambda value: 0.0 <= value <= 1.0, "from 0 to 1"),
        repetition_penalty=_sampling_default(
            fields, "repetition_penalty", lambda value: 0.01 <= value <= 100.0, "from 0.01 to 100"
        ),
    )


def _sampling_default(fields: ConfigFields, key: str, is_valid: Callable[[float], bool], must_be: str) -> float | None:
    """A default is used as it stands, so it is held to what a request's own value is held to. NaN fails any range."""
    value = fields.optional_number(key)
    if value is not None and not is_valid(value):
        raise fields.error(key, must_be)
    return value


def _top_k(fields: ConfigFields) -> int | None:
    value = fields.optional_int("top_k")
    if value is not None and value < -1:
        raise fields.error("top_k", "a count of tokens, or 0 or -1 for all")
    return value


def _token_ids(fields: ConfigFields, key: str) -> frozenset[int]:
    value = fields.raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in ids):
        raise fields.error(key, "a token id or a list of them")
    return frozenset(ids)
