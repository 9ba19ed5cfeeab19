"""A step's arrays on the device, against what they mean: which token goes where."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.device_step import CsrPages, StepTensors
from kernels.step import StepMeta
from kernels.step_upload import upload_step
from tests.kernels.step_builder import Request, build_step

PAGE_SIZE = 16
SHARED = [90, 91, 92]
REQUESTS: list[Request] = [(1, 49), (1, 70), (5, 64), (20, 68)]


def tables_with_shared(requests: list[Request]) -> list[list[int]]:
    return [SHARED + [10 * (i + 1) + page for page in range(5)] for i in range(len(requests))]


def upload(num_shared: int) -> tuple[StepMeta, StepTensors]:
    meta = build_step(REQUESTS, tables_with_shared(REQUESTS), page_size=PAGE_SIZE)
    step = upload_step(meta, page_size=PAGE_SIZE, num_shared_pages=num_shared, device=torch.device("cpu"))
    return meta, step


def own_table(pages: CsrPages, request: int) -> list[int]:
    start, end = pages.indptr.tolist()[request : request + 2]
    return pages.indices[start:end].tolist()


@pytest.mark.parametrize("num_shared", [0, 2, 3])
def test_a_token_is_appended_where_its_slot_is(num_shared: int) -> None:
    meta, step = upload(num_shared)
    slots = []
    for request, position in zip(step.batch_indices.tolist(), step.append_positions.tolist(), strict=True):
        table = own_table(step.pages, request)
        slots.append(table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
    assert slots == meta.slot_mapping.tolist()


@pytest.mark.parametrize("num_shared", [0, 1, 3])
def test_the_shared_pages_are_cut_off_each_table_once(num_shared: int) -> None:
    """They were subtracted twice once, elsewhere: pages went missing from every table."""
    meta, step = upload(num_shared)
    for i in range(meta.num_reqs):
        whole = meta.kv_indices[meta.kv_indptr[i] : meta.kv_indptr[i + 1]].tolist()
        assert own_table(step.pages, i) == whole[num_shared:]
    assert step.pages.last_page_len.tolist() == meta.last_page_len.tolist()
    own_tokens = (step.pages.indptr.diff() - 1) * PAGE_SIZE + step.pages.last_page_len
    assert (own_tokens + num_shared * PAGE_SIZE).tolist() == meta.kv_lens.tolist()


def test_the_shared_pages_are_full_and_belong_to_all_tokens() -> None:
    meta, step = upload(3)
    assert step.shared is not None
    assert step.shared.indptr.tolist() == [0, 3]
    assert step.shared.indices.tolist() == SHARED
    assert step.shared.last_page_len.tolist() == [PAGE_SIZE]
    assert step.shared_qo_indptr is not None
    assert step.shared_qo_indptr.tolist() == [0, meta.num_tokens]


def test_nothing_is_shared_where_nothing_is_to_be() -> None:
    _, step = upload(0)
    assert (step.shared, step.shared_qo_indptr, step.shared_qo_indptr_host) == (None, None, None)


@pytest.mark.parametrize("num_shared", [0, 3])
def test_everything_is_int32_and_the_host_has_the_same(num_shared: int) -> None:
    _, step = upload(num_shared)
    pairs = [(step.qo_indptr_host, step.qo_indptr)]
    if num_shared:
        assert step.shared_qo_indptr_host is not None
        assert step.shared_qo_indptr is not None
        pairs.append((step.shared_qo_indptr_host, step.shared_qo_indptr))
    for pages in (step.pages, step.shared):
        if pages is not None:
            pairs += [(pages.indptr_host, pages.indptr), (pages.last_page_len_host, pages.last_page_len)]
            assert pages.indices.dtype == torch.int32
    for host, device in pairs:
        assert torch.equal(host, device)
        assert host.dtype == device.dtype == torch.int32
    for tensor in (step.token_ids, step.positions, step.batch_indices, step.append_positions, step.logit_rows):
        assert tensor.dtype == torch.int32


def test_the_arrays_may_be_reused_at_once() -> None:
    meta, step = upload(0)
    positions, indices = step.positions.tolist(), step.pages.indices.tolist()
    for array in (meta.positions, meta.kv_indices, meta.kv_indptr, meta.qo_indptr, meta.last_page_len):
        array[:] = np.int32(-7)
    assert step.positions.tolist() == positions
    assert step.pages.indices.tolist() == indices
    assert min(step.qo_indptr_host.tolist() + step.pages.indptr_host.tolist()) == 0
