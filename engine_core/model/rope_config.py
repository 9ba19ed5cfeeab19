"""A config's rotary settings, in either dialect, as RopeSpecs. Knows nothing else of the architecture.

Transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 ``rope_parameters``, flat or per layer type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from engine_core.errors import CheckpointError
from engine_core.model.config_fields import ConfigFields
from engine_core.model.rope import RopeSpec

_DEFAULT_THETA = 10_000.0


def rope_from_config(fields: ConfigFields) -> RopeSpec:
    """Return the one RopeSpec of a model whose layers all share it.

    Raises:
        CheckpointError: A scaling that is not known, or a key that is missing or ill-typed.
    """
    params = fields.section("rope_scaling") or fields.section("rope_parameters") or _nothing(fields)
    if any(isinstance(value, Mapping) for value in params.raw.values()):
        raise CheckpointError(f"{params.origin} differs per layer type, which this architecture does not do.")
    return _rope(fields, params, fields.optional_number("rope_theta") or _DEFAULT_THETA)


def ropes_by_layer_type(fields: ConfigFields, theta: float, local_theta: float) -> tuple[RopeSpec, RopeSpec]:
    """Return the RopeSpecs of full and of window layers (Gemma 3). A flat scaling belongs to the full ones.

    Args:
        fields: The config.
        theta: Of full layers where the config gives none.
        local_theta: Of window layers where the config gives none.

    Raises:
        CheckpointError: A scaling that is not known, or a key that is missing or ill-typed.
    """
    params = fields.section("rope_parameters") or _nothing(fields)
    full = params.section("full_attention")
    local = params.section("sliding_attention")
    if full is None and local is None:
        full = params
    full = fields.section("rope_scaling") or full or _nothing(fields)
    return (
        _rope(fields, full, fields.optional_number("rope_theta") or theta),
        _rope(fields, local or _nothing(fields), fields.optional_number("rope_local_base_freq") or local_theta),
    )


def _nothing(fields: ConfigFields) -> ConfigFields:
    return ConfigFields({}, fields.origin)


def _rope(fields: ConfigFields, params: ConfigFields, theta: float) -> RopeSpec:
    _refuse_partial(fields)
    _refuse_partial(params)
    theta = params.optional_number("rope_theta") or theta
    if theta <= 1.0:
        raise params.error("rope_theta", "above 1")
    kind = params.raw.get("rope_type") or params.raw.get("type") or "default"
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=params.positive("factor"))
    if kind == "llama3":
        return _llama3(fields, params, theta)
    if kind == "yarn":
        return _yarn(fields, params, theta)
    raise CheckpointError(
        f"{params.origin}: rope type {kind!r} is not supported; supported are default, linear, llama3 and yarn."
    )


def _llama3(fields: ConfigFields, params: ConfigFields, theta: float) -> RopeSpec:
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    if high <= low:
        raise params.error("high_freq_factor", f"above low_freq_factor, {low}")
    return RopeSpec(
        theta,
        "llama3",
        factor=params.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_original_max_position(fields, params),
    )


def _yarn(fields: ConfigFields, params: ConfigFields, theta: float) -> RopeSpec:
    if params.raw.get("truncate") is False:
        raise CheckpointError(f"{params.origin}: yarn with truncate false is not supported.")
    original = _original_max_position(fields, params)
    factor = (
        fields.count("max_position_embeddings") / original
        if params.raw.get("factor") is None
        else params.positive("factor")
    )
    attention_factor = params.optional_number("attention_factor")
    return RopeSpec(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=params.optional_number("beta_fast") or 32.0,
        beta_slow=params.optional_number("beta_slow") or 1.0,
        attention_factor=_yarn_attention_factor(params, factor) if attention_factor is None else attention_factor,
    )


def _yarn_attention_factor(params: ConfigFields, factor: float) -> float:
    mscale, mscale_all_dim = params.optional_number("mscale"), params.optional_number("mscale_all_dim")
    if factor <= 1.0:
        return 1.0
    if mscale and mscale_all_dim:  # DeepSeek's form
        return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all_dim * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def _original_max_position(fields: ConfigFields, params: ConfigFields) -> int:
    key = "original_max_position_embeddings"
    for source in (fields, params):
        if source.raw.get(key) is not None:
            return source.count(key)
    return fields.count("max_position_embeddings")


def _refuse_partial(fields: ConfigFields) -> None:
    share = fields.optional_number("partial_rotary_factor")
    if share is not None and share != 1.0:
        raise CheckpointError(f"{fields.origin}: partial_rotary_factor {share} is not supported; only 1 is.")
