"""Stage `correctness`: every kernel, the backend as steps use it, and the device's sampler, against the reference.

The reference is kernels/torch_backend.py in fp32 on the CPU, fed with the same numbers as rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_core.model.device_noise import hash_ids
from engine_core.model.device_sampler import build_record, pick_tokens
from engine_core.model.loader import load_decoder
from engine_core.model.sampler import OwnTokens, pick_token
from engine_core.sampling_params import SamplingParams
from kernels.backend import AttnSpec, Backend, DeviceBackend, StepMeta
from kernels.step_upload import upload_step
from kernels.torch_backend import create_backend as create_reference
from tests.bench.gpu_device import Bench, attn_spec, build_meta, count_pages
from tests.bench.gpu_models import random_checkpoint
from tests.bench.gpu_report import Goal

PAGE = 16
# Of the greatest number in the reference: bf16 has 8 bits, and a sum of rounded products loses a few of them.
_MAX_ERROR = 0.02
_MAX_LOGIT_ERROR = 0.05
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Pair:
    """The backend and the reference, and where their differences go."""

    bench: Bench
    device: DeviceBackend
    reference: Backend

    def compare(self, name: str, ours: torch.Tensor, theirs: torch.Tensor, max_error: float = _MAX_ERROR) -> None:
        """Write down the greatest difference, as a share of the reference's greatest number."""
        a, b = ours.detach().cpu().float(), theirs.detach().cpu().float()
        error = float((a.reshape(b.shape) - b).abs().max() / b.abs().max())
        self.bench.sink.add(f"{name}: error", "", [error], goal=Goal(at_most=max_error))
        if not error <= max_error:  # NaN, too
            self.bench.sink.note(name, f"differs by {error:.3g} of the greatest number", is_failure=True)

    def inputs(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same random numbers twice: bf16 on the device, fp32 for the reference."""
        values = self.bench.random(*shape)
        return values, values.cpu().float()


def run_correctness(bench: Bench) -> None:
    """Check everything; a check that raises does not stop the others."""
    torch.manual_seed(0)
    pair = Pair(bench, bench.create_backend(), create_reference())
    checks: list[tuple[str, Callable[[Pair], None]]] = [
        ("norms", _check_norms),
        ("rope", _check_rope),
        ("activations", _check_activations),
        ("linear", _check_linear),
        *((f"attention {case.name}", case.check) for case in _attention_cases(bench)),
        ("graph", _check_graph),
        ("cascade", _check_cascade),
        ("whole model", _check_model),
        ("sampler", _check_sampler),
    ]
    for name, check in checks:
        try:
            check(pair)
        except Exception as error:
            bench.sink.note(name, f"{type(error).__name__}: {error}", is_failure=True)


# ---------------------------------------------------------------------- pointwise
def _check_norms(pair: Pair) -> None:
    for rows, hidden in pair.bench.pick(((1, 1024), (7, 4096), (512, 4096), (33, 128)), ((3, 64),)):
        x, x_ref = pair.inputs(rows, hidden)
        residual, residual_ref = pair.inputs(rows, hidden)
        weight, weight_ref = pair.inputs(hidden)
        ours = pair.device.rmsnorm(x, weight, _EPS)
        pair.compare(f"rmsnorm {rows}x{hidden}", ours, pair.reference.rmsnorm(x_ref, weight_ref, _EPS))
        wide = pair.device.rmsnorm(x, weight.float(), _EPS)
        pair.compare(f"rmsnorm {rows}x{hidden}, fp32 weight", wide, pair.reference.rmsnorm(x_ref, weight_ref, _EPS))
        pair.device.add_rmsnorm_(x, residual, weight, _EPS)
        pair.reference.add_rmsnorm_(x_ref, residual_ref, weight_ref, _EPS)
        pair.compare(f"add_rmsnorm {rows}x{hidden}", x, x_ref)
        pair.compare(f"add_rmsnorm {rows}x{hidden}, residual", residual, residual_ref)


def _check_rope(pair: Pair) -> None:
    """q and k as the decoder has them: views of one projection."""
    for rows, q_heads, kv_heads, head_dim in pair.bench.pick(
        ((5, 16, 8, 128), (257, 9, 3, 64), (64, 4, 1, 256)), ((3, 4, 2, 64),)
    ):
        qkv, qkv_ref = pair.inputs(rows, q_heads + 2 * kv_heads, head_dim)
        q, k, _ = qkv.split_with_sizes([q_heads, kv_heads, kv_heads], 1)
        q_ref, k_ref, _ = qkv_ref.split_with_sizes([q_heads, kv_heads, kv_heads], 1)
        weight, weight_ref = pair.inputs(head_dim)
        angles = torch.rand(rows, head_dim // 2) * 100
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        pair.device.qk_norm_rope_(q, k, weight, weight, cos_sin.to(pair.bench.device), _EPS)
        pair.reference.qk_norm_rope_(q_ref, k_ref, weight_ref, weight_ref, cos_sin, _EPS)
        pair.compare(f"norm and rope of q, {q_heads}x{head_dim}", q, q_ref)
        pair.compare(f"norm and rope of k, {kv_heads}x{head_dim}", k, k_ref)


def _check_activations(pair: Pair) -> None:
    for rows, inner in pair.bench.pick(((1, 3072), (65, 12288)), ((3, 64),)):
        x, x_ref = pair.inputs(rows, 2 * inner)
        pair.compare(f"silu {rows}x{inner}", pair.device.act_mul(x, "silu"), pair.reference.act_mul(x_ref, "silu"))
        tanh = pair.device.act_mul(x, "gelu_tanh")
        pair.compare(f"gelu_tanh {rows}x{inner}", tanh, pair.reference.act_mul(x_ref, "gelu_tanh"))


def _check_linear(pair: Pair) -> None:
    rows, inner, out = pair.bench.pick((17, 1024, 3072), (3, 32, 48))
    x, x_ref = pair.inputs(rows, inner)
    weight, weight_ref = pair.inputs(out, inner)
    bias, bias_ref = pair.inputs(out)
    ours = pair.device.linear(x, pair.device.pack_linear(weight, bias))
    pair.compare("linear", ours, pair.reference.linear(x_ref, pair.reference.pack_linear(weight_ref, bias_ref)))


# ---------------------------------------------------------------------- attention
@dataclass(frozen=True, slots=True)
class _AttentionCase:
    """A step of one shape: (q_len, kv_len) a request."""

    name: str
    spec: AttnSpec
    lengths: tuple[tuple[int, int], ...]

    def check(self, pair: Pair) -> None:
        """Write what each request has, in a step of its own, then compare what the step attends to."""
        meta = build_meta(list(self.lengths), page_size=PAGE, seed=1)
        Compared(pair, self.spec, meta).step(f"attention {self.name}", meta)


_DECODES = tuple((1, length) for length in (1, 15, 16, 17, 33, 100, 1000))
_MIXED = ((1, 40), (1, 129), (5, 5), (17, 80), (130, 130), (64, 300))


def _attention_cases(bench: Bench) -> Sequence[_AttentionCase]:
    if bench.is_dry:
        spec = attn_spec(4, 2, 64)
        return [_AttentionCase("mixed", spec, ((1, 20), (3, 18))), _AttentionCase("decode", spec, ((1, 1), (1, 17)))]
    kinds = [("d128 gqa 2", attn_spec(16, 8, 128)), ("d128 gqa 4", attn_spec(32, 8, 128))]
    kinds += [("d128 mha", attn_spec(8, 8, 128)), ("d64 gqa 3", attn_spec(9, 3, 64))]
    kinds += [("d256 gqa 4", attn_spec(4, 1, 256)), ("d128 gqa 8", attn_spec(64, 8, 128))]
    kinds += [("d128 window 63", attn_spec(16, 8, 128, 63)), ("d256 window 511", attn_spec(4, 1, 256, 511))]
    return [
        _AttentionCase(f"{name}, {what}", spec, lengths)
        for name, spec in kinds
        for what, lengths in (("decode", _DECODES), ("mixed", _MIXED), ("prompt", ((700, 700),)))
    ]


class Compared:
    """One layer's pages on both backends, filled alike.

    Args:
        pair: Both.
        spec: Of the layer.
        meta: The step to come: what its requests have before it is written here.
    """

    def __init__(self, pair: Pair, spec: AttnSpec, meta: StepMeta) -> None:
        self._pair = pair
        self._spec = spec
        pages = count_pages(meta)
        self.kv = pair.device.alloc_kv([spec], num_pages=pages, page_size=PAGE, dtype=torch.bfloat16)
        self._kv_ref = pair.reference.alloc_kv([spec], num_pages=pages, page_size=PAGE, dtype=torch.float32)
        history = _before(meta)
        if history is not None:
            self.attend(history)

    def draw(self, meta: StepMeta) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return q, k and v for a step, each twice."""
        heads = (self._spec.num_q_heads, self._spec.num_kv_heads, self._spec.num_kv_heads)
        return [self._pair.inputs(meta.num_tokens, count, self._spec.head_dim) for count in heads]

    def attend(self, meta: StepMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step of random numbers on both."""
        drawn = self.draw(meta)
        plan = self._pair.device.plan(meta, self.kv)
        ours = self._pair.device.attention(plan, 0, *(each for each, _ in drawn), self.kv)
        return ours, self.refer(meta, [each for _, each in drawn])

    def refer(self, meta: StepMeta, qkv: list[torch.Tensor]) -> torch.Tensor:
        """Compute a step on the reference."""
        plan = self._pair.reference.plan(meta, self._kv_ref)
        return self._pair.reference.attention(plan, 0, *qkv, self._kv_ref)

    def step(self, name: str, meta: StepMeta) -> None:
        """Compute a step on both and compare."""
        self._pair.compare(name, *self.attend(meta))


def _before(meta: StepMeta) -> StepMeta | None:
    """Return a step that writes, over the same pages, what the requests of a step have before it; shared pages once."""
    q_lens, num_shared = np.diff(meta.qo_indptr), meta.num_common_pages * PAGE
    todo = []
    for i, history in enumerate((meta.kv_lens - q_lens).tolist()):
        q_len = history if i == 0 else history - num_shared
        if q_len > 0:
            table = meta.kv_indices[meta.kv_indptr[i] : meta.kv_indptr[i + 1]]
            todo.append((q_len, history, table[: -(-history // PAGE)]))
    if not todo:
        return None
    todo.sort(key=lambda each: each[0] != 1)  # single tokens first, as every step has it
    step = build_meta([(q_len, history) for q_len, history, _ in todo], page_size=PAGE)
    step.kv_indices = np.concatenate([table for _, _, table in todo])
    slots = [table[at // PAGE] * PAGE + at % PAGE for q, n, table in todo for at in (np.arange(n - q, n),)]
    step.slot_mapping = np.concatenate(slots).astype(np.int32)
    return step


def _check_graph(pair: Pair) -> None:
    """Capture a decode step, then replay it with other numbers in the same memory."""
    spec = pair.bench.pick(attn_spec(16, 8, 128), attn_spec(4, 2, 64))
    meta = build_meta([(1, 20), (1, 33), (1, 7), (1, 64)], page_size=PAGE, seed=2)
    both = Compared(pair, spec, meta)
    tensors = upload_step(meta, page_size=PAGE, num_shared_pages=0, device=pair.bench.device)
    static = [ours for ours, _ in both.draw(meta)]
    plan = pair.device.plan_step(tensors, both.kv, in_graph=True)
    out = torch.empty(meta.num_tokens, spec.num_q_heads * spec.head_dim, dtype=torch.bfloat16, device=pair.bench.device)

    def body() -> None:
        out.copy_(pair.device.attention(plan, 0, *static, both.kv))

    body()
    graph = pair.bench.accelerator.capture(body)
    for round_ in range(2):
        drawn = both.draw(meta)
        for target, (ours, _) in zip(static, drawn, strict=True):
            target.copy_(ours)
        pair.device.plan_step(tensors, both.kv, in_graph=True)
        graph.replay()
        pair.bench.accelerator.synchronize()
        pair.compare(f"decode replayed {round_ + 1}", out, both.refer(meta, [theirs for _, theirs in drawn]))


def _check_cascade(pair: Pair) -> None:
    """Shared pages at once and each request's own, eagerly and in a graph, against attending to all."""
    spec = pair.bench.pick(attn_spec(32, 8, 128), attn_spec(4, 2, 64))
    shared = 256
    lengths = [(1, shared + 1 + 7 * i) for i in range(8)]
    meta = build_meta(lengths, page_size=PAGE, seed=3, num_common_pages=shared // PAGE)
    both = Compared(pair, spec, meta)
    if pair.device.num_shared_pages(meta, both.kv) == 0:
        raise AssertionError("the backend shares no page of this step")
    both.step("cascade, eager", meta)
    num_shared = pair.device.num_shared_pages(meta, both.kv)
    tensors = upload_step(meta, page_size=PAGE, num_shared_pages=num_shared, device=pair.bench.device)
    drawn = both.draw(meta)
    plan = pair.device.plan_step(tensors, both.kv, in_graph=True)
    out = torch.empty(meta.num_tokens, spec.num_q_heads * spec.head_dim, dtype=torch.bfloat16, device=pair.bench.device)

    def body() -> None:
        out.copy_(pair.device.attention(plan, 0, *(ours for ours, _ in drawn), both.kv))

    body()
    graph = pair.bench.accelerator.capture(body)
    out.zero_()
    pair.device.plan_step(tensors, both.kv, in_graph=True)
    graph.replay()
    pair.bench.accelerator.synchronize()
    pair.compare("cascade, replayed", out, both.refer(meta, [theirs for _, theirs in drawn]))


# ---------------------------------------------------------------------- model and sampler
def _check_model(pair: Pair) -> None:
    """A small model's logits: a prompt, then a step on top of it."""
    checkpoint = random_checkpoint("tiny", torch.device("cpu"))
    ours = load_decoder(checkpoint, pair.device, torch.bfloat16, lambda share, detail: None)
    theirs = load_decoder(checkpoint, pair.reference, torch.float32, lambda share, detail: None)
    meta = build_meta([(1, 1), (30, 30), (50, 50)], page_size=PAGE, seed=4)
    meta.token_ids = np.random.default_rng(0).integers(0, 512, meta.num_tokens).astype(np.int32)
    pools = [each.alloc_kv(num_pages=count_pages(meta) + 1, page_size=PAGE) for each in (ours, theirs)]
    logits = [each.logits(each.forward(meta, kv)) for each, kv in zip((ours, theirs), pools, strict=True)]
    pair.compare("a model's logits", *logits, max_error=_MAX_LOGIT_ERROR)


def _check_sampler(pair: Pair) -> None:
    """The device's tokens against the host's, for every way of sampling; floats as good as equal may differ."""
    vocab, rows = pair.bench.pick((151936, 48), (512, 12))
    logits = torch.randn(rows, vocab) * 3
    ways = (
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, temperature=0.8, seed=11),
        SamplingParams(1, temperature=1.0, top_k=40, seed=12),
        SamplingParams(1, temperature=0.7, top_p=0.9, seed=13),
        SamplingParams(1, temperature=1.2, min_p=0.05, seed=14),
        SamplingParams(1, temperature=1.0, top_k=100, top_p=0.95, min_p=0.01, seed=15),
    )
    params = [ways[row % len(ways)] for row in range(rows)]
    records = [build_record(each, row) for row, each in enumerate(params)]
    words = b"".join(record.words(row) for row, record in enumerate(records))
    table = torch.frombuffer(bytearray(words), dtype=torch.int32).view(rows, -1).to(pair.bench.device)
    draw = max(record.draw for record in records)
    picked = pick_tokens(logits.to(pair.bench.device), table, draw).token_ids.cpu().tolist()
    prompt = np.zeros(1, np.int32)
    expected = [
        pick_token(line, each, OwnTokens(prompt, np.zeros(row, np.int32)))
        for row, (line, each) in enumerate(zip(logits.numpy(), params, strict=True))
    ]
    num_other = sum(a != b for a, b in zip(picked, expected, strict=True))
    pair.bench.sink.add("tokens that device and host pick differently", f"of {rows}", [num_other])
    if num_other > rows // 20:
        pair.bench.sink.note("sampler", f"{num_other} of {rows} tokens differ", is_failure=True)
    _check_noise(pair)


def _check_noise(pair: Pair) -> None:
    """The same integers on the device as on a CPU, whatever the row."""
    keys = torch.randint(-(2**31), 2**31 - 1, (4, 3), dtype=torch.int64).to(torch.int32)
    ids = torch.arange(1000, dtype=torch.int32)
    ours = hash_ids(keys.to(pair.bench.device), ids.to(pair.bench.device)).cpu()
    if not torch.equal(ours, hash_ids(keys, ids)):
        pair.bench.sink.note("noise", "the device's integers are not the host's", is_failure=True)
