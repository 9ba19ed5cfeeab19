"""The device's runner against the plain one, over the same model: token for token, whatever is in flight."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine_core.messages import FinishReason
from engine_core.model import logit_fetcher
from engine_core.model.device_runner import DeviceRunner
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from tests.engine_core.model.device_steps import Asked, Machine, build_machine, run_device, run_plain

GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 1.3, "seed": 5}
CUT: dict[str, Any] = {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 6}
eagerly_or_in_graphs = pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return build_machine()


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 90), k=num_tokens)


# ---------------------------------------------------------------------- the same tokens
MIXED = [
    Asked(prompt(9, 1), GREEDY),
    Asked(prompt(5, 2), RANDOM),
    Asked(prompt(14, 3), CUT, arrives=2),
    Asked(prompt(3, 4), {"temperature": 0.7, "min_p": 0.05, "seed": -7}, arrives=3),
    Asked(prompt(30, 5), {**GREEDY, "max_tokens": 4}, arrives=4),
    Asked(prompt(6, 6), {**RANDOM, "top_p": 0.6, "seed": 8}, arrives=9),
]


@eagerly_or_in_graphs
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_request_gets_what_the_plain_runner_gives_it(machine: Machine, enforce_eager: bool, depth: int) -> None:
    expected = run_plain(machine, MIXED)
    assert run_device(machine, MIXED, enforce_eager=enforce_eager, depth=depth).got == expected
    assert len({tuple(got.token_ids) for got in expected.values()}) == len(MIXED)


def test_prompts_in_chunks(machine: Machine) -> None:
    config = {"max_num_batched_tokens": 7, "max_num_seqs": 3}
    assert run_device(machine, MIXED, **config).got == run_plain(machine, MIXED, **config)


def test_a_chunk_of_one_token_looks_like_decoding_and_gets_no_token(machine: Machine) -> None:
    """The longer prompt stands in front: row 1 of the step's requests is row 0 of those that get a token."""
    asked = [Asked(prompt(9, 1), {**GREEDY, "max_tokens": 3}), Asked(prompt(3, 2), RANDOM)]
    expected = run_plain(machine, asked, long_prefill_token_threshold=1)
    machine.backend.plans.clear()
    assert run_device(machine, asked, long_prefill_token_threshold=1).got == expected
    assert {(2, 0, False), (2, 0, True)} <= set(machine.backend.plans)


@eagerly_or_in_graphs
def test_preempted_requests_come_back(machine: Machine, enforce_eager: bool) -> None:
    asked = [Asked(prompt(10 + n, n), {**(GREEDY, RANDOM, CUT)[n % 3], "max_tokens": 25}, arrives=n) for n in range(5)]
    expected = run_plain(machine, asked)
    engine = run_device(machine, asked, num_blocks=20, enforce_eager=enforce_eager)
    assert engine.num_preempted > 0
    assert engine.got == expected


def test_aborts_while_steps_are_in_flight_leave_the_others_alone(machine: Machine) -> None:
    asked = [
        Asked(
            prompt(6, n),
            {**(GREEDY, RANDOM)[n % 2], "max_tokens": 20},
            arrives=n // 2,
            aborted=5 + n if n % 3 else None,
        )
        for n in range(8)
    ]
    expected, found = run_plain(machine, asked), run_device(machine, asked).got
    for request_id, got in expected.items():
        if got.finish_reason is FinishReason.ABORT:
            num_both = min(len(got.token_ids), len(found[request_id].token_ids))
            assert num_both > 0
            assert found[request_id].token_ids[:num_both] == got.token_ids[:num_both]
        else:
            assert found[request_id] == got


def test_a_slot_goes_to_the_next_request_and_brings_it_nothing(machine: Machine) -> None:
    """Two at a time: whoever comes later runs in the slot of one before, whose last step may still be in flight."""
    asked = [Asked(prompt(4 + n % 3, n), {**(GREEDY, CUT)[n % 2], "max_tokens": 1 + n % 4}) for n in range(12)]
    expected = run_plain(machine, asked)
    assert run_device(machine, asked, max_num_seqs=2).got == expected


def test_an_unforeseen_end_wastes_a_step_and_changes_nothing(machine: Machine) -> None:
    free = run_plain(machine, [Asked(prompt(8, 3), GREEDY)])["0"].token_ids
    stop = {**GREEDY, "stop_token_ids": frozenset(free[4:5])}
    asked = [Asked(prompt(8, 3), stop), Asked(prompt(5, 4), RANDOM)]
    expected = run_plain(machine, asked)
    assert len(expected["0"].token_ids) < len(free)
    assert run_device(machine, asked).got == expected


@eagerly_or_in_graphs
def test_shared_prefixes_stand_apart(machine: Machine, enforce_eager: bool) -> None:
    head = prompt(17, 1)
    asked = [Asked([*head, *prompt(3 + n, n)], (GREEDY, RANDOM, CUT)[n % 3], arrives=2 * (n > 0)) for n in range(5)]
    expected = run_plain(machine, asked)
    machine.backend.plans.clear()
    assert run_device(machine, asked, enforce_eager=enforce_eager, enable_cascade_attn=True).got == expected
    shared = {(size, is_in_graph) for size, num_shared, is_in_graph in machine.backend.plans if num_shared == 4}
    assert (5, False) in shared and ((8, True) in shared) is not enforce_eager


