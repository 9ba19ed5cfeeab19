"""What a CUDA graph is: kernels with their arguments as they were at capture, on memory as it is at replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kernels.testing.device_calls import device_call
from kernels.testing.fake_cuda import FakeAccelerator, FakeCudaError


@pytest.fixture(params=[False, True], ids=["grad", "inference"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[FakeAccelerator]:
    """The same operations reach the dispatcher whole or in parts."""
    with torch.inference_mode(request.param):
        yield FakeAccelerator()


class Made:
    """What a body has left behind."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self.num_runs = 0

    def __call__(self) -> None:
        self.num_runs += 1
        self.value = self._make()


def test_a_replay_computes_from_what_memory_holds_then(accelerator: FakeAccelerator) -> None:
    x, weight = torch.ones(2, 4), torch.randn(3, 4)
    made = Made(lambda: torch.nn.functional.linear(x, weight).view(3, 2).relu().sum(dim=1))
    graph = accelerator.capture(made)
    for seed in range(3):
        x.copy_(torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        expected = torch.nn.functional.linear(x, weight).view(3, 2).relu().sum(dim=1)
        assert torch.equal(made.value, expected)
    assert made.num_runs == 1


def test_a_value_of_python_stays_what_it_was_at_capture(accelerator: FakeAccelerator) -> None:
    x = torch.zeros(2)
    step = {"scale": 2.0, "rows": 1}

    def body() -> None:
        x.fill_(step["scale"])
        x[: int(step["rows"])].mul_(step["scale"])
        x[1] = step["scale"] + 1

    graph = accelerator.capture(body)
    step.update(scale=9.0, rows=2)
    graph.replay()
    assert x.tolist() == [4.0, 3.0]


def test_a_branch_stays_what_it_was_at_capture(accelerator: FakeAccelerator) -> None:
    x = torch.zeros(1)
    greedy = [True]
    graph = accelerator.capture(lambda: x.add_(1) if greedy[0] else x.sub_(1))
    greedy[0] = False
    graph.replay()
    assert x.tolist() == [1.0]


def test_a_capture_computes_nothing(accelerator: FakeAccelerator) -> None:
    x = torch.ones(2)
    made = Made(lambda: device_call(torch.Tensor.add_, x.mul_(2), 5).clone())
    graph = accelerator.capture(made)
    assert x.tolist() == [1.0, 1.0]
    assert bool(made.value.isnan().all())
    graph.replay()
    assert (x.tolist(), made.value.tolist()) == ([7.0, 7.0], [7.0, 7.0])


def test_results_lie_in_the_same_memory_at_each_replay(accelerator: FakeAccelerator) -> None:
    x = torch.ones(2, 3)
    made = Made(lambda: (x + 1).t()[1:])
    graph = accelerator.capture(made)
    address = made.value.data_ptr()
    graph.replay()
    assert made.value.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    x.fill_(5)
    graph.replay()
    assert made.value.tolist() == [[6.0, 6.0], [6.0, 6.0]]
    assert made.value.data_ptr() == address


def test_a_view_taken_inside_stays_an_alias(accelerator: FakeAccelerator) -> None:
    x = torch.zeros(4, 2)

    def body() -> None:
        q, k = (x + 1).split([1, 1], dim=1)
        q.mul_(10)
        k.unsqueeze_(0).squeeze_(0)
        x.copy_(torch.cat((q, k), dim=1))

    graph = accelerator.capture(body)
    graph.replay()
    graph.replay()
    assert x.tolist() == [[110.0, 2.0]] * 4


def test_looking_at_memory_in_another_way_writes_nothing(accelerator: FakeAccelerator) -> None:
    x = torch.ones(2, dtype=torch.int32)
    graph = accelerator.capture(lambda: x.unsqueeze_(0).squeeze_(0).view(2, 1))
    accelerator.download(x, accelerator.pinned(2))
    graph.replay()
    assert x.shape == (2,)


def test_what_the_body_made_lives_as_long_as_the_graph(accelerator: FakeAccelerator) -> None:
    x, out = torch.ones(1024), torch.zeros(1024)

    def body() -> None:
        hidden = x * 3
        out.copy_(hidden + hidden)

    graph = accelerator.capture(body)
    noise = [torch.full((1024,), float(i)) for i in range(32)]
    graph.replay()
    assert out.tolist() == [6.0] * 1024
    assert [row[0].item() for row in noise] == list(range(32))


def test_memory_that_was_freed_since_the_capture_raises(accelerator: FakeAccelerator) -> None:
    out = torch.zeros(3)
    table = torch.arange(3.0)
    graph = accelerator.capture(lambda: out.add_(table))
    graph.replay()
    table = torch.arange(3.0)  # grown, say
    with pytest.raises(FakeCudaError, match=r"add_ reads a tensor of shape \[3\] that has been freed since"):
        graph.replay()


def test_a_view_may_go_while_its_memory_stays(accelerator: FakeAccelerator) -> None:
    block, out = torch.arange(6.0), torch.zeros(3)
    views = [block[3:]]
    graph = accelerator.capture(lambda: out.copy_(views[0]))
    views.clear()
    graph.replay()
    assert out.tolist() == [3.0, 4.0, 5.0]


def test_an_opaque_kernel_reads_its_memory_at_each_replay(accelerator: FakeAccelerator) -> None:
    x, indices = torch.arange(4.0), torch.tensor([0, 1])

    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x[indices.tolist()] * scale

    made = Made(lambda: device_call(kernel, x, 2.0) + 1)
    graph = accelerator.capture(made)
    indices.copy_(torch.tensor([3, 2]))
    graph.replay()
    assert made.value.tolist() == [7.0, 5.0]


def test_an_opaque_kernel_may_write_its_arguments_and_give_several_results(accelerator: FakeAccelerator) -> None:
    x, residual = torch.ones(2), torch.ones(2)

    def kernel(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual.add_(x)
        return residual * 2, x

    made = Made(lambda: torch.stack(device_call(kernel, x, residual)))
    graph = accelerator.capture(made)
    graph.replay()
    graph.replay()
    assert residual.tolist() == [3.0, 3.0]
    assert made.value.tolist() == [[6.0, 6.0], [1.0, 1.0]]


def test_what_an_opaque_kernel_writes_is_known_to_be_written(accelerator: FakeAccelerator) -> None:
    x = torch.ones(1, dtype=torch.int32)
    graph = accelerator.capture(lambda: device_call(torch.Tensor.add_, x, 1))
    accelerator.download(x, accelerator.pinned(1))
    with pytest.raises(FakeCudaError, match="a graph writes memory that a download still reads"):
        graph.replay()


def test_what_a_graph_allocates_is_written_by_its_replay(accelerator: FakeAccelerator) -> None:
    x = torch.ones(1, dtype=torch.int32)
    made = Made(lambda: x + 1)
    graph = accelerator.capture(made)
    graph.replay()
    accelerator.download(made.value, accelerator.pinned(1))
    with pytest.raises(FakeCudaError, match="a graph writes memory that a download still reads"):
        graph.replay()


def test_an_opaque_kernel_whose_result_changes_its_shape_raises(accelerator: FakeAccelerator) -> None:
    sizes = [3]
    graph = accelerator.capture(lambda: device_call(lambda: torch.zeros(sizes[0])))
    sizes[0] = 1
    with pytest.raises(FakeCudaError, match=r"gave \[3\] at capture and \[1\] now"):
        graph.replay()


def test_memory_that_nobody_has_written_is_garbage_each_time(accelerator: FakeAccelerator) -> None:
    made = Made(lambda: torch.empty(2).add_(1))
    ids = Made(lambda: torch.empty(2, dtype=torch.int32))
    graph = accelerator.capture(lambda: (made(), ids()))
    graph.replay()
    made.value.fill_(1.0)
    ids.value.fill_(1)
    graph.replay()
    assert bool(made.value.isnan().all())
    assert ids.value.tolist() == [0x5A5A5A5A] * 2


def test_numbers_and_scalars_may_be_baked_in(accelerator: FakeAccelerator) -> None:
    x = torch.arange(3.0)
    made = Made(lambda: torch.where(x > 1, x, 0.5) + torch.zeros(3).index_fill(0, torch.arange(1), -1.0))
    graph = accelerator.capture(made)
    graph.replay()
    assert made.value.tolist() == [-0.5, 0.5, 2.0]


def test_results_given_by_out_are_written(accelerator: FakeAccelerator) -> None:
    x, out = torch.ones(2, 2), torch.zeros(2, 2)
    graph = accelerator.capture(lambda: torch.mm(x, x, out=out))
    graph.replay()
    assert out.tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    ("name", "wait"),
    [
        ("item", lambda x: x[0].item()),
        ("bool", lambda x: bool(x[0])),
        ("int", lambda x: int(x[0])),
        ("slice", lambda x: x[: x.argmax()]),
        ("tolist", lambda x: x.tolist()),
        ("cpu", lambda x: x.cpu()),
        ("numpy", lambda x: x.numpy()),
        ("asarray", lambda x: np.asarray(x)),
        ("format", lambda x: f"{x[0]:.2f}"),
        ("repr", lambda x: repr(x)),
        ("nonzero", lambda x: x.nonzero()),
        ("where", lambda x: torch.where(x > 1)),
        ("masked_select", lambda x: x.masked_select(x > 1)),
        ("mask", lambda x: x[x > 1]),
        ("set by mask", lambda x: x.__setitem__(x > 1, 0.0)),
        ("unique", lambda x: x.unique()),
        ("equal", lambda x: torch.equal(x, x + 1)),
        ("multinomial", lambda x: x.multinomial(1)),
        ("repeat_interleave", lambda x: x.repeat_interleave(x.long())),
    ],
)
def test_a_capture_may_not_wait(
    accelerator: FakeAccelerator, name: str, wait: Callable[[torch.Tensor], object]
) -> None:
    x = torch.arange(3.0)
    with pytest.raises(FakeCudaError, match="a capture may not wait for the device"):
        accelerator.capture(lambda: wait(x))


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x * torch.tensor(2.0),
        lambda x: x + torch.as_tensor(np.ones(3)),
        lambda x: x + torch.from_numpy(np.ones(3)),
        lambda x: x.new_tensor([1.0]),
        lambda x: x[[0, 2]],
    ],
)
def test_a_capture_may_not_copy_from_the_host(
    accelerator: FakeAccelerator, copy: Callable[[torch.Tensor], object]
) -> None:
    x = torch.arange(3.0)
    with pytest.raises(FakeCudaError, match="a capture may not copy from the host"):
        accelerator.capture(lambda: copy(x))


def test_graphs_share_static_memory(accelerator: FakeAccelerator) -> None:
    block, sampled = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    graphs = [
        accelerator.capture(lambda n=n: sampled[:n].copy_(block[:n] + n))  # type: ignore[misc]
        for n in (4, 2)
    ]
    block.fill_(10)
    graphs[0].replay()
    graphs[1].replay()
    assert sampled.tolist() == [12, 12, 14, 14, 0, 0, 0, 0]
