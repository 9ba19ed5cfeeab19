from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.accelerator import DeviceMemory
from kernels.testing.device_calls import device_call
from kernels.testing.fake_cuda import FakeAccelerator, FakeCudaError

Queue = Callable[[FakeAccelerator, torch.Tensor, torch.Tensor], object]


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pinned(accelerator: FakeAccelerator, *values: int) -> torch.Tensor:
    return accelerator.pinned(len(values)).copy_(words(*values))


def test_it_is_the_card_that_was_asked_for() -> None:
    accelerator = FakeAccelerator(capability=(8, 6), memory=DeviceMemory(free=10, total=20))
    assert accelerator.capability == (8, 6)
    assert accelerator.memory() == (10, 20)


def test_the_log_has_what_was_queued_in_order() -> None:
    accelerator = FakeAccelerator()
    device = torch.zeros(2, dtype=torch.int32)
    accelerator.upload(pinned(accelerator, 1, 2), device)
    graph = accelerator.capture(lambda: device.add_(1))
    graph.replay()
    graph.replay()
    accelerator.download(device, accelerator.pinned(2)).synchronize()
    accelerator.event()
    accelerator.synchronize()
    assert accelerator.log == [
        *("pinned", "upload", "capture", "replay", "replay", "pinned", "download", "wait", "event", "synchronize")
    ]
    assert (accelerator.count("upload"), accelerator.count("replay"), graph.num_replays) == (1, 2, 2)


# ---------------------------------------------------------------------- uploads


def test_an_upload_brings_the_block() -> None:
    accelerator = FakeAccelerator()
    device = torch.zeros(3, dtype=torch.int32)
    accelerator.upload(pinned(accelerator, 1, 2, 3), device)
    assert device.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "queue",
    [
        lambda accelerator, block, device: accelerator.check(),
        lambda accelerator, block, device: accelerator.upload(block, device),
        lambda accelerator, block, device: accelerator.synchronize(),
        lambda accelerator, block, device: accelerator.event(),
    ],
)
def test_writing_a_block_that_an_upload_still_reads_raises(queue: Queue) -> None:
    accelerator = FakeAccelerator()
    block, device = pinned(accelerator, 1, 2), torch.zeros(2, dtype=torch.int32)
    accelerator.upload(block, device)
    block[1] = 7
    with pytest.raises(FakeCudaError, match="pinned memory was written while an upload still read it"):
        queue(accelerator, block, device)


def test_waiting_for_the_upload_itself_is_too_late_for_a_write_before() -> None:
    accelerator = FakeAccelerator()
    block = pinned(accelerator, 1, 2)
    uploaded = accelerator.upload(block, torch.zeros(2, dtype=torch.int32))
    block.numpy()[0] = 5
    with pytest.raises(FakeCudaError, match="wait for the upload's event before"):
        uploaded.synchronize()


@pytest.mark.parametrize("later", ["upload", "event", "download", "synchronize"])
def test_a_block_may_be_written_after_anything_later_on_the_stream(later: str) -> None:
    accelerator = FakeAccelerator()
    block, device = pinned(accelerator, 1, 2), torch.zeros(2, dtype=torch.int32)
    uploaded = accelerator.upload(block, device)
    if later == "upload":
        uploaded.synchronize()
    elif later == "event":
        accelerator.event().synchronize()
    elif later == "download":
        accelerator.download(device, accelerator.pinned(2)).synchronize()
    else:
        accelerator.synchronize()
    block[1] = 7
    accelerator.check()
    assert accelerator.num_pending == 0


def test_an_earlier_event_frees_no_block() -> None:
    accelerator = FakeAccelerator()
    before = accelerator.event()
    block = pinned(accelerator, 1)
    accelerator.upload(block, torch.zeros(1, dtype=torch.int32))
    before.synchronize()
    block[0] = 7
    with pytest.raises(FakeCudaError, match="pinned memory was written"):
        accelerator.check()


def test_copies_go_between_pinned_and_device_memory() -> None:
    accelerator = FakeAccelerator()
    host, device = pinned(accelerator, 1), words(1)
    with pytest.raises(FakeCudaError, match="source is not pinned"):
        accelerator.upload(device, words(0))
    with pytest.raises(FakeCudaError, match="target is pinned"):
        accelerator.upload(host, host)
    with pytest.raises(FakeCudaError, match="target is not pinned"):
        accelerator.download(device, words(0))
    with pytest.raises(FakeCudaError, match="source is pinned"):
        accelerator.download(host, host)


