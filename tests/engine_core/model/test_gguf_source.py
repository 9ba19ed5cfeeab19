"""GGUF files read as Hugging Face checkpoints: config, names, row order, norms, every tensor type, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from engine_core.errors import CheckpointError
from engine_core.model.arch import arch_from_config
from engine_core.model.gguf_file import SUPPORTED_TYPES, open_container
from engine_core.model.gguf_source import open_gguf
from tests.gguf_files import llama_metadata, llama_tensors, write_gguf


def permute_as_llama_cpp(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What the converter does to q and k."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def retitled(architecture: str, **overrides: Any) -> dict[str, Any]:
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in llama_metadata().items()}
    metadata["general.architecture"] = architecture
    return metadata | {name.replace("__", "."): value for name, value in overrides.items()}


def gemma_tensors() -> dict[str, np.ndarray]:
    tensors = llama_tensors()
    for layer in range(2):
        for name, width in (("post_attention_norm", 64), ("post_ffw_norm", 64), ("attn_q_norm", 16)):
            tensors[f"blk.{layer}.{name}.weight"] = np.full(width, 1.25, np.float32)
        tensors[f"blk.{layer}.attn_k_norm.weight"] = np.full(16, 1.5, np.float32)
    return tensors


def test_a_llama_file_has_the_config_and_names_of_its_checkpoint(tmp_path: Path) -> None:
    gguf = open_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors()))
    arch = arch_from_config(gguf.config)
    assert (arch.architecture, arch.vocab_size, arch.hidden_size, arch.num_layers) == ("LlamaForCausalLM", 32, 64, 2)
    assert (arch.num_q_heads, arch.num_kv_heads, arch.head_dim, arch.intermediate_size) == (4, 2, 16, 96)
    assert arch.rms_norm_eps == 1e-5
    assert arch.rope.theta == 10_000.0
    assert arch.max_position_embeddings == 128
    assert arch.tie_word_embeddings
    assert gguf.weights.shapes["model.layers.1.mlp.down_proj.weight"] == (64, 96)
    assert len(gguf.weights.shapes) == 2 + 2 * 9


def test_q_and_k_rows_come_back_in_halves(tmp_path: Path) -> None:
    tensors = llama_tensors()
    original_q, original_k = tensors["blk.0.attn_q.weight"], tensors["blk.0.attn_k.weight"]
    bias = np.arange(64, dtype=np.float32)
    stored = tensors | {
        "blk.0.attn_q.weight": permute_as_llama_cpp(original_q, 4),
        "blk.0.attn_k.weight": permute_as_llama_cpp(original_k, 2),
        "blk.0.attn_q.bias": permute_as_llama_cpp(bias, 4),
    }
    gguf = open_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata(), stored))
    read = gguf.weights.read
    assert np.array_equal(read("model.layers.0.self_attn.q_proj.weight").numpy(), original_q)
    assert np.array_equal(read("model.layers.0.self_attn.k_proj.weight").numpy(), original_k)
    assert np.array_equal(read("model.layers.0.self_attn.q_proj.bias").numpy(), bias)
    assert np.array_equal(read("model.layers.0.self_attn.v_proj.weight").numpy(), tensors["blk.0.attn_v.weight"])
    assert gguf.config["attention_bias"] is True


def test_qwen_rows_are_left_alone_and_an_output_tensor_unties_the_head(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"output.weight": np.ones((32, 64), np.float32)}
    gguf = open_gguf(write_gguf(tmp_path / "m.gguf", retitled("qwen2"), tensors))
    assert gguf.config["architectures"] == ["Qwen2ForCausalLM"]
    assert gguf.config["tie_word_embeddings"] is False
    assert gguf.weights.read("lm_head.weight").sum() == 32 * 64
    stored = torch.from_numpy(tensors["blk.0.attn_q.weight"])
    assert torch.equal(gguf.weights.read("model.layers.0.self_attn.q_proj.weight"), stored)


def test_gemma_norms_lose_the_folded_one_and_layers_their_kinds(tmp_path: Path) -> None:
    metadata = retitled("gemma3", gemma3__attention__sliding_window=16, gemma3__block_count=2)
    gguf = open_gguf(write_gguf(tmp_path / "m.gguf", metadata, gemma_tensors()))
    read = gguf.weights.read
    assert torch.equal(read("model.layers.1.post_feedforward_layernorm.weight"), torch.full((64,), 0.25))
    assert torch.equal(read("model.layers.0.self_attn.k_norm.weight"), torch.full((16,), 0.5))
    stored = torch.from_numpy(llama_tensors()["blk.0.ffn_norm.weight"])
    assert torch.equal(read("model.layers.0.pre_feedforward_layernorm.weight"), stored - 1.0)
    arch = arch_from_config(gguf.config)
    assert arch.windows == (15, 15)
    assert arch.local_rope is None  # this file gives both kinds the base 10000
    assert arch.sm_scale == 16**-0.5


def test_gemma_270m_shape_of_layers_and_bases(tmp_path: Path) -> None:
    metadata = retitled(
        "gemma3",
        gemma3__block_count=18,
        gemma3__attention__sliding_window=512,
        gemma3__rope__freq_base=1_000_000.0,
    )
    arch = arch_from_config(open_gguf(write_gguf(tmp_path / "m.gguf", metadata, llama_tensors())).config)
    assert [layer for layer, window in enumerate(arch.windows) if window == -1] == [5, 11, 17]
    assert arch.rope.theta == 1_000_000.0
    assert arch.local_rope is not None
    assert arch.local_rope.theta == 10_000.0


@pytest.mark.parametrize("name", SUPPORTED_TYPES)
def test_every_supported_type_reads_as_gguf_itself_dequantises(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    shape = (1024, 512)  # several of the chunks that are dequantised at a time, the last one short
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(1)
    try:
        stored = quantize(random.standard_normal(shape).astype(np.float32), kind)
    except NotImplementedError:  # gguf cannot write K-quants: any bytes are blocks once the fp16 scales are finite
        stored = random.integers(0, 64, (shape[0], shape[1] // block_elements * block_bytes)).astype(np.uint8)
    path = tmp_path / "m.gguf"
    write_raw_tensor(path, stored, kind)
    read = open_gguf(path).weights.read("model.embed_tokens.weight")
    assert read.shape == shape
    assert read.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
    assert np.array_equal(read.float().numpy(), dequantize(stored, kind).reshape(shape))


def write_raw_tensor(path: Path, stored: np.ndarray, kind: GGMLQuantizationType) -> None:
    writer = GGUFWriter(str(path), "llama")
    for key, value in llama_metadata().items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_metadata_arrives_as_plain_values(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.tokens": ["a", "é", "▁"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.5],
        "tokenizer.ggml.token_type": [1, 3, 1],
        "tokenizer.ggml.add_bos_token": False,
    }
    metadata = open_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata() | extra, llama_tensors())).metadata
    assert {key: metadata[key] for key in extra} == extra


def test_eos_and_eot_end_an_output(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}
    generation = open_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata() | ids, llama_tensors())).generation
    assert generation.eos_token_ids == {7, 9}


def test_a_turn_end_is_found_by_its_text_where_no_eot_is_named(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.tokens": ["<eos>", "<end_of_turn>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [3, 3, 1],
    }
    generation = open_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata() | extra, llama_tensors())).generation
    assert generation.eos_token_ids == {0, 1}  # 2 is an ordinary token that only looks like one


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = open_gguf(write_gguf(tmp_path / "l.gguf", llama_metadata() | scaling, llama_tensors())).config
    assert arch_from_config(config).rope.factor == 4.0
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    config = open_gguf(write_gguf(tmp_path / "y.gguf", llama_metadata() | scaling, llama_tensors())).config
    rope = arch_from_config(config).rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)


def llama3_divisors(factor: float, head_dim: int = 16, theta: float = 500_000.0) -> np.ndarray:
    """The converter's own formula, by wavelength."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (index / head_dim)
        smooth = (8192 / wavelength - 1.0) / 3.0
        divisors.append(1.0 if smooth > 1 else factor if smooth < 0 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    metadata = llama_metadata(llama__rope__freq_base=500_000.0)
    tensors = llama_tensors() | {"rope_freqs.weight": llama3_divisors(32.0)}
    rope = arch_from_config(open_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors)).config).rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        open_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors))


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        (retitled("mamba"), "'mamba'; supported in GGUF are llama, qwen2, qwen3, gemma3"),
        (llama_metadata(llama__expert_count=8), "mixture of 8 experts"),
        (llama_metadata(llama__block_count=None), "does not say block_count"),
        (llama_metadata(llama__rope__dimension_count=8), r"rope\.dimension_count is 8, the heads are 16 wide"),
        (llama_metadata(llama__rope__scaling__type="longrope"), "rope scaling 'longrope' is not supported"),
        (llama_metadata(split__count=3), "one part of several"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, metadata: dict[str, Any], sentence: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata, llama_tensors())
    with pytest.raises(CheckpointError, match=sentence):
        open_gguf(path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"blk.0.ssm_in.weight": np.ones((4, 4), np.float32)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_in\.weight, which LlamaForCausalLM lacks"):
        open_gguf(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors))