def test_a_padded_head_is_nobodys_concern(machine: Machine) -> None:
    runner = machine.new_runner(num_token_ids=20, enforce_eager=True)
    plain = machine.plain_runner(num_token_ids=20)
    for each in (runner, plain):
        found = []
        each.execute(step({"a": 3, "b": 2}, entering={"a": GREEDY, "b": {"temperature": 50.0}}))
        for start in range(20):
            found.append(each.execute(step({"a": 1, "b": 1}, starts={"a": 3 + start, "b": 2 + start})).token_ids)
        assert max(map(max, found)) < 20
        if each is runner:
            expected = found
    assert found == expected


# ---------------------------------------------------------------------- what only the host does
BENT = [
    Asked(prompt(9, 1), GREEDY),
    Asked(prompt(7, 2), {**RANDOM, "max_tokens": 25}),
    Asked(prompt(5, 3), {**GREEDY, "frequency_penalty": 1.5, "max_tokens": 6}, arrives=4),
    Asked(prompt(6, 4), {**CUT, "repetition_penalty": 1.4, "max_tokens": 5}, arrives=5),
    Asked(prompt(12, 5), {**RANDOM, "logit_bias": {7: 3.0, 9: -100.0}, "max_tokens": 3}, arrives=6),
    Asked(prompt(8, 6), {**GREEDY, "num_logprobs": 2, "num_prompt_logprobs": 1, "max_tokens": 3}, arrives=13),
    Asked(prompt(1, 7), {**CUT, "num_prompt_logprobs": 0, "max_tokens": 9}, arrives=14),
]


@eagerly_or_in_graphs
@pytest.mark.parametrize("step_tokens", [4, 64])
def test_rows_that_need_the_host_get_it_and_the_others_do_not_notice(
    machine: Machine, enforce_eager: bool, step_tokens: int
) -> None:
    expected = run_plain(machine, BENT, max_num_batched_tokens=step_tokens)
    found = run_device(machine, BENT, enforce_eager=enforce_eager, max_num_batched_tokens=step_tokens).got
    assert found == expected
    assert expected["6"].prompt_logprobs == [] and len(expected["5"].prompt_logprobs or []) == 7


def test_a_prompt_of_one_token_has_no_logprobs_and_says_so(machine: Machine) -> None:
    asked = [Asked(prompt(1), {**GREEDY, "num_prompt_logprobs": 0}), Asked(prompt(4), RANDOM)]
    found = run_device(machine, asked).got
    assert found["0"].prompt_logprobs == [] and found["1"].prompt_logprobs is None
    assert found == run_plain(machine, asked)


