"""What a step's block holds, that its places are a graph's, and that no copy is overtaken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.device_step import CsrPages
from kernels.step import IntArray, StepMeta
from kernels.step_block import LoadedStep, StepBlock
from kernels.testing.fake_cuda import FakeAccelerator
from tests.kernels.torch_device_backend import read_plan

PAGE_SIZE = 4


def create_block(accelerator: FakeAccelerator, **overrides: int) -> StepBlock:
    sizes = {"max_num_reqs": 8, "max_num_tokens": 40, "max_model_len": 60, "num_columns": 2, **overrides}
    return StepBlock(accelerator, page_size=PAGE_SIZE, **sizes)


def build_meta(requests: list[tuple[int, int]], *, shared: tuple[int, ...] = (), logit_rows: Any = None) -> StepMeta:
    """Lay out requests given as (q_len, kv_len); pages are 10, 11, ... but for the shared ones in front."""
    q_lens, kv_lens = [q_len for q_len, _ in requests], [kv_len for _, kv_len in requests]
    tables, page = [], 10
    for kv_len in kv_lens:
        num_own = -(-kv_len // PAGE_SIZE) - len(shared)
        tables.append([*shared, *range(page, page + num_own)])
        page += num_own
    positions = [at for q_len, kv_len in requests for at in range(kv_len - q_len, kv_len)]
    ends = np.cumsum(q_lens)
    return StepMeta(
        num_reqs=len(requests),
        num_tokens=sum(q_lens),
        num_decodes=q_lens.count(1),
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        qo_indptr=_int32([0, *ends]),
        kv_indptr=_int32([0, *np.cumsum([len(table) for table in tables])]),
        kv_indices=_int32([page for table in tables for page in table]),
        last_page_len=_int32([kv_len - (-(-kv_len // PAGE_SIZE) - 1) * PAGE_SIZE for kv_len in kv_lens]),
        kv_lens=_int32(kv_lens),
        token_ids=_int32([100 + at for at in positions]),
        positions=_int32(positions),
        slot_mapping=_int32([]),
        logit_rows=_int32(ends - 1 if logit_rows is None else logit_rows),
        num_common_pages=len(shared),
    )


def _int32(values: Any) -> IntArray:
    return np.array(list(values), np.int32)


def records_for(num_rows: int) -> IntArray:
    return np.arange(2 * num_rows, dtype=np.int32).reshape(num_rows, 2)


def load(block: StepBlock, meta: StepMeta, *, num_shared_pages: int = 0, num_padded: int = 0) -> LoadedStep:
    records = records_for(num_padded or len(meta.logit_rows))
    return block.load(meta, records, num_shared_pages=num_shared_pages, num_padded=num_padded)


def addresses(loaded: LoadedStep) -> list[tuple[int, int]]:
    tensors = loaded.tensors
    views = [tensors.qo_indptr, tensors.token_ids, tensors.positions, tensors.batch_indices, tensors.append_positions]
    views += [tensors.logit_rows, loaded.records]
    for pages in (tensors.pages, tensors.shared):
        views += [pages.indptr, pages.indices, pages.last_page_len] if pages else []
    return [(view.data_ptr(), len(view)) for view in views]


def check_hosts(pages: CsrPages) -> None:
    assert torch.equal(pages.indptr_host, pages.indptr)
    assert torch.equal(pages.last_page_len_host, pages.last_page_len)


def test_a_mixed_step_lies_as_it_is() -> None:
    accelerator = FakeAccelerator()
    meta = build_meta([(1, 9), (1, 4), (5, 13), (3, 3)], logit_rows=[0, 6, 9])
    tensors, records = load(create_block(accelerator), meta)
    assert accelerator.log.count("upload") == 1
    assert (tensors.num_reqs, tensors.num_tokens, tensors.max_q_len) == (4, 10, 5)
    assert tensors.qo_indptr.tolist() == tensors.qo_indptr_host.tolist() == [0, 1, 2, 7, 10]
    assert tensors.token_ids.tolist() == meta.token_ids.tolist()
    assert tensors.positions.tolist() == tensors.append_positions.tolist() == meta.positions.tolist()
    assert tensors.batch_indices.tolist() == [0, 1, 2, 2, 2, 2, 2, 3, 3, 3]
    assert tensors.logit_rows.tolist() == [0, 6, 9]
    assert tensors.pages.indptr.tolist() == meta.kv_indptr.tolist()
    assert tensors.pages.indices.tolist() == meta.kv_indices.tolist()
    assert tensors.pages.last_page_len.tolist() == meta.last_page_len.tolist()
    check_hosts(tensors.pages)
    assert np.array_equal(records.numpy(), records_for(3))
    assert tensors.shared is None


@pytest.mark.parametrize("num_padded", [3, 4, 8])
def test_a_decode_step_is_padded_with_requests_on_the_null_page(num_padded: int) -> None:
    meta = build_meta([(1, 9), (1, 4), (1, 13)])
    block = create_block(FakeAccelerator())
    for _ in range(2):
        load(block, build_meta([(20, 60), (20, 60)]))  # leaves its traces in either pinned block
    tensors, records = load(block, meta, num_padded=num_padded)
    added = num_padded - 3
    assert (tensors.num_reqs, tensors.num_tokens, tensors.max_q_len) == (num_padded, num_padded, 1)
    assert tensors.qo_indptr.tolist() == tensors.qo_indptr_host.tolist() == list(range(num_padded + 1))
    assert tensors.token_ids.tolist() == [*meta.token_ids, *[0] * added]
    assert tensors.positions.tolist() == [8, 3, 12, *[0] * added]
    assert tensors.append_positions.tolist() == [8, 3, 12, *[0] * added]
    assert tensors.batch_indices.tolist() == tensors.logit_rows.tolist() == list(range(num_padded))
    assert tensors.pages.indptr.tolist() == [0, 3, 4, *range(8, 9 + added)]
    assert tensors.pages.indices[: 8 + added].tolist() == [*meta.kv_indices, *[0] * added]
    assert tensors.pages.last_page_len.tolist() == [1, 4, 1, *[1] * added]
    check_hosts(tensors.pages)
    assert np.array_equal(records.numpy(), records_for(num_padded))


@pytest.mark.parametrize("num_padded", [0, 4])
def test_shared_pages_stand_apart(num_padded: int) -> None:
    q_len = 1 if num_padded else 2
    meta = build_meta([(1, 9), (1, 12), (q_len, 15)], shared=(5, 7))
    tensors, _ = load(create_block(FakeAccelerator()), meta, num_shared_pages=2, num_padded=num_padded)
    shared = tensors.shared
    assert shared is not None and tensors.shared_qo_indptr is not None and tensors.shared_qo_indptr_host is not None
    assert tensors.shared_qo_indptr.tolist() == tensors.shared_qo_indptr_host.tolist() == [0, num_padded or 4]
    assert (shared.indptr.tolist(), shared.indices[:2].tolist(), shared.last_page_len.tolist()) == ([0, 2], [5, 7], [4])
    check_hosts(shared)
    added = [0] * bool(num_padded)
    assert tensors.append_positions.tolist() == [0, 3, *([5, 6] if q_len == 2 else [6]), *added]
    assert tensors.positions[:2].tolist() == [8, 11]
    own = tensors.pages.indptr.tolist()[-1]
    assert tensors.pages.indices[:own].tolist() == [10, 11, 12, 13, *added]
    slots, requests = read_plan(tensors, PAGE_SIZE).slots, read_plan(tensors, PAGE_SIZE).requests
    assert [kv_len for _, _, kv_len in requests][:3] == [9, 12, 15]
    assert slots[:2].tolist() == [40, 47]


@pytest.mark.parametrize("num_shared_pages", [0, 2])
def test_a_graphs_step_is_always_the_same_memory(num_shared_pages: int) -> None:
    block = create_block(FakeAccelerator())
    small = build_meta([(1, 9)] * 3, shared=(5, 7))
    large = build_meta([(1, 59), (1, 60), (1, 9), (1, 41)], shared=(5, 7))
    found = []
    for meta in (small, build_meta([(20, 20)]), large, small, large):
        if meta.max_q_len > 1:
            load(block, meta)
            continue
        loaded = load(block, meta, num_shared_pages=num_shared_pages, num_padded=4)
        found.append(addresses(loaded))
        own = int(loaded.tensors.pages.indptr_host[-1])
        assert own <= len(loaded.tensors.pages.indices) and len(loaded.tensors.pages.indices) == 4 * block.max_pages
    assert all(each == found[0] for each in found)


def test_sections_start_at_16_bytes() -> None:
    block = create_block(FakeAccelerator())
    for meta, options in (
        (build_meta([(1, 9), (5, 13), (3, 3)]), {}),
        (build_meta([(1, 9)] * 3, shared=(5, 7)), {"num_shared_pages": 2, "num_padded": 5}),
    ):
        loaded = load(block, meta, **options)
        assert all(address % 16 == 0 for address, _ in addresses(loaded))


def test_pinned_memory_is_not_written_under_a_copy() -> None:
    accelerator = FakeAccelerator()
    block = create_block(accelerator)
    for length in range(1, 8):
        load(block, build_meta([(length, length)]))
        accelerator.check()
    assert accelerator.log.count("wait") == 5, "the two blocks take turns"


def test_nobody_waits_for_steps_that_are_known_to_be_done() -> None:
    accelerator = FakeAccelerator()
    block = create_block(accelerator)
    load(block, build_meta([(1, 1)]))
    for length in range(2, 8):
        load(block, build_meta([(length, length)]))
        accelerator.synchronize()
        block.note_done(block.load_id - 1)
        with accelerator.no_waits():
            load(block, build_meta([(length, length)]))
        block.note_done(block.load_id - 1)


def test_what_is_known_of_one_step_says_nothing_of_the_next() -> None:
    accelerator = FakeAccelerator()
    block = create_block(accelerator)
    load(block, build_meta([(1, 1)]))
    accelerator.synchronize()
    load(block, build_meta([(2, 2)]))
    block.note_done(1)
    load(block, build_meta([(3, 3)]))
    assert accelerator.count("wait") == 0
    load(block, build_meta([(4, 4)]))
    assert accelerator.count("wait") == 1


def test_a_long_shared_prefix_has_its_room() -> None:
    shared = tuple(range(50, 62))
    meta = build_meta([(1, 50), (1, 52), (1, 55)], shared=shared)
    tensors, _ = load(create_block(FakeAccelerator()), meta, num_shared_pages=12, num_padded=4)
    assert tensors.shared is not None and tensors.shared.indices[:12].tolist() == list(shared)
    assert tensors.pages.indices[:5].tolist() == [10, 11, 12, 13, 0]


def test_only_what_is_used_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator()
    block, upload, sizes = create_block(accelerator, max_model_len=60_000), accelerator.upload, []

    def note(source: torch.Tensor, target: torch.Tensor) -> Any:
        sizes.append(len(source))
        return upload(source, target)

    monkeypatch.setattr(accelerator, "upload", note)
    load(block, build_meta([(1, 9), (1, 4)]), num_padded=8)
    assert sizes[0] < 150
