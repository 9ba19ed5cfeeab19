"""Stages `plan`, `decode-attention`, `prefill-attention` and `cascade`: attention by itself, in Qwen3-8B's heads.

Through the backend, as a step uses it (the step's own K and V are appended first), each layer with pages of its own so
that no cache of the card helps. Only fa2 against fa3 asks the library directly, since the backend settles on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.backend import AttnSpec, DeviceBackend, StepMeta
from kernels.step_upload import upload_step
from tests.bench.gpu_device import COLD_BYTES, Bench, attn_spec, build_meta, count_pages
from tests.bench.gpu_report import Goal

PAGE = 16
_MAX_LAYERS = 64


def _spec(bench: Bench) -> AttnSpec:
    return bench.pick(attn_spec(32, 8, 128), attn_spec(4, 2, 64))


class Attention:
    """One step of one shape, on a backend of its own.

    Args:
        bench: Where.
        meta: The step.
        has_cascade: Attend to what all share at once, where the backend would.
        num_layers: So many of the same kind; 0 = as many as no cache holds.
    """

    def __init__(self, bench: Bench, meta: StepMeta, *, has_cascade: bool = False, num_layers: int = 0) -> None:
        spec = _spec(bench)
        self.kv_bytes = int(meta.kv_lens.sum()) * 2 * spec.num_kv_heads * spec.head_dim * 2
        layers = num_layers or bench.pick(max(1, min(_MAX_LAYERS, -(-COLD_BYTES // self.kv_bytes))), 2)
        self.backend: DeviceBackend = bench.create_backend()
        self.kv: Any = self.backend.alloc_kv(
            [spec] * layers, num_pages=count_pages(meta), page_size=PAGE, dtype=torch.bfloat16
        )
        for pages in self.kv.layers:
            pages.normal_()  # a card is faster on zeros than it will ever be on data
        self.num_layers = layers
        self.num_shared_pages = self.backend.num_shared_pages(meta, self.kv) if has_cascade else 0
        self.tensors = upload_step(
            meta, page_size=PAGE, num_shared_pages=self.num_shared_pages, device=bench.accelerator.device
        )
        self.q = bench.random(meta.num_tokens, spec.num_q_heads, spec.head_dim)
        self.k, self.v = (bench.random(meta.num_tokens, spec.num_kv_heads, spec.head_dim) for _ in range(2))

    def plan(self, *, in_graph: bool) -> Any:
        """Plan the step."""
        return self.backend.plan_step(self.tensors, self.kv, in_graph=in_graph)

    def body(self, plan: Any) -> Callable[[], None]:
        """Return what computes it, all layers."""

        def run() -> None:
            for layer in range(self.num_layers):
                self.backend.attention(plan, layer, self.q, self.k, self.v, self.kv)

        return run


def decode_meta(batch: int, context: int, num_common_pages: int = 0) -> StepMeta:
    """Return a step in which every request decodes one token at the same length."""
    return build_meta([(1, context)] * batch, page_size=PAGE, num_common_pages=num_common_pages)


def run_plan(bench: Bench) -> None:
    """Time the host for a step's plan: decoding for a graph, decoding eagerly, and prompts."""
    n = bench.pick(200, 3)
    for batch in bench.pick((1, 8, 64, 256), (1, 2)):
        attention = Attention(bench, decode_meta(batch, bench.pick(1024, 40)), num_layers=1)
        for in_graph in (True, False):
            times = bench.time_host_s(lambda: attention.plan(in_graph=in_graph), n)  # noqa: B023
            where = "in a graph" if in_graph else "eager"
            bench.sink.add(f"plan decode {where}, batch {batch}", "us", [s * 1e6 for s in times])
    prompts = build_meta([(bench.pick(2048, 20), bench.pick(2048, 20))] * 4, page_size=PAGE)
    attention = Attention(bench, prompts, num_layers=1)
    times = bench.time_host_s(lambda: attention.plan(in_graph=False), n)
    bench.sink.add(f"plan 4 prompts of {prompts.max_q_len}", "us", [s * 1e6 for s in times])


