"""From config.json to ArchSpec: each family, both dialects of rope, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.errors import CheckpointError
from engine_core.model.arch import arch_from_config, attn_specs
from engine_core.model.rope import RopeSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 512}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama() -> None:
    arch = arch_from_config(LLAMA)
    assert arch.architecture == "LlamaForCausalLM"
    assert (arch.num_q_heads, arch.num_kv_heads, arch.head_dim) == (4, 2, 16)
    assert arch.sm_scale == 0.25
    assert arch.windows == (-1, -1, -1, -1)
    assert arch.activation == "silu"
    assert not (arch.qkv_bias or arch.o_bias or arch.mlp_bias or arch.tie_word_embeddings or arch.qk_norm)
    assert arch.rope == RopeSpec(10_000.0)
    assert arch.local_rope is None


def test_llama_options() -> None:
    arch = arch_from_config(
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}
    )
    assert arch.qkv_bias and arch.o_bias and arch.mlp_bias and arch.tie_word_embeddings
    assert arch.head_dim == 32


def test_null_means_absent() -> None:
    arch = arch_from_config({**LLAMA, "head_dim": None, "num_key_value_heads": None, "rope_scaling": None})
    assert (arch.head_dim, arch.num_kv_heads) == (16, 4)


@pytest.mark.parametrize(
    ("window", "expected"), [({}, 4095), ({"sliding_window": 6}, 5), ({"sliding_window": None}, -1)]
)
def test_mistral_window_counts_the_query_itself(window: dict[str, Any], expected: int) -> None:
    assert arch_from_config({**MISTRAL, **window}).windows == (expected,) * 4


def test_qwen2_windows_the_last_layers_when_switched_on() -> None:
    options = {"sliding_window": 10, "max_window_layers": 3}
    assert arch_from_config({**QWEN2, **options}).windows == (-1,) * 4
    arch = arch_from_config({**QWEN2, **options, "use_sliding_window": True})
    assert arch.windows == (-1, -1, -1, 9)
    assert arch.qkv_bias and not arch.o_bias


def test_qwen3() -> None:
    arch = arch_from_config(QWEN3)
    assert arch.head_dim == 128
    assert arch.qk_norm and not arch.qkv_bias


def test_gemma3() -> None:
    arch = arch_from_config({**GEMMA3, "query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0})
    assert arch.windows == (511, 511, 511, 511, 511, -1, 511)
    assert arch.embed_scale == 8.0
    assert arch.sm_scale == 0.125
    assert arch.final_soft_cap == 30.0
    assert arch.attn_soft_cap == 0.0
    assert arch.activation == "gelu_tanh"
    assert arch.qk_norm and arch.post_norms and arch.norm_unit_offset and arch.tie_word_embeddings
    assert arch.rope == RopeSpec(1_000_000.0)
    assert arch.local_rope == RopeSpec(10_000.0)


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma3_window_pattern(key: str) -> None:
    assert arch_from_config({**GEMMA3, key: 2}).windows == (511, -1, 511, -1, 511, -1, 511)


def test_gemma3_layer_types_win() -> None:
    kinds = ["full_attention"] * 6 + ["sliding_attention"]
    assert arch_from_config({**GEMMA3, "layer_types": kinds}).windows == (-1,) * 6 + (511,)


def test_gemma3_with_vision_leaves_most_to_defaults() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    arch = arch_from_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (arch.num_q_heads, arch.num_kv_heads, arch.head_dim) == (8, 4, 256)
    assert arch.vocab_size == 262_208
    assert arch.tie_word_embeddings
    assert arch.rope == RopeSpec(1_000_000.0, "linear", factor=8.0)
    assert arch.local_rope == RopeSpec(10_000.0)


def test_attn_specs_follow_the_layers() -> None:
    arch = arch_from_config({**GEMMA3, "attn_logit_softcapping": 50.0})
    specs = attn_specs(arch)
    assert [spec.window_left for spec in specs] == list(arch.windows)
    assert {(spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.soft_cap) for spec in specs} == {
        (4, 2, 256, 50.0)
    }


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}, RopeSpec(5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
            RopeSpec(5e5, "linear", factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING},
            {"rope_theta": 5e5, **LLAMA3_SCALING},
            RopeSpec(5e5, "llama3", factor=32.0, high_freq_factor=4.0, original_max_position=8192),
        ),
    ],
)
def test_rope_dialects_agree(old: dict[str, Any], new: dict[str, Any], expected: RopeSpec) -> None:
    assert arch_from_config({**LLAMA, **old}).rope == expected
    assert arch_from_config({**LLAMA, "rope_parameters": new}).rope == expected


def test_gemma3_rope_dialects_agree() -> None:
    old = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "full_attention": {"rope_theta": 2e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 3e4, "rope_type": "default"},
    }
    first, second = arch_from_config({**GEMMA3, **old}), arch_from_config({**GEMMA3, "rope_parameters": new})
    assert first == second
    assert first.rope == RopeSpec(2e6, "linear", factor=8.0)
    assert first.local_rope == RopeSpec(3e4)


def test_yarn_stretches_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    arch = arch_from_config({**QWEN2, "rope_scaling": scaling})
    assert arch.rope.attention_factor == pytest.approx(1.138629436)
    assert arch.max_position_embeddings == 8192


def test_yarn_options() -> None:
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512, "beta_fast": 16}
    rope = arch_from_config({**LLAMA, "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}}).rope
    assert (rope.factor, rope.beta_fast, rope.beta_slow, rope.attention_factor) == (4.0, 16.0, 1.0, 1.0)
    assert arch_from_config({**LLAMA, "rope_scaling": {**yarn, "attention_factor": 1.5}}).rope.attention_factor == 1.5


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        arch_from_config(without(LLAMA, key))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("num_attention_heads", -4),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", -2),
        ("head_dim", 15),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("hidden_act", "relu"),
        ("hidden_act", 7),
        ("rope_theta", "big"),
        ("rope_theta", 0.5),
        ("rope_scaling", "linear"),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_bad_value_is_named(key: str, value: Any) -> None:
    named = "gptq" if key == "quantization_config" else key
    with pytest.raises(CheckpointError, match=named):
        arch_from_config({**LLAMA, key: value})


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_unknown_rope_scaling_is_named(kind: str) -> None:
    with pytest.raises(CheckpointError, match=kind):
        arch_from_config({**LLAMA, "rope_scaling": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        (without(LLAMA3_SCALING, "low_freq_factor"), "low_freq_factor"),
        ({**LLAMA3_SCALING, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "truncate"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "layer type"),
    ],
)
def test_bad_rope_scaling_is_named(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        arch_from_config({**LLAMA, "rope_parameters": scaling})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, "layer_types"),
        ({**GEMMA3, "layer_types": ["linear_attention"] * 7}, "linear_attention"),
        ({**GEMMA3, "sliding_window": None}, "sliding_window"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config"),
    ],
)
def test_bad_layers_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        arch_from_config(config)


@pytest.mark.parametrize("names", [["MambaForCausalLM"], [], None])
def test_unknown_architecture_lists_the_supported(names: list[str] | None) -> None:
    with pytest.raises(CheckpointError) as caught:
        arch_from_config({**LLAMA, "architectures": names})
    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForConditionalGeneration", *(names or ())):
        assert name in str(caught.value)
