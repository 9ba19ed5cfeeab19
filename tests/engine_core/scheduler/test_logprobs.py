"""Logprobs on their way from the runner's result to the clients' records: whose, how many, when, and when not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine_core.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, TokenLogprobs
from engine_core.scheduler.scheduler import Scheduler
from tests.engine_core.fake_runner import expect_logprobs
from tests.engine_core.scheduler.scenario_helpers import foretell, propose, run_to_end
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler

PROMPT = list(range(10))


class LogprobsHarness(Harness):
    """A harness that keeps every message that tells something, and what the records say."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.messages: list[EngineCoreOutputs] = []
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}

    def _take(self, outputs: EngineCoreOutputs) -> None:
        super()._take(outputs)
        if outputs.outputs or outputs.token_ids:
            self.messages.append(outputs)
        assert not set(outputs.token_req_ids) & {output.request_id for output in outputs.outputs}
        for output in outputs.outputs:
            if output.logprobs is not None:
                assert [each.token_id for each in output.logprobs] == output.new_token_ids
                self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.prompt_logprobs, "once"
                assert len(self.token_ids[output.request_id]) == len(output.new_token_ids) > 0, "with the first token"
                self.prompt_logprobs[output.request_id] = output.prompt_logprobs

    def check(self, request_id: str, prompt: Sequence[int], num_top: int = 0) -> None:
        """Each token of the request has the logprobs that the model gave it, and no other's."""
        found = expect_logprobs([*prompt, *self.token_ids[request_id]], num_top)[len(prompt) - 1 :]
        assert self.logprobs[request_id] == found and found


def create(**overrides: Any) -> LogprobsHarness:
    return LogprobsHarness(create_scheduler(**overrides))


@pytest.mark.parametrize("depth", [1, 2])
def test_those_who_asked_get_records_and_the_others_stay_in_the_columns(depth: int) -> None:
    h = create(max_steps_in_flight=depth)
    h.add("A", PROMPT, 6, num_logprobs=2)
    h.add("B", PROMPT, 6)
    h.add("C", PROMPT[:5], 6, num_logprobs=0)
    run_to_end(h)
    h.check("A", PROMPT, 2)
    h.check("C", PROMPT[:5])
    assert set(h.logprobs) == {"A", "C"} and not h.prompt_logprobs
    lines = [(message.token_req_ids, len(message.outputs)) for message in h.messages if message.token_req_ids]
    assert lines == [(["B"], 2)] * 4, "all but the first token and the last"


def test_a_step_without_any_leaves_the_columns_as_they_are() -> None:
    h = create()
    h.add("A", PROMPT, 4)
    run_to_end(h)
    assert [message.token_req_ids for message in h.messages] == [[], ["A"], ["A"], []]
    assert all(output.logprobs is None and output.prompt_logprobs is None for m in h.messages for output in m.outputs)


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_each_accepted_draft_has_its_own(num_drafts: int) -> None:
    h = create()
    h.add("A", PROMPT, 12, num_logprobs=1)
    while h.scheduler.has_unfinished_requests():
        propose(h, num_drafts)
        h.step()
    h.check("A", PROMPT, 1)
    assert any(len(output.new_token_ids) > 1 for message in h.messages for output in message.outputs)


def test_those_behind_a_stop_inside_drafts_are_cut_off() -> None:
    coming = foretell(PROMPT, 8)
    h = create()
    h.add("A", PROMPT, 20, num_logprobs=0, stop_token_ids=frozenset({coming[2]}), min_tokens=2)
    assert coming[2] not in coming[1:2]
    h.step()
    h.scheduler.set_draft_token_ids({"A": coming[1:6]})
    h.step()
    assert h.last["A"].finish_reason is FinishReason.STOP and h.token_ids["A"] == coming[:3]
    h.check("A", PROMPT)
    run_to_end(h)


def test_an_aborted_requests_are_dropped() -> None:
    h = create(max_steps_in_flight=2)
    h.add("A", PROMPT, 20, num_logprobs=0, num_prompt_logprobs=0)
    h.add("B", PROMPT, 5, num_logprobs=0)
    h.step()
    h.abort("A")
    run_to_end(h)
    assert "A" not in h.logprobs and "A" not in h.prompt_logprobs
    h.check("B", PROMPT)