def run_decode_attention(bench: Bench) -> None:
    """Time decoding's attention in a graph against reading K and V once."""
    for context in bench.pick((1024, 8192), (40,)):
        for batch in bench.pick((1, 8, 32, 64, 256), (1, 4)):
            attention = Attention(bench, decode_meta(batch, context))
            body = attention.body(attention.plan(in_graph=True))
            times = bench.time_captured_s(body, bench.pick(30, 2), parts=attention.num_layers)
            bench.sink.add(
                f"decode attention, batch {batch}, context {context}",
                "us",
                [s * 1e6 for s in times],
                floor=attention.kv_bytes / bench.bandwidth * 1e6,
                formula=f"{attention.kv_bytes / 1e6:.1f} MB of K and V / bandwidth",
            )


def run_prefill_attention(bench: Bench) -> None:
    """Time one prompt's attention by FlashInfer's two kernels for it."""
    spec = _spec(bench)
    backends = ["fa2", "fa3"] if bench.is_dry or bench.accelerator.capability[0] == 9 else ["fa2"]
    workspace = torch.zeros(bench.pick(256 << 20, 16 << 20), dtype=torch.uint8, device=bench.device)
    for length in bench.pick((512, 2048, 8192), (20,)):
        for backend in backends:
            wrapper = bench.flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
            _time_prefill(bench, wrapper, spec, length, backend)


def _time_prefill(bench: Bench, wrapper: Any, spec: AttnSpec, length: int, backend: str) -> None:
    meta = build_meta([(length, length)], page_size=PAGE)
    shape = (count_pages(meta), 2, PAGE, spec.num_kv_heads, spec.head_dim)
    kv, q = bench.random(*shape), bench.random(length, spec.num_q_heads, spec.head_dim)
    host = [torch.from_numpy(each) for each in (meta.qo_indptr, meta.kv_indptr, meta.last_page_len)]
    wrapper.plan(
        host[0],
        host[1],
        torch.from_numpy(meta.kv_indices).to(bench.device),
        host[2],
        spec.num_q_heads,
        spec.num_kv_heads,
        spec.head_dim,
        PAGE,
        causal=True,
        sm_scale=spec.sm_scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    operations = 4 * spec.num_q_heads * spec.head_dim * length * (length + 1) // 2
    bench.sink.add(
        f"prefill attention {backend}, {length} tokens",
        "us",
        [s * 1e6 for s in bench.time_device_s(lambda: wrapper.run(q, kv), bench.pick(20, 2))],
        floor=operations / bench.gemm_rate * 1e6,
        formula=f"{operations / 1e9:.1f} GFLOP (q k and p v over the triangle) / GEMM rate",
    )


def run_cascade(bench: Bench) -> None:
    """Decode streams that share a long beginning, with and without attending to it once for all."""
    shared, own, batch = bench.pick((2048, 128, 32), (256, 24, 8))
    meta = decode_meta(batch, shared + own, num_common_pages=shared // PAGE)
    medians = {}
    for has_cascade in (False, True):
        attention = Attention(bench, meta, has_cascade=has_cascade)
        if has_cascade and attention.num_shared_pages == 0:
            bench.sink.note("cascade", "the backend shares no page of this step", is_failure=True)
            return
        body = attention.body(attention.plan(in_graph=True))
        times = bench.time_captured_s(body, bench.pick(30, 2), parts=attention.num_layers)
        kv_bytes = attention.kv_bytes * (own + (shared / batch if has_cascade else shared)) / (shared + own)
        figure = bench.sink.add(
            f"decode attention, {batch} streams, {shared} shared + {own} own, cascade {'on' if has_cascade else 'off'}",
            "us",
            [s * 1e6 for s in times],
            floor=kv_bytes / bench.bandwidth * 1e6,
            formula=f"{kv_bytes / 1e6:.1f} MB of K and V / bandwidth",
        )
        medians[has_cascade] = figure.median
    gain = medians[False] / medians[True]
    bench.sink.add(f"cascade's gain at {batch} streams on {shared}", "x", [gain], goal=Goal(at_least=1.5))