def test_the_hosts_rows_come_in_pieces_behind_a_step_in_flight(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_plain(machine, BENT)
    monkeypatch.setattr(logit_fetcher, "_MAX_BYTES", 2 * 4 * machine.decoder.arch.vocab_size)
    small = Machine(machine.accelerator, machine.backend, machine.decoder)
    assert run_device(small, BENT, enforce_eager=True).got == expected


def test_min_tokens_holds_the_end_back_and_then_the_device_goes_on_alone(machine: Machine) -> None:
    free = run_plain(machine, [Asked(prompt(8, 3), GREEDY)])["0"].token_ids
    ends = {**GREEDY, "eos_token_ids": frozenset(free[1:2]), "min_tokens": 4}
    asked = [Asked(prompt(8, 3), ends), Asked(prompt(5, 4), RANDOM)]
    expected = run_plain(machine, asked)
    assert len(expected["0"].token_ids) >= 4
    assert run_device(machine, asked).got == expected


# ---------------------------------------------------------------------- logits that are not finite
class Spoiled:
    """Has a model give NaN where ``token_id`` is the likeliest: only a device's kernels, so a graph holds it too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machine: Machine, token_id: int) -> None:
        plain = machine.decoder.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            whole = plain(hidden)
            is_bad = whole.argmax(1, keepdim=True) == token_id
            nan_at_3 = torch.zeros_like(whole).index_fill_(1, torch.arange(3, 4), float("nan"))
            return torch.where(is_bad, whole + nan_at_3, whole)

        monkeypatch.setattr(machine.decoder, "logits", logits)


@eagerly_or_in_graphs
@pytest.mark.parametrize("host_lane", [False, True])
def test_a_row_that_is_not_finite_ends_its_own_request(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool, host_lane: bool
) -> None:
    asked = [Asked(prompt(4 + n, n), {**(GREEDY, RANDOM, CUT)[n % 3], "max_tokens": 20}, arrives=n) for n in range(6)]
    if host_lane:
        asked.append(Asked(prompt(4, 7), {**GREEDY, "presence_penalty": 0.5, "max_tokens": 20}))
    bad = run_plain(machine, asked[:1])["0"].token_ids[5]
    Spoiled(monkeypatch, machine, bad)
    spoiled = Machine(machine.accelerator, machine.backend, machine.decoder)
    expected = run_plain(spoiled, asked)
    assert run_device(spoiled, asked, enforce_eager=enforce_eager).got == expected
    errors = [got.error for got in expected.values() if got.error]
    assert 0 < len(errors) < len(asked) and all("not finite" in error for error in errors)


# ---------------------------------------------------------------------- what a step costs
def step(
    counts: dict[str, int],
    *,
    entering: dict[str, dict[str, Any]] | None = None,
    starts: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
) -> SchedulerOutput:
    """Return a step; requests that enter have a prompt of as many tokens as they compute, and a table for 32."""
    news = [
        NewRequestData(
            request_id,
            prompt(counts[request_id], place),
            counts[request_id],
            SamplingParams(**{"max_tokens": 60, **params}),
            list(range(1 + 8 * place, 9 + 8 * place)),
            0,
        )
        for place, (request_id, params) in enumerate((entering or {}).items())
    ]
    return SchedulerOutput(
        req_ids=list(counts),
        token_counts=list(counts.values()),
        starts=[(starts or {}).get(request_id, 0) for request_id in counts],
        scheduled_new_reqs=news,
        finished_req_ids=list(finished),
        total_num_scheduled_tokens=sum(counts.values()),
    )


@pytest.fixture
def started(machine: Machine) -> Iterator[DeviceRunner]:
    """Three requests that have computed their prompts of 4 tokens."""
    runner = machine.device_runner()
    params = {"a": GREEDY, "b": RANDOM, "c": CUT}
    runner.execute(step(dict.fromkeys("abc", 4), entering=params))
    yield runner
    runner.execute(step({}, finished=("a", "b", "c")))
    machine.accelerator.synchronize()


def decode(place: int) -> SchedulerOutput:
    return step(dict.fromkeys("abc", 1), starts=dict.fromkeys("abc", 4 + place))


def test_a_fast_step_is_one_upload_two_replays_and_one_download(machine: Machine, started: DeviceRunner) -> None:
    machine.accelerator.log.clear()
    started.launch(decode(0))()
    assert machine.accelerator.log == ["upload", "replay", "replay", "download", "wait"]


def test_launching_waits_for_nobody(machine: Machine, started: DeviceRunner) -> None:
    accelerator = machine.accelerator
    with accelerator.no_waits():
        pending = [started.launch(decode(0)), started.launch(decode(1))]
    for place in range(2, 6):
        pending.pop(0)()
        with accelerator.no_waits():
            pending.append(started.launch(decode(place)))
    assert [len(wait().token_ids) for wait in pending] == [3, 3]


def test_a_third_step_in_flight_waits_for_the_first(machine: Machine, started: DeviceRunner) -> None:
    pending = [started.launch(decode(place)) for place in range(2)]
    with machine.accelerator.no_waits(), pytest.raises(RuntimeError, match="waits for the device"):
        started.launch(decode(2))
    for wait in pending:
        wait()


def test_results_may_be_asked_for_in_any_order(started: DeviceRunner) -> None:
    first, second = started.launch(decode(0)), started.launch(decode(1))
    later, earlier = second(), first()
    assert min(later.token_ids) >= 0 and min(earlier.token_ids) >= 0
    assert second() is later


def test_a_chunk_that_samples_nothing_brings_nothing_back(machine: Machine) -> None:
    runner = machine.device_runner()
    entering = NewRequestData("x", prompt(9), 9, SamplingParams(max_tokens=5), [1, 2, 3], 0)
    chunk = SchedulerOutput(1, ["x"], [5], [0], {}, [entering], total_num_scheduled_tokens=5)
    machine.accelerator.log.clear()
    pending = runner.launch(chunk)
    assert machine.accelerator.log == ["upload", "event"]
    assert pending().token_ids == [-1]
    runner.execute(step({}, finished=("x",)))


def test_an_empty_step_asks_nothing_of_the_device(machine: Machine) -> None:
    machine.accelerator.log.clear()
    assert machine.device_runner().execute(SchedulerOutput(finished_req_ids=["nobody"])).token_ids == []
    assert machine.accelerator.log == []


def test_a_step_with_the_host_brings_only_the_rows_that_are_needed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = machine.device_runner()
    params = {"a": GREEDY, "b": {**GREEDY, "presence_penalty": 1.0}, "c": CUT}
    sizes: list[list[int]] = []
    download = machine.accelerator.download
    monkeypatch.setattr(
        machine.accelerator,
        "download",
        lambda source, target: (sizes.append(list(source.shape)), download(source, target))[1],
    )
    runner.execute(step(dict.fromkeys("abc", 4), entering=params))
    assert sizes == [[3], [1, machine.decoder.arch.vocab_size]]
    runner.execute(step({}, finished=("a", "b", "c")))
