from __future__ import annotations

import torch

from kernels.testing.device_memory import Memory, TensorRef, fill_with_garbage, is_same, memory_id, span_of


def test_a_span_reaches_from_the_first_element_to_the_last() -> None:
    x = torch.zeros(4, 6, dtype=torch.int16)
    assert span_of(x) == (memory_id(x), 0, 48)
    assert span_of(x[1:3, 2:4])[1:] == ((6 + 2) * 2, (12 + 3 + 1) * 2)
    assert span_of(x.t()) == span_of(x)
    assert span_of(x[2:2])[1:] == (24, 24)


def test_spans_overlap_where_they_have_a_byte_in_common() -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    assert span_of(x[:4]).overlaps(span_of(x[3:]))
    assert not span_of(x[:4]).overlaps(span_of(x[4:]))
    assert not span_of(x).overlaps(span_of(y))


def test_a_reference_keeps_alive_only_what_it_owns() -> None:
    for owned in (False, True):
        x = torch.arange(6.0)
        ref = TensorRef(x[2:4], Memory(x.untyped_storage(), owned=owned))
        x[3] = 9.0
        assert ref.tensor().tolist() == [2.0, 9.0]
        assert ref.tensor().data_ptr() == x[2:].data_ptr()
        del x
        assert (ref.memory.storage() is not None) == owned


def test_garbage_is_nobodys_result() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        x = torch.zeros(2, dtype=dtype)
        fill_with_garbage(x)
        assert bool(x.isnan().all())
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        x = torch.zeros(2, dtype=dtype)
        fill_with_garbage(x)
        assert int(x[0]) >= 0x5A
    mask = torch.zeros(2, dtype=torch.bool)
    fill_with_garbage(mask)
    assert bool(mask.all())


def test_sameness_is_of_bits() -> None:
    nan = torch.tensor([torch.nan])
    assert is_same(nan, nan.clone())
    assert not is_same(torch.tensor(0.0), torch.tensor(-0.0))
    assert is_same(torch.zeros(4)[::2], torch.zeros(2))