def test_a_copy_is_one_run_of_bytes() -> None:
    accelerator = FakeAccelerator()
    block = accelerator.pinned(4)
    with pytest.raises(FakeCudaError, match="no plain copy"):
        accelerator.upload(block, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(FakeCudaError, match="no plain copy"):
        accelerator.upload(block, torch.zeros(4))
    with pytest.raises(FakeCudaError, match="gaps"):
        accelerator.upload(block[::2], torch.zeros(2, dtype=torch.int32))


# ---------------------------------------------------------------------- downloads


def test_a_download_is_garbage_until_its_event() -> None:
    accelerator = FakeAccelerator()
    target = accelerator.pinned(2)
    downloaded = accelerator.download(words(1, 2), target)
    assert target.tolist() == [0x5A5A5A5A] * 2
    accelerator.event().synchronize()  # on the compute stream: it knows nothing of the copy
    assert target.tolist() == [0x5A5A5A5A] * 2
    downloaded.synchronize()
    assert target.tolist() == [1, 2]


def test_a_later_download_brings_the_earlier_ones() -> None:
    accelerator = FakeAccelerator()
    first, second = accelerator.pinned(1), accelerator.pinned(1)
    accelerator.download(words(1), first)
    accelerator.download(words(2), second).synchronize()
    assert (first.tolist(), second.tolist()) == ([1], [2])


def test_an_earlier_download_does_not_bring_a_later_one() -> None:
    accelerator = FakeAccelerator()
    second = accelerator.pinned(1)
    downloaded = accelerator.download(words(1), accelerator.pinned(1))
    accelerator.download(words(2), second)
    downloaded.synchronize()
    assert second.tolist() == [0x5A5A5A5A]


def test_overwriting_the_source_of_a_download_raises() -> None:
    accelerator = FakeAccelerator()
    source = words(1, 2)
    downloaded = accelerator.download(source, accelerator.pinned(2))
    source.add_(1)
    with pytest.raises(FakeCudaError, match="device memory is written while a download still reads it"):
        downloaded.synchronize()


def test_uploading_over_the_source_of_a_download_raises_whatever_the_values() -> None:
    accelerator = FakeAccelerator()
    source = words(0, 0)
    accelerator.download(source, accelerator.pinned(2))
    with pytest.raises(FakeCudaError, match="device memory is written while a download still reads it"):
        accelerator.upload(accelerator.pinned(2), source)


def test_replaying_over_the_source_of_a_download_raises_whatever_the_values() -> None:
    accelerator = FakeAccelerator()
    source = words(1, 2, 3, 4)
    graph = accelerator.capture(lambda: source[2:].zero_())
    accelerator.download(source[:2], accelerator.pinned(2))
    graph.replay()  # writes beside it
    accelerator.download(source[1:3], accelerator.pinned(2))
    with pytest.raises(FakeCudaError, match="a graph writes memory that a download still reads"):
        graph.replay()
    accelerator.synchronize()
    graph.replay()


def test_writing_the_target_of_a_download_raises() -> None:
    accelerator = FakeAccelerator()
    target = accelerator.pinned(2)
    accelerator.download(words(1, 2), target)
    target[0] = 3
    with pytest.raises(FakeCudaError, match="pinned memory was written while a download wrote it"):
        accelerator.check()


def test_copies_under_way_share_no_pinned_memory() -> None:
    accelerator = FakeAccelerator()
    block, device = pinned(accelerator, 1, 2), words(0, 0)
    accelerator.upload(block, device)
    with pytest.raises(FakeCudaError, match="another copy under way uses"):
        accelerator.download(words(3, 4), block)
    accelerator.synchronize()
    accelerator.download(words(3, 4), block)
    with pytest.raises(FakeCudaError, match="another copy under way uses"):
        accelerator.download(words(5), block[1:])
    with pytest.raises(FakeCudaError, match="an upload reads memory that a download still writes"):
        accelerator.upload(block, device)


# ---------------------------------------------------------------------- captures


@pytest.mark.parametrize(
    "queue",
    [
        lambda accelerator, block, device: accelerator.upload(block, device),
        lambda accelerator, block, device: accelerator.download(device, block),
        lambda accelerator, block, device: accelerator.event(),
        lambda accelerator, block, device: accelerator.pinned(1),
        lambda accelerator, block, device: accelerator.synchronize(),
        lambda accelerator, block, device: accelerator.capture(lambda: None),
        lambda accelerator, block, device: accelerator.peak_bytes(lambda: None),
    ],
)
def test_a_capture_takes_kernels_only(queue: Queue) -> None:
    accelerator = FakeAccelerator()
    block, device = accelerator.pinned(1), words(1)
    with pytest.raises(FakeCudaError, match="inside a capture: a graph holds kernels only"):
        accelerator.capture(lambda: queue(accelerator, block, device))


def test_a_capture_neither_waits_for_an_event_nor_replays() -> None:
    accelerator = FakeAccelerator()
    event, graph = accelerator.event(), accelerator.capture(lambda: None)
    with pytest.raises(FakeCudaError, match="wait inside a capture"):
        accelerator.capture(event.synchronize)
    with pytest.raises(FakeCudaError, match="replay inside a capture"):
        accelerator.capture(graph.replay)


def test_a_capture_that_failed_leaves_the_device_usable_and_memory_as_it_was() -> None:
    accelerator = FakeAccelerator()
    device = words(1)

    def body() -> None:
        device.add_(1)
        device.item()

    with pytest.raises(FakeCudaError, match="may not wait"):
        accelerator.capture(body)
    assert device.tolist() == [1]
    accelerator.capture(lambda: device.add_(1)).replay()
    assert device.tolist() == [2]


def test_a_capture_uses_no_pinned_memory() -> None:
    accelerator = FakeAccelerator()
    block, device = accelerator.pinned(1), words(1)
    with pytest.raises(FakeCudaError, match="a capture takes no pinned host memory"):
        accelerator.capture(lambda: device.copy_(block))
    with pytest.raises(FakeCudaError, match="a capture takes no pinned host memory"):
        accelerator.capture(lambda: device_call(torch.add, device, block))


# ---------------------------------------------------------------------- memory, and no waits


def test_peak_bytes_counts_what_is_alive_at_once() -> None:
    accelerator = FakeAccelerator()
    weight = torch.zeros(64, 64)

    def body(rows: int) -> None:
        x = torch.zeros(rows, 64)
        for _ in range(3):
            x = (x @ weight.t()).view(-1, 64)
        x = device_call(torch.relu, x)
        x = x[:1].clone()

    peaks = [accelerator.peak_bytes(lambda rows=rows: body(rows)) for rows in (1, 8, 64)]  # type: ignore[misc]
    assert peaks == [2 * rows * 64 * 4 for rows in (1, 8, 64)]
    assert accelerator.log[-2:] == ["synchronize", "synchronize"]


@pytest.mark.parametrize(("width", "expected"), [(4096, 4 + 8), (5000, 4 + 8 + 32)])
def test_peak_bytes_counts_what_a_sort_takes_meanwhile(width: int, expected: int) -> None:
    rows = torch.zeros(3, width)

    def body() -> None:
        rows.sort(dim=1, descending=True, stable=True)

    peak = FakeAccelerator().peak_bytes(body)
    assert peak == expected * rows.numel()


def test_no_waits_refuses_what_waits_for_the_device() -> None:
    accelerator = FakeAccelerator()
    block, device = pinned(accelerator, 1, 2), words(1, 2)
    uploaded = accelerator.upload(block, device)
    waits: list[Callable[[], object]] = [
        *(uploaded.synchronize, accelerator.synchronize, device.tolist, device.cpu, device.numpy),
        *(device[0].item, device.nonzero, lambda: bool(device.any()), lambda: device[device > 1]),
    ]
    with accelerator.no_waits():
        for wait in waits:
            with pytest.raises(FakeCudaError, match="wait"):
                wait()
    device.tolist()


def test_no_waits_lets_pass_what_does_not_wait() -> None:
    accelerator = FakeAccelerator()
    block, device = pinned(accelerator, 1, 2), words(0, 0)
    graph = accelerator.capture(lambda: device_call(lambda x: x.tolist() and x.add_(1), device))
    with accelerator.no_waits():
        block.numpy()[:] = 5, 6
        assert (block.tolist(), block[0].item()) == ([5, 6], 5)
        accelerator.upload(block, device)
        graph.replay()
        device_call(device.tolist)
        device.mul_(2)
        target = accelerator.pinned(2)
        downloaded = accelerator.download(device, target)
    downloaded.synchronize()
    assert target.tolist() == [12, 14]


@pytest.mark.parametrize("inference_mode", [False, True])
def test_tensors_made_in_inference_mode_work_outside_of_it(inference_mode: bool) -> None:
    accelerator = FakeAccelerator()
    with torch.inference_mode(inference_mode):
        block, device, target = accelerator.pinned(2), torch.zeros(2, dtype=torch.int32), accelerator.pinned(2)
        graph = accelerator.capture(lambda: device.add_(1))
    block.numpy()[:] = 5, 6
    accelerator.upload(block, device)
    graph.replay()
    accelerator.download(device, target).synchronize()
    assert target.tolist() == [6, 7]