def test_a_failing_request_ends_without_any_and_touches_nobody() -> None:
    h = create()
    for request_id in "AB":
        h.add(request_id, PROMPT, 5, num_logprobs=0, skip_reading_prefix_cache=True, num_prompt_logprobs=0)
    h.runner.failing_ids.add("A")
    run_to_end(h)
    assert h.last["A"].finish_reason is FinishReason.ERROR
    assert set(h.logprobs) == set(h.prompt_logprobs) == {"B"}
    h.check("B", PROMPT)


def test_a_record_without_tokens_has_none_whatever_the_runner_says() -> None:
    h = create()
    h.add("A", PROMPT, 5, num_logprobs=0, num_prompt_logprobs=0)
    h.schedule()
    scheduled, _ = h.in_flight.popleft()
    result = h.runner.execute(scheduled)
    assert result.logprobs and result.prompt_logprobs
    result.errors["A"] = "The logits are not finite."
    (output,) = h.scheduler.update_from_output(scheduled, result).outputs
    assert (output.new_token_ids, output.logprobs, output.prompt_logprobs) == ([], None, None)


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompts_come_once_and_whole_with_the_first_token(chunk: int, depth: int) -> None:
    h = create(max_chunk_size=chunk, max_steps_in_flight=depth, block_size=4)
    h.add("earlier", PROMPT, 1)
    run_to_end(h)
    h.add("A", PROMPT, 3, num_prompt_logprobs=3, skip_reading_prefix_cache=True)
    h.add("B", PROMPT, 3)
    run_to_end(h)
    assert h.prompt_logprobs == {"A": expect_logprobs(PROMPT, 3)}
    assert not h.logprobs


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cached_prompt_is_computed_whole_without_being_told(depth: int) -> None:
    """Nobody sets skip_reading_prefix_cache here: who asks for its prompt's logprobs has said enough."""
    h = create(max_steps_in_flight=depth, block_size=4)
    h.add("earlier", PROMPT, 1)
    run_to_end(h)
    h.add("A", PROMPT, 3, num_logprobs=0, num_prompt_logprobs=2)
    run_to_end(h)
    assert h.prompt_logprobs == {"A": expect_logprobs(PROMPT, 2)}
    h.check("A", PROMPT)
    h.add("later", PROMPT, 1)
    run_to_end(h)
    assert h.last["later"].num_cached_tokens > 0, "others find what it computed"


def test_a_prompt_of_one_token_has_none_and_says_so() -> None:
    h = create()
    h.add("A", [3], 1, num_prompt_logprobs=1)
    run_to_end(h)
    assert h.prompt_logprobs == {"A": []}


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_reset_costs_and_doubles_nothing(when: int, depth: int) -> None:
    """Preempted within the prompt, where its logprobs are gathered anew, or behind it, where they have been sent."""
    h = create(max_chunk_size=4, max_steps_in_flight=depth, block_size=4)
    h.add("A", PROMPT, 5, num_logprobs=1, num_prompt_logprobs=1, skip_reading_prefix_cache=True)
    for _ in range(when):
        h.step()
    assert h.scheduler.reset_prefix_cache(reset_running=True)
    run_to_end(h)
    h.check("A", PROMPT, 1)
    assert h.prompt_logprobs == {"A": expect_logprobs(PROMPT, 1)}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_victims_are_right(depth: int) -> None:
    """What it samples while it is being preempted goes its own way to the client."""
    h = create(num_blocks=4, block_size=4, max_steps_in_flight=depth)
    prompts = {"A": list(range(7)), "B": list(range(10, 17))}
    for request_id, prompt in prompts.items():
        asked = {"num_logprobs": 0, "num_prompt_logprobs": 0, "skip_reading_prefix_cache": True}
        h.add(request_id, prompt, 6, **asked)
    preempted = []
    while h.has_work:
        h.step()
        assert h.output is not None
        preempted += h.output.preempted_req_ids
    assert "B" in preempted
    for request_id, prompt in prompts.items():
        h.check(request_id, prompt)
        assert h.prompt_logprobs[request_id] == expect_logprobs(prompt, 0)


def test_records_other_than_the_moved_lines_keep_what_they_say() -> None:
    h = create()
    h.add("A", PROMPT, 2, num_logprobs=0)
    run_to_end(h)
    first, last = (message.outputs[0] for message in h.messages)
    assert isinstance(first, EngineCoreOutput) and first.first_scheduled_time is not None
    assert last.finish_reason is FinishReason.LENGTH