def test_an_unsupported_tensor_type_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_raw_tensor(path, np.zeros((4, 84), np.uint8), GGMLQuantizationType.Q2_K)
    with pytest.raises(CheckpointError, match="stored as Q2_K; supported are F32"):
        open_gguf(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.tokens": ["<s>", "a"], "tokenizer.ggml.scores": [0.0, 1.0]}
    whole = write_gguf(tmp_path / "m.gguf", llama_metadata() | extra, llama_tensors(num_layers=1)).read_bytes()
    cut = tmp_path / "cut.gguf"
    header_end = len(whole) - sum(tensor.nbytes for tensor in llama_tensors(num_layers=1).values())
    for length in [*range(0, header_end, 7), header_end + 5, len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_container(cut)


def test_damaged_header_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(num_layers=1)).read_bytes())
    header_end = len(whole) - sum(tensor.nbytes for tensor in llama_tensors(num_layers=1).values())
    broken = tmp_path / "broken.gguf"
    num_refused = 0
    for position in range(4, header_end):
        damaged = bytearray(whole)
        damaged[position : position + 4] = b"\xff\xff\xff\xff"
        broken.write_bytes(damaged)
        try:
            open_gguf(broken)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 500


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(CheckpointError, match="does not start with GGUF"):
        open_container(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_container(tmp_path / "absent.gguf")
