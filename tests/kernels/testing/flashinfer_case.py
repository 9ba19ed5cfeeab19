"""One small step for each of the fake FlashInfer's wrappers, correct as it stands; tests break one thing of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.testing import fake_flashinfer
from kernels.testing.fake_checks import shares_memory

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 4, 2, 64, 4, 20
BF16 = torch.bfloat16
WORKSPACE = torch.zeros(32 << 20, dtype=torch.uint8)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pool() -> torch.Tensor:
    return random(NUM_PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, seed=1)


@dataclass
class Step:
    """Two requests: pages 3 and 4 with 6 tokens, pages 7, 8 and 9 with 12."""

    qo: torch.Tensor = field(default_factory=lambda: ints(0, 3, 4))
    kv: torch.Tensor = field(default_factory=lambda: ints(0, 2, 5))
    indices: torch.Tensor = field(default_factory=lambda: ints(3, 4, 7, 8, 9))
    last: torch.Tensor = field(default_factory=lambda: ints(2, 4))
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    page_size: int = PAGE_SIZE
    options: dict[str, Any] = field(default_factory=dict)  # of plan()
    q: torch.Tensor = field(default_factory=lambda: random(4, HEADS, HEAD_DIM))
    pool: Any = field(default_factory=pool)
    run: dict[str, Any] = field(default_factory=dict)  # options of run()
    workspace: torch.Tensor = field(default_factory=lambda: WORKSPACE)
    create: dict[str, Any] = field(default_factory=dict)  # options of the constructor

    def shape(self) -> tuple[int, int, int, int]:
        return self.heads, self.kv_heads, self.head_dim, self.page_size


def plan_options(step: Step, **defaults: Any) -> dict[str, Any]:
    return {"q_data_type": BF16, **defaults, **step.options}


def prefill(step: Step, module: Any = fake_flashinfer) -> Any:
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(step.workspace, **step.create)
    options = plan_options(step, causal=True)
    wrapper.plan(step.qo, step.kv, step.indices, step.last, *step.shape(), **options)
    return wrapper.run(step.q, step.pool, **step.run)


def decode(step: Step, module: Any = fake_flashinfer) -> Any:
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(step.workspace, **{"use_tensor_cores": True, **step.create})
    wrapper.plan(step.kv, step.indices, step.last, *step.shape(), **plan_options(step))
    return wrapper.run(step.q[2:], step.pool, **step.run)


@dataclass
class Buffers:
    """A graph's static memory, as one block, filled with one step."""

    kv: torch.Tensor
    indices: torch.Tensor
    last: torch.Tensor

    def load(self, step: Step) -> Step:
        """The step with its page ids in the buffer; its other arrays stay on the host, and are copied."""
        self.kv.copy_(step.kv)
        self.last.copy_(step.last)
        self.indices[: len(step.indices)] = step.indices
        step.indices = self.indices[: len(step.indices)]
        return step


def create_buffers(num_reqs: int = 2, num_pages: int = 8) -> Buffers:
    block = torch.zeros(64, dtype=torch.int32)
    return Buffers(block[: num_reqs + 1], block[16 : 16 + num_pages], block[32 : 32 + num_reqs])


def graph_wrapper(buffers: Buffers, *, module: Any = fake_flashinfer, workspace: torch.Tensor = WORKSPACE) -> Any:
    return module.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=buffers.kv,
        paged_kv_indices_buffer=buffers.indices,
        paged_kv_last_page_len_buffer=buffers.last,
        backend="fa2",
    )


def plan_graph(wrapper: Any, step: Step, *, fast: bool = False, module: Any = fake_flashinfer) -> None:
    arrays = (step.kv, step.indices, step.last, *step.shape())
    if fast:
        module.fast_decode_plan(wrapper, *arrays, **plan_options(step))
    else:
        wrapper.plan(*arrays, **plan_options(step))


@dataclass
class Levels:
    """Pages 3 and 4 shared; then page 5 with 4 tokens for three queries, page 6 with 1 for one."""

    qo: list[torch.Tensor] = field(default_factory=lambda: [ints(0, 4), ints(0, 3, 4)])
    kv: list[torch.Tensor] = field(default_factory=lambda: [ints(0, 2), ints(0, 1, 2)])
    indices: list[torch.Tensor] = field(default_factory=lambda: [ints(3, 4), ints(5, 6)])
    last: list[torch.Tensor] = field(default_factory=lambda: [ints(4), ints(4, 1)])
    options: dict[str, Any] = field(default_factory=dict)
    create: dict[str, Any] = field(default_factory=dict)
    num_levels: int = 2


def cascade(levels: Levels) -> Any:
    wrapper = fake_flashinfer.MultiLevelCascadeAttentionWrapper(levels.num_levels, WORKSPACE, **levels.create)
    options = {"q_data_type": BF16, "causal": True, **levels.options}
    arrays = (levels.qo, levels.kv, levels.indices, levels.last)
    wrapper.plan(*arrays, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, **options)
    return wrapper.run(random(4, HEADS, HEAD_DIM), pool())


def on_device(*values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An array beside page ids, in the device's one block."""
    block = torch.zeros(64, dtype=torch.int32)
    indices, array = block[:5], block[16 : 16 + len(values)]
    indices.copy_(ints(3, 4, 7, 8, 9))
    array.copy_(ints(*values))
    assert shares_memory(indices, array)
    return indices, array
