"""Whole models on every instruction set: against the reference in fp32, and bit by bit against themselves.

A row's bits may not depend on the other rows, the chunk it came in, the threads, or on what is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine_core.model.arch import ArchSpec
from engine_core.model.checkpoint import Checkpoint
from engine_core.model.decoder import LanguageModel
from engine_core.model.fused_loader import model_spec
from engine_core.model.rope import RopeSpec
from kernels.backend import BackendOptions, NotFusableError, UnusableIsaError, create_backend
from kernels.cpu_backend import CpuBackend
from kernels.cpu_library import KernelError
from kernels.fused import Storage
from tests.kernels.cpu_machines import ISAS, QUANTISED, row_multiple
from tests.kernels.fused_case import (
    Prompt,
    Run,
    create_arch,
    create_checkpoint,
    load_kernels,
    load_reference,
    random_tokens,
)

isas = pytest.mark.parametrize("isa", ISAS)
Logits = np.ndarray[Any, Any]

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "head_dim_64": {"head_dim": 64, "num_q_heads": 9, "num_kv_heads": 3, "hidden_size": 100},
    "head_dim_80": {"head_dim": 80, "num_q_heads": 2, "num_kv_heads": 2, "hidden_size": 130},
    "head_dim_96": {"head_dim": 96, "num_q_heads": 4, "num_kv_heads": 1, "hidden_size": 65},
    "head_dim_128": {"head_dim": 128, "num_q_heads": 8, "num_kv_heads": 1, "intermediate_size": 16},
    "head_dim_256": {"head_dim": 256, "num_q_heads": 2, "num_kv_heads": 1, "activation": "gelu_tanh"},
    "head_dim_48": {"head_dim": 48, "num_q_heads": 3, "num_kv_heads": 1, "vocab_size": 2, "intermediate_size": 23},
    "many_heads": {"num_q_heads": 16, "num_kv_heads": 2, "vocab_size": 333},
    "window": {"windows": (17, -1), "local_rope": RopeSpec(500.0)},
    "narrow_window": {"windows": (0, 3)},
    "soft_caps": {"attn_soft_cap": 1.5, "final_soft_cap": 2.0},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True, "tie_word_embeddings": False},
    "gemma": {
        "qk_norm": True,
        "norm_unit_offset": True,
        "post_norms": True,
        "embed_scale": 9.8125,
        "activation": "gelu_tanh",
        "windows": (9, -1),
    },
}
# Decodes, whole prompts, extends of a cached prefix; pages full, partial and just begun.
MIXED = ((1, 1), (1, 64), (1, 65), (1, 130), (5, 5), (2, 97), (33, 70), (64, 64), (130, 161))


def create_run(checkpoint: Checkpoint, isa: str, **options: Any) -> Run:
    return Run(load_kernels(checkpoint, isa, **options))


def prompts(run: Run, sizes: Sequence[tuple[int, int]]) -> list[tuple[Prompt, int]]:
    """Requests of which all but the last q_len tokens are computed, each in a step of its own."""
    vocab_size = run.model.arch.vocab_size
    work = []
    for index, (q_len, kv_len) in enumerate(sizes):
        prompt = run.sequence(random_tokens(kv_len, seed=index, vocab_size=vocab_size))
        if kv_len > q_len:
            run.step([(prompt, kv_len - q_len)])
        work.append((prompt, q_len))
    return work


def relative_error(found: Logits, expected: Logits) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def assert_agrees(model: LanguageModel, reference: LanguageModel, max_error: float) -> None:
    runs = [Run(model), Run(reference)]
    found, expected = (run.step(prompts(run, MIXED)) for run in runs)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < max_error


# ---------------------------------------------------------------------- against the reference
@isas
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_agrees_with_the_reference(isa: str, shape: str) -> None:
    checkpoint = create_checkpoint(create_arch(**SHAPES[shape]))
    assert_agrees(load_kernels(checkpoint, isa), load_reference(checkpoint), 0.03)


@isas
def test_every_q_len_to_130(isa: str) -> None:
    checkpoint = create_checkpoint(create_arch(head_dim=64, num_q_heads=3, num_kv_heads=1, num_layers=1, windows=(-1,)))
    runs = [create_run(checkpoint, isa, num_threads=2), Run(load_reference(checkpoint))]
    for q_len in range(1, 131, 3):
        found, expected = (
            run.step([(run.sequence(random_tokens(q_len, seed=q_len)), q_len)])[0] for run in map(_emptied, runs)
        )
        assert relative_error(found, expected) < 0.02


def _emptied(run: Run) -> Run:
    return Run(run.model, num_pages=8)


@isas
@pytest.mark.parametrize(("quantization", "max_error"), [("none", 0.02), ("int8", 0.12), ("int4", 0.6)])
@pytest.mark.parametrize("is_tied", [True, False])
def test_smaller_weights_stay_near_the_reference(isa: str, quantization: str, max_error: float, is_tied: bool) -> None:
    checkpoint = create_checkpoint(create_arch(tie_word_embeddings=is_tied, hidden_size=128, intermediate_size=160))
    model = load_kernels(checkpoint, isa, quantization=quantization)
    assert_agrees(model, load_reference(checkpoint), max_error)


@isas
@pytest.mark.parametrize("storage", QUANTISED, ids=lambda storage: storage.name)
def test_stored_blocks_agree_with_the_reference(isa: str, storage: Storage) -> None:
    size = 256 if row_multiple(storage) == 256 else 128
    arch = create_arch(hidden_size=size, intermediate_size=size, head_dim=64, num_layers=1, windows=(-1,))
    checkpoint = create_checkpoint(arch, storage=storage)
    assert_agrees(load_kernels(checkpoint, isa), load_reference(checkpoint), 0.03)


@isas
def test_blocks_of_mixed_kinds(isa: str) -> None:
    arch = create_arch(hidden_size=256, intermediate_size=256, head_dim=64, tie_word_embeddings=False)
    kinds = (Storage.Q4_K, Storage.Q6_K, Storage.Q8_0, Storage.Q4_1, Storage.Q5_0)
    checkpoint = create_checkpoint(arch, storage=kinds)
    assert_agrees(load_kernels(checkpoint, isa), load_reference(checkpoint), 0.08)


@isas
def test_a_kv_cache_of_int8_stays_near_the_reference(isa: str) -> None:
    checkpoint = create_checkpoint(create_arch(head_dim=64))
    model = load_kernels(checkpoint, isa, kv_dtype="int8")
    assert_agrees(model, load_reference(checkpoint), 0.05)
    assert model.kv_page_bytes(32) < 0.6 * load_kernels(checkpoint, isa).kv_page_bytes(32)


# ---------------------------------------------------------------------- bit by bit
KINDS: dict[str, Callable[[], tuple[Checkpoint, dict[str, str]]]] = {
    "bf16": lambda: (create_checkpoint(BITWISE), {}),
    "int8": lambda: (create_checkpoint(BITWISE), {"quantization": "int8", "kv_dtype": "int8"}),
    "int4": lambda: (create_checkpoint(BITWISE), {"quantization": "int4"}),
    "q4_1": lambda: (create_checkpoint(BITWISE, storage=Storage.Q4_1), {}),
    "q8_0": lambda: (create_checkpoint(BITWISE, storage=Storage.Q8_0), {}),
    "q6_k": lambda: (create_checkpoint(BITWISE, storage=Storage.Q6_K), {}),
}
BITWISE: ArchSpec = create_arch(
    hidden_size=256, intermediate_size=256, head_dim=64, num_q_heads=8, num_kv_heads=2, windows=(40, -1)
)
kinds = pytest.mark.parametrize("kind", KINDS)
TOKENS = random_tokens(600, seed=7)


def whole(run: Run, tokens: Sequence[int] = TOKENS) -> Logits:
    return run.step([(run.sequence(tokens), len(tokens))])[0]


@isas
@kinds
@pytest.mark.parametrize("chunks", [(1, 1, 598), (16, 17, 512, 55), (300, 299, 1)])
def test_bits_do_not_depend_on_the_chunk(isa: str, kind: str, chunks: tuple[int, ...]) -> None:
    checkpoint, options = KINDS[kind]()
    run = create_run(checkpoint, isa, **options)
    expected = whole(run)
    prompt = run.sequence(TOKENS)
    found = np.concatenate([run.step([(prompt, chunk)])[0] for chunk in chunks])
    assert np.array_equal(found, expected)


@isas
@kinds
def test_bits_do_not_depend_on_the_others(isa: str, kind: str) -> None:
    checkpoint, options = KINDS[kind]()
    run = create_run(checkpoint, isa, **options)
    together = run.step(prompts(run, MIXED))
    alone = []
    for index in range(len(MIXED)):
        run = Run(run.model)
        alone += run.step([prompts(run, MIXED)[index]])
    for ours, theirs in zip(together, alone, strict=True):
        assert np.array_equal(ours, theirs)


@isas
@kinds
def test_bits_do_not_depend_on_threads(isa: str, kind: str) -> None:
    checkpoint, options = KINDS[kind]()
    results = []
    for num_threads in (1, 2, 3):
        run = create_run(checkpoint, isa, num_threads=num_threads, **options)
        prompt = run.sequence(TOKENS)
        parts = [run.step([(prompt, 570)])[0]]
        parts += [run.step([(prompt, 1)])[0] for _ in range(3)]
        results.append(np.concatenate(parts))
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@isas
@kinds
@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_bits_do_not_depend_on_a_shared_prefix(isa: str, kind: str, page_size: int) -> None:
    checkpoint, options = KINDS[kind]()
    run = Run(load_kernels(checkpoint, isa, num_threads=2, **options), page_size=page_size)
    first = run.sequence(TOKENS)
    num_pages = 512 // page_size
    run.step([(first, 512)])
    others = [
        run.sequence([*TOKENS[:512], *random_tokens(num, seed=num)], first, num_pages) for num in (1, 1, 1, 1, 1, 2, 40)
    ]
    work = [(other, len(other.token_ids) - 512) for other in others]
    expected = run.step(work)
    for other in others:
        other.num_computed = 512
    for ours, theirs in zip(run.step(work, num_common_pages=num_pages), expected, strict=True):
        assert np.array_equal(ours, theirs)


@isas
def test_a_page_may_be_read_in_the_step_that_fills_it(isa: str) -> None:
    """The block manager lets others find a block as soon as the step that fills it is laid out."""
    run = create_run(create_checkpoint(create_arch()), isa)
    tokens = random_tokens(33)
    writer = run.sequence(tokens[:32])
    run.step([(writer, 31)])
    reader = run.sequence(tokens[:33], shared=writer, num_shared_pages=1)
    together = run.step([(writer, 1), (reader, 1)])
    reader.num_computed = 32
    assert np.array_equal(run.step([(reader, 1)])[0], together[1])


@isas
@kinds
def test_bits_survive_a_preemption(isa: str, kind: str) -> None:
    checkpoint, options = KINDS[kind]()
    run = create_run(checkpoint, isa, **options)
    prompt = run.sequence(TOKENS[:100])
    run.step([(prompt, 90)])
    expected = np.concatenate([run.step([(prompt, 1)])[0] for _ in range(10)])
    again = run.sequence(TOKENS[:100])
    run.step([(again, 37)])
    assert np.array_equal(run.step([(again, 63)])[0][-10:], expected)


@isas
def test_page_sizes_give_the_same_bits(isa: str) -> None:
    model = load_kernels(create_checkpoint(BITWISE), isa)
    results = [whole(Run(model, page_size=page_size)) for page_size in (32, 64, 128)]
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


# ---------------------------------------------------------------------- the head
@isas
def test_greedy_ids_come_without_logits_and_from_known_ids_only(isa: str) -> None:
    run = create_run(create_checkpoint(create_arch()), isa)
    work = [(run.sequence(TOKENS[:50]), 50)]
    meta = run.meta(work)
    full = run.head(meta)
    assert full.logits is not None
    for num_token_ids in (203, 202, 100, 17, 1):
        rows = run.head(meta, needs_logits=False, num_token_ids=num_token_ids)
        assert rows.logits is None
        assert np.array_equal(rows.greedy_ids, full.logits[:, :num_token_ids].argmax(axis=1))


@isas
def test_a_row_that_is_not_finite_is_told_apart(isa: str) -> None:
    checkpoint = create_checkpoint(create_arch(tie_word_embeddings=False))
    checkpoint.weights.read("model.embed_tokens.weight")[5] = float("nan")
    run = create_run(checkpoint, isa)
    rows = run.head(run.meta([(run.sequence([5]), 1), (run.sequence([6]), 1)]), needs_logits=False)
    assert rows.is_finite.tolist() == [False, True]


# ---------------------------------------------------------------------- pages
@isas
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_pages_are_copied_and_carried_over_as_bytes(isa: str, kv_dtype: str) -> None:
    model = load_kernels(create_checkpoint(BITWISE), isa, kv_dtype=kv_dtype)
    run, other = Run(model), Run(model)
    prompt = run.sequence(TOKENS[:70])
    run.step([(prompt, 64)])
    expected = run.step([(prompt, 6)])[0]
    copies = [page for page in range(run.kv.num_pages) if page not in prompt.pages][:2]
    run.kv.copy_pages(np.array(prompt.pages[:2], np.int32), np.array(copies, np.int32))
    copied = Prompt(prompt.token_ids, [*copies, prompt.pages[2]], 64)
    assert np.array_equal(run.step([(copied, 6)])[0], expected)
    carried = other.sequence(TOKENS[:70])
    buffer = bytearray(run.kv.page_bytes)
    for source, target in zip(prompt.pages[:2], carried.pages[:2], strict=True):
        run.kv.read_page(source, memoryview(buffer))
        other.kv.write_page(target, memoryview(buffer))
    carried.num_computed = 64
    assert np.array_equal(other.step([(carried, 6)])[0], expected)
    with pytest.raises(ValueError, match="bytes long"):
        run.kv.read_page(0, memoryview(bytearray(3)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_reqs": 0, "num_tokens": 0}, "computes a token"),
        ({"positions": [-1, 0, 1]}, "outside of the rope table"),
        ({"positions": [0, 1, 1 << 20]}, "outside of the rope table"),
        ({"token_ids": [0, 203, 0]}, "outside of the vocabulary"),
        ({"logit_rows": [0, 3]}, "none of the step"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(changes: dict[str, Any], reason: str) -> None:
    run = create_run(create_checkpoint(create_arch()), ISAS[0])
    meta = run.meta([(run.sequence(TOKENS[:3]), 3)])
    for name, value in changes.items():
        setattr(meta, name, np.array(value, np.int32) if isinstance(value, list) else value)
    with pytest.raises(KernelError, match=reason):
        run.head(meta)


def test_pages_of_another_model_are_refused() -> None:
    run, other = (create_run(create_checkpoint(create_arch()), ISAS[0]) for _ in range(2))
    run.kv = other.kv
    with pytest.raises(KernelError, match="another model's"):
        run.step([(run.sequence(TOKENS[:3]), 3)])


# ---------------------------------------------------------------------- who gets the kernels
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [({"head_dim": 16}, "head_dim 16"), ({"head_dim": 72}, "head_dim 72"), ({"num_q_heads": 130}, "more than 64")],
)
def test_models_that_the_kernels_are_not_made_for_are_refused(overrides: dict[str, int], reason: str) -> None:
    backend = create_backend("cpu")
    backend.fuse(model_spec(create_arch()))
    with pytest.raises(NotFusableError, match=reason):
        backend.fuse(model_spec(create_arch(**overrides)))


def test_without_a_library_torch_computes_and_says_so_once(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    backend = CpuBackend(prepacked_dtypes=(), reason="no compiler")
    with pytest.raises(NotFusableError, match="no compiler"):
        backend.fuse(model_spec(create_arch()))
    assert backend.linear(torch.ones(1, 2), backend.pack_linear(torch.ones(3, 2), None)).tolist() == [[2.0] * 3]


@pytest.mark.parametrize("isa", ISAS)
def test_an_instruction_set_is_used_when_asked_for(isa: str) -> None:
    assert create_backend("cpu", BackendOptions(cpu_isa=isa)).fuse(model_spec(create_arch())).isa == isa


def test_an_instruction_set_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(UnusableIsaError, match="generic and torch can be used"):
        create_backend("cpu", BackendOptions(cpu_isa="sse"))


def test_torch_may_be_asked_for() -> None:
    with pytest.raises(NotFusableError, match="torch was asked for"):
        create_backend("cpu", BackendOptions(cpu_isa="torch")).fuse(model_spec(create_arch()))
