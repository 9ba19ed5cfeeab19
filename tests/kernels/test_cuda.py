"""CudaAccelerator over a stand-in for torch.cuda that notes what it is asked, in order. No card here ever runs it."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kernels.cuda import CudaAccelerator, NoDeviceError


class Event:
    def __init__(self, cuda: TorchCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def synchronize(self) -> None:
        self._cuda.log.append(f"host waits for {self.name}")


class Stream:
    def __init__(self, cuda: TorchCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name
        self._num_events = 0

    def record_event(self) -> Event:
        self._num_events += 1
        event = Event(self._cuda, f"{self.name}{self._num_events}")
        self._cuda.log.append(f"record {event.name}")
        return event

    def wait_event(self, event: Event) -> None:
        self._cuda.log.append(f"{self.name} waits for {event.name}")


class Graph:
    def __init__(self, cuda: TorchCuda) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.log.append(f"replay on {self._cuda.current}")


class TorchCuda:
    """As much of torch.cuda as is used. Streams are called compute and side in the order that they are made in."""

    def __init__(self, capability: tuple[int, int] = (9, 0), init_error: Exception | None = None) -> None:
        self.log: list[str] = []
        self._capability = capability
        self._init_error = init_error
        self._names = iter(("compute", "side"))
        self._local = threading.local()
        self._num_pools = 0
        self.allocated = [100]
        self.peak = 100

    @property
    def current(self) -> str:
        return str(getattr(self._local, "stream", "default"))

    def init(self) -> None:
        if self._init_error is not None:
            raise self._init_error

    def device_count(self) -> int:
        return 2

    def get_device_name(self, index: int) -> str:
        return f"Card {index}"

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self._capability

    def Stream(self, device: int) -> Stream:
        return Stream(self, next(self._names))

    def set_device(self, device: torch.device) -> None:
        self.log.append(f"set {device}")

    def set_stream(self, stream: Stream) -> None:
        self._local.stream = stream.name
        self.log.append(f"set {stream.name}")

    def synchronize(self, device: torch.device) -> None:
        self.log.append(f"host waits for {device}")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current, stream.name
        self.log.append(f"on {stream.name}")
        yield
        self._local.stream = before
        self.log.append(f"on {before}")

    def graph_pool_handle(self) -> int:
        self._num_pools += 1
        return self._num_pools

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    @contextmanager
    def graph(self, graph: Graph, *, pool: int, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"capture in pool {pool} on {stream.name}, {capture_error_mode}")
        yield
        self.log.append("captured")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 10, 20

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def memory_allocated(self, device: torch.device) -> int:
        return sum(self.allocated)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = sum(self.allocated)
        self.log.append("reset_peak")

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def allocate(self, num_bytes: int) -> None:
        self.allocated.append(num_bytes)
        self.peak = max(self.peak, sum(self.allocated))


class Copied(torch.Tensor):
    """A tensor that tells when and how it is copied to."""

    asked: TorchCuda

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
        how = "" if non_blocking else ", blocking"
        self.asked.log.append(f"copy on {self.asked.current}{how}")
        return super().copy_(source)


ENTERED = ["set cuda:0", "host waits for cuda:0", "set compute"]


def create(cuda: TorchCuda) -> CudaAccelerator:
    """An accelerator that this thread has used already, with nothing in the log."""
    accelerator = CudaAccelerator(torch_cuda=cuda)
    accelerator.synchronize()
    cuda.log.clear()
    return accelerator


def target(cuda: TorchCuda, num_words: int) -> torch.Tensor:
    tensor = torch.zeros(num_words, dtype=torch.int32).as_subclass(Copied)
    tensor.asked = cuda
    return tensor


def test_importing_it_asks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kernels.cuda")
    monkeypatch.setattr(torch, "cuda", None)
    assert importlib.import_module("kernels.cuda").CudaAccelerator is not CudaAccelerator


def test_it_tells_which_card_it_is() -> None:
    accelerator = CudaAccelerator(1, torch_cuda=TorchCuda(capability=(8, 6)))
    assert (accelerator.name, accelerator.device, accelerator.capability) == ("Card 1", torch.device("cuda:1"), (8, 6))
    assert accelerator.memory() == (10, 20)


@pytest.mark.parametrize("call", ["event", "synchronize", "peak_bytes", "capture"])
def test_the_first_call_makes_the_stream_the_threads_own(call: str) -> None:
    cuda = TorchCuda()
    accelerator = CudaAccelerator(torch_cuda=cuda)
    assert cuda.log == []  # whoever makes it need not be who uses it
    arguments = [lambda: None] if call in ("peak_bytes", "capture") else []
    getattr(accelerator, call)(*arguments)
    assert cuda.log[:3] == ENTERED
    cuda.log.clear()
    getattr(accelerator, call)(*arguments)
    assert "set compute" not in cuda.log


def test_each_thread_enters_for_itself() -> None:
    cuda = TorchCuda()
    accelerator = create(cuda)
    graph = accelerator.capture(lambda: None)
    cuda.log.clear()
    thread = threading.Thread(target=graph.replay)
    thread.start()
    thread.join()
    graph.replay()
    assert cuda.log == [*ENTERED, "replay on compute", "replay on compute"]


def test_an_upload_is_one_copy_that_nobody_waits_for() -> None:
    cuda = TorchCuda()
    accelerator = create(cuda)
    device = target(cuda, 2)
    event = accelerator.upload(torch.tensor([1, 2], dtype=torch.int32), device)
    assert cuda.log == ["copy on compute", "record compute1"]
    assert device.tolist() == [1, 2]
    event.synchronize()
    assert cuda.log[-1] == "host waits for compute1"


def test_a_download_follows_the_compute_stream_and_holds_up_nothing() -> None:
    cuda = TorchCuda()
    accelerator = create(cuda)
    host = target(cuda, 2)
    event = accelerator.download(torch.tensor([1, 2], dtype=torch.int32), host)
    assert cuda.log == [
        "record compute1",
        "side waits for compute1",
        "on side",
        "copy on side",
        "on compute",
        "record side1",
    ]
    event.synchronize()
    assert cuda.log[-1] == "host waits for side1"
    assert host.tolist() == [1, 2]


def test_what_is_downloaded_lives_until_the_copy_is_done() -> None:
    cuda = TorchCuda()
    accelerator = create(cuda)
    freed: list[bool] = []
    storage = torch.zeros(2, dtype=torch.int32)
    alive = torch.multiprocessing.reductions.StorageWeakRef(storage.untyped_storage())
    event = accelerator.download(storage, target(cuda, 2))
    del storage
    freed.append(alive.expired())
    event.synchronize()
    freed.append(alive.expired())
    assert freed == [False, True]


@pytest.mark.parametrize("source", [torch.zeros(3, dtype=torch.int32), torch.zeros(2), torch.zeros(4).int()[::2]])
def test_a_copy_that_is_not_one_transfer_is_refused(source: torch.Tensor) -> None:
    cuda = TorchCuda()
    accelerator = create(cuda)
    for copy in (accelerator.upload, accelerator.download):
        with pytest.raises(AssertionError):
            copy(source, target(cuda, 2))


@pytest.mark.parametrize("inference_mode", [False, True])
def test_copies_write_tensors_of_either_mode(inference_mode: bool) -> None:
    accelerator = create(TorchCuda())
    with torch.inference_mode(inference_mode):
        host = torch.zeros(2)
    accelerator.download(torch.ones(2), host)
    assert host.tolist() == [1.0, 1.0]


def test_all_graphs_are_captured_on_the_compute_stream_and_share_one_pool() -> None:
    cuda = TorchCuda()
    accelerator = create(cuda)
    graphs = [accelerator.capture(lambda: cuda.log.append("body")) for _ in range(2)]
    assert cuda.log == ["capture in pool 1 on compute, thread_local", "body", "captured"] * 2
    graphs[1].replay()
    assert cuda.log[-1] == "replay on compute"


@pytest.mark.parametrize("was_enabled", [False, True])
def test_no_garbage_is_collected_while_capturing(was_enabled: bool) -> None:
    accelerator = create(TorchCuda())
    seen: list[bool] = []

    def body() -> None:
        seen.append(gc.isenabled())
        raise OSError

    if not was_enabled:
        gc.disable()
    try:
        with pytest.raises(OSError):
            accelerator.capture(body)
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [False, was_enabled]


def test_pinned_memory_is_pinned_words_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = create(TorchCuda())
    asked: list[dict[str, Any]] = []
    zeros = torch.zeros

    def fake_zeros(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append({"size": size, "pin_memory": pin_memory})
        return zeros(size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", fake_zeros)
    block = accelerator.pinned(3)
    assert (block.dtype, block.tolist()) == (torch.int32, [0, 0, 0])
    assert asked == [{"size": 3, "pin_memory": True}]


def test_peak_bytes_are_those_above_what_was_held_before() -> None:
    cuda = TorchCuda()
    accelerator = create(cuda)
    cuda.peak = 5000  # of loading

    def body() -> None:
        cuda.allocate(40)
        cuda.allocated.remove(40)
        cuda.allocate(30)

    assert accelerator.peak_bytes(body) == 40
    assert cuda.log == [
        *("host waits for cuda:0", "empty_cache", "reset_peak"),
        *("host waits for cuda:0", "empty_cache"),
    ]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "install a build of torch for CUDA"),
        (
            RuntimeError("The NVIDIA driver on your system is too old (found version 12000). Please"),
            "update the driver",
        ),
        (RuntimeError("Found no NVIDIA driver on your system. Please check"), "there is no NVIDIA driver: install it"),
        (RuntimeError("No CUDA GPUs are available"), "CUDA sees no GPU: check nvidia-smi, and CUDA_VISIBLE_DEVICES"),
        (
            RuntimeError("CUDA unknown error - this may be\nmore"),
            "CUDA does not start: CUDA unknown error - this may be",
        ),
        (RuntimeError(""), "CUDA does not start: no reason given"),
        (torch.cuda.DeferredCudaCallError("call failed"), "CUDA does not start: call failed"),
    ],
)
def test_cuda_that_does_not_start_says_what_to_change(error: Exception, said: str) -> None:
    with pytest.raises(NoDeviceError) as refused:
        CudaAccelerator(torch_cuda=TorchCuda(init_error=error))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_torch_without_cuda_says_so() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with pytest.raises(NoDeviceError, match="was built without CUDA"):
        CudaAccelerator()


def test_a_torch_for_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(NoDeviceError, match="was built for ROCm"):
        CudaAccelerator(torch_cuda=TorchCuda())


def test_a_card_that_is_not_there_is_refused() -> None:
    with pytest.raises(NoDeviceError, match="there is no GPU 2: CUDA sees 2, counted from 0"):
        CudaAccelerator(2, torch_cuda=TorchCuda())


@pytest.mark.parametrize(("capability", "is_refused"), [((7, 5), True), ((8, 0), False), ((12, 0), False)])
def test_a_card_without_bf16_is_refused(capability: tuple[int, int], is_refused: bool) -> None:
    cuda = TorchCuda(capability=capability)
    if not is_refused:
        assert CudaAccelerator(torch_cuda=cuda).capability == capability
        return
    with pytest.raises(NoDeviceError, match=r"GPU 0 \(Card 0\) has compute capability 7\.5; 8\.0 \(Ampere\) or newer"):
        CudaAccelerator(torch_cuda=cuda)
