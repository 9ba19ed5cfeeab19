from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine_core import EnginePhase
from server.admission import Admission, SamplingDefaults
from server.errors import ErrorKind, RequestError
from server.prompt_threads import PromptThreads
from server.protocol import parse_chat, parse_completion
from server.wire_types import ChatRequest, CompletionRequest
from tests.server.fake_engine_client import FakeEngineClient, create_state
from tests.server.http_helpers import MODEL, FakeTemplate, FakeTokenizer, create_admission, create_prompts


def completion(prompt: Any = "hi", **fields: Any) -> CompletionRequest:
    return parse_completion({"prompt": prompt, **fields}, is_strict=True, on_unknown=print)


def chat(*contents: str, **fields: Any) -> ChatRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents or ("hi",))]
    return parse_chat({"messages": messages, **fields}, is_strict=True, on_unknown=print)


@asynccontextmanager
async def admitting(client: FakeEngineClient | None = None, **parts: Any) -> AsyncIterator[Admission]:
    prompt_parts = {name: parts.pop(name) for name in ("tokenizer", "chat_template", "vocab_size") if name in parts}
    threads = PromptThreads()
    yield create_admission(
        client or FakeEngineClient(), prompts=create_prompts(**prompt_parts), threads=threads, **parts
    )
    threads.close()


async def refuse_completion(wire: CompletionRequest, client: FakeEngineClient | None = None) -> RequestError:
    async with admitting(client) as admission:
        with pytest.raises(RequestError) as caught:
            await admission.admit_completion(wire)
    return caught.value


async def test_a_completion_becomes_an_engine_request() -> None:
    async with admitting(clock=lambda: 12.5) as admission:
        wire = completion("hi", max_tokens=3, temperature=0.5, top_p=0.9, top_k=-1, seed=7, stop=["x"], ignore_eos=True)
        admitted = await admission.admit_completion(wire)
    (request,) = admitted.requests
    engine_request = request.engine_request
    assert engine_request.request_id == admitted.response_id
    assert engine_request.request_id.startswith("cmpl-")
    assert engine_request.prompt_token_ids == [1, ord("h"), ord("i")]
    assert engine_request.arrival_time == 12.5
    assert request.stop_strings.fork().feed("ax") == ("a", "x")
    params = engine_request.sampling_params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (3, 0.5, 0.9, 0)
    assert (params.seed, params.eos_token_ids, params.ignore_eos) == (7, frozenset({2}), True)


async def test_all_prompts_of_a_completion_share_one_stop_string_automaton() -> None:
    async with admitting() as admission:
        admitted = await admission.admit_completion(completion(["a", "b"], stop=["x"]))
    first, second = admitted.requests
    assert first.stop_strings is second.stop_strings


async def test_a_chat_is_rendered_and_gets_no_second_bos() -> None:
    async with admitting() as admission:
        admitted = await admission.admit_chat(chat("a"))
    expected = [ord(character) for character in "user:a|assistant:"]
    (request,) = admitted.requests
    assert request.engine_request.prompt_token_ids == expected
    assert request.engine_request.request_id.startswith("chatcmpl-")


async def test_ids_are_unique_and_prompts_get_their_index() -> None:
    async with admitting() as admission:
        admitted = [await admission.admit_completion(completion(["a", [5, 6]], seed=3)) for _ in range(2)]
    ids = [request.engine_request.request_id for each in admitted for request in each.requests]
    assert len(set(ids)) == 4
    assert ids[:2] == [f"{admitted[0].response_id}-0", f"{admitted[0].response_id}-1"]
    # The same seed a prompt: its answer is the one that it would have alone.
    assert {r.engine_request.sampling_params.seed for r in admitted[0].requests} == {3}


async def test_a_seed_is_drawn_where_none_was_sent_and_is_never_negative() -> None:
    async with admitting() as admission:
        drawn = [await admission.admit_completion(completion()) for _ in range(3)]
        negative = await admission.admit_completion(completion(seed=-1))
    seeds = {each.requests[0].engine_request.sampling_params.seed for each in drawn}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert negative.requests[0].engine_request.sampling_params.seed == 2**63 - 1


async def test_the_models_sampling_defaults_apply_unless_the_request_says_otherwise() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    async with admitting(sampling_defaults=defaults) as admission:
        silent = (await admission.admit_chat(chat())).requests[0].engine_request.sampling_params
        loud_wire = chat(temperature=0, top_p=1, top_k=0)
        loud = (await admission.admit_chat(loud_wire)).requests[0].engine_request.sampling_params
    assert (silent.temperature, silent.top_p, silent.top_k) == (0.6, 0.95, 20)
    assert (loud.temperature, loud.top_p, loud.top_k) == (0, 1, 0)


@pytest.mark.parametrize(
    ("fields", "priority"), [({}, 0), ({"priority": None}, 0), ({"priority": 0}, 0), ({"priority": -7}, -7)]
)
async def test_a_priority_reaches_the_engine_where_there_are_priorities(fields: dict[str, Any], priority: int) -> None:
    async with admitting(has_priorities=True) as admission:
        admitted = [await admission.admit_completion(completion(["a", [5]], **fields))]
        admitted.append(await admission.admit_chat(chat(**fields)))
    assert [r.engine_request.priority for each in admitted for r in each.requests] == [priority] * 3


@pytest.mark.parametrize("priority", [1, -1, 2**31 - 1])
async def test_without_priorities_another_than_0_is_refused_with_what_to_change(priority: int) -> None:
    async with admitting() as admission:
        for admit in (
            admission.admit_completion(completion(priority=priority)),
            admission.admit_chat(chat(priority=priority)),
        ):
            with pytest.raises(RequestError, match="start the server with --scheduling-policy priority") as caught:
                await admit
            assert (caught.value.kind, caught.value.param) == (ErrorKind.UNSUPPORTED_PARAMETER, "priority")
            assert str(priority) in caught.value.message


async def test_without_priorities_0_and_null_are_taken() -> None:
    async with admitting() as admission:
        for fields in ({}, {"priority": None}, {"priority": 0}):
            admitted = await admission.admit_chat(chat(**fields))
            assert admitted.requests[0].engine_request.priority == 0


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, 64 - 17),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 10**30}, 64 - 17),
    ],
)
async def test_how_long_a_chat_answer_may_get(fields: dict[str, int], max_tokens: int) -> None:
    async with admitting() as admission:
        admitted = await admission.admit_chat(chat("a", **fields))
    assert admitted.requests[0].engine_request.sampling_params.max_tokens == max_tokens


async def test_a_completion_defaults_to_16_tokens_and_is_clamped_to_what_is_left() -> None:
    async with admitting() as admission:
        ordinary = await admission.admit_completion(completion([5]))
        late = await admission.admit_completion(completion([5] * 60))
    assert ordinary.requests[0].engine_request.sampling_params.max_tokens == 16
    assert late.requests[0].engine_request.sampling_params.max_tokens == 4


@pytest.mark.parametrize(
    ("num_blocks", "limit"),
    [(16, 64), (4, 32)],  # the context, or a pool that is smaller than it
)
async def test_a_prompt_that_does_not_fit_is_told_the_numbers(num_blocks: int, limit: int) -> None:
    client = FakeEngineClient(state=create_state(num_blocks=num_blocks))
    async with admitting(client) as admission:
        await admission.admit_completion(completion([5] * (limit - 1)))
    for prompt in ([5] * limit, "a" * (limit - 1)):
        error = await refuse_completion(completion(prompt, max_tokens=9), client)
        assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH_EXCEEDED, "prompt")
        assert all(f" {number} " in error.message.replace(";", " ") for number in (limit, 9))


@pytest.mark.parametrize("token_id", [-1, 1000, 10**30])
async def test_token_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    error = await refuse_completion(completion([5, token_id]))
    assert (error.kind, error.param) == (ErrorKind.INVALID_VALUE, "prompt")
    assert str(token_id) in error.message
    assert "999" in error.message
    error = await refuse_completion(completion(stop_token_ids=[token_id]))
    assert error.param == "stop_token_ids"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [5, 10**4000]},
        {"stop_token_ids": [-(10**4000)]},
        {"min_tokens": 10**4000},
        {"prompt": "a" * 99, "max_tokens": 10**4000},
    ],
)
async def test_a_number_of_thousands_of_digits_does_not_fill_the_message(fields: dict[str, Any]) -> None:
    error = await refuse_completion(completion(**fields))
    assert len(error.message) < 250
    assert "1" + "0" * 38 in error.message


async def test_text_that_the_tokenizer_knows_and_the_model_does_not_is_refused() -> None:
    async with admitting(vocab_size=ord("z")) as admission:
        for admit in (admission.admit_completion(completion("xyz")), admission.admit_chat(chat("xyz"))):
            with pytest.raises(RequestError, match="token id 122, but this model's ids run from 0 to 121"):
                await admit
        assert await admission.admit_completion(completion("xy"))


async def test_a_prompt_without_tokens_is_refused() -> None:
    class Silent(FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return []

    async with admitting(tokenizer=Silent()) as admission:
        with pytest.raises(RequestError, match="no tokens"):
            await admission.admit_completion(completion("\u200b"))


async def test_only_the_served_model_is_known() -> None:
    async with admitting() as admission:
        for name in (None, "", MODEL):
            await admission.admit_completion(completion(model=name))
    error = await refuse_completion(completion(model="gpt-4" * 1000))
    assert (error.kind, error.param) == (ErrorKind.MODEL_NOT_FOUND, "model")
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        (EnginePhase.LOADING, ErrorKind.NOT_READY),
        (EnginePhase.STOPPED, ErrorKind.ENGINE_DEAD),
        (EnginePhase.DEAD, ErrorKind.ENGINE_DEAD),
    ],
)
async def test_an_engine_that_is_not_ready_refuses_everything(phase: EnginePhase, kind: ErrorKind) -> None:
    client = FakeEngineClient(state=create_state(phase, progress=0.25))
    assert (await refuse_completion(completion(), client)).kind is kind


async def test_without_a_template_there_is_no_chat_but_there_are_completions() -> None:
    async with admitting(chat_template=None) as admission:
        await admission.admit_completion(completion())
        with pytest.raises(RequestError, match="no chat template") as caught:
            await admission.admit_chat(chat())
    assert caught.value.param == "messages"


async def test_the_templates_own_sentence_is_told() -> None:
    wire = parse_chat({"messages": [{"role": "user", "content": "a"}] * 2}, is_strict=True, on_unknown=print)
    async with admitting() as admission:
        with pytest.raises(RequestError) as caught:
            await admission.admit_chat(wire)
    assert (caught.value.kind, caught.value.message) == (ErrorKind.INVALID_VALUE, "Roles must alternate.")


async def test_the_template_sees_role_content_and_name() -> None:
    class Recording(FakeTemplate):
        seen: list[dict[str, str]]

        def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
            self.seen = list(messages)
            return "x"

    template = Recording()
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Al"}
    async with admitting(chat_template=template) as admission:
        wire = parse_chat({"messages": [message, {"role": "assistant"}]}, is_strict=True, on_unknown=print)
        await admission.admit_chat(wire)
    assert template.seen == [{"role": "user", "content": "ab", "name": "Al"}, {"role": "assistant", "content": ""}]


async def test_tokenising_and_rendering_leave_the_loop_free() -> None:
    may_go_on = threading.Event()
    threads: list[threading.Thread] = []

    class Slow(FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            threads.append(threading.current_thread())
            assert may_go_on.wait(10)
            return [5]

    async with admitting(tokenizer=Slow()) as admission:
        tasks = [
            asyncio.create_task(admission.admit_completion(completion())),
            asyncio.create_task(admission.admit_chat(chat())),
        ]
        # The loop still runs, or nobody would set this.
        asyncio.get_running_loop().call_soon(may_go_on.set)
        await asyncio.gather(*tasks)
    assert threading.main_thread() not in threads


async def test_a_small_request_is_admitted_at_once_as_it_would_be_by_a_thread() -> None:
    async with admitting() as admission:
        wire, talk = completion(["a", [5]], seed=1, n=2), chat("a", seed=1)
        told = [admission.try_admit_completion(wire), admission.try_admit_chat(talk)]
        asked = [await admission.admit_completion(wire), await admission.admit_chat(talk)]
    for now, later in zip(told, asked, strict=True):
        assert now is not None
        for one, other in zip(now.requests, later.requests, strict=True):
            assert one.prompt == other.prompt
            assert one.engine_request.sampling_params == other.engine_request.sampling_params


@pytest.mark.parametrize(
    "wire",
    [
        completion("x" * 1001),
        completion([[5] * 1001]),
        completion(["x"] * 5),
        completion("x", n=5),
        completion(stop=[letter * 250 for letter in "wxyz"]),
    ],
    ids=["long text", "many ids", "many prompts", "many choices", "long stop strings"],
)
async def test_a_request_that_takes_long_is_left_to_a_thread(wire: CompletionRequest) -> None:
    async with admitting() as admission:
        assert admission.try_admit_completion(wire) is None
        assert admission.try_admit_chat(chat("x" * 1001)) is None


async def test_a_small_request_is_refused_like_any_other() -> None:
    async with admitting() as admission:
        with pytest.raises(RequestError, match="token id 5000"):
            admission.try_admit_completion(completion([[5000]]))
        with pytest.raises(RequestError, match="another"):
            admission.try_admit_chat(chat("a", model="another"))


@pytest.mark.parametrize("content", ["a", "x" * 1001], ids=["at once", "by a thread"])
async def test_that_there_is_no_chat_is_told_before_the_model_is_loaded(content: str) -> None:
    client, wire = FakeEngineClient(state=create_state(EnginePhase.LOADING)), chat(content)
    async with admitting(client, chat_template=None) as admission:
        with pytest.raises(RequestError, match="no chat template"):
            admission.try_admit_chat(wire) or await admission.admit_chat(wire)


async def test_long_texts_wait_for_each_other_and_short_ones_for_none_of_them() -> None:
    may_go_on = threading.Event()
    running: list[int] = []
    most: list[int] = []

    class Slow(FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            if len(text) > 10:
                running.append(len(text))
                most.append(len(running))
                assert may_go_on.wait(10)
                running.pop()
            return [5]

    async with admitting(tokenizer=Slow()) as admission:
        long = [asyncio.create_task(admission.admit_completion(completion("x" * 300_000))) for _ in range(5)]
        long.append(asyncio.create_task(admission.admit_chat(chat("x" * 300_000))))
        await admission.admit_completion(completion("short"))
        may_go_on.set()
        await asyncio.gather(*long)
    assert max(most) == 1


async def test_each_choice_is_a_request_with_a_seed_of_its_own() -> None:
    async with admitting() as admission:
        admitted = await admission.admit_completion(completion(["a", [5]], n=3, seed=9))
        again = await admission.admit_completion(completion("a", seed=9))
    requests = admitted.requests
    assert [request.choice for request in requests] == [0, 1, 2, 0, 1, 2]
    assert [request.n for request in requests] == [3] * 6
    assert len({request.engine_request.request_id for request in requests}) == 6
    seeds = [request.engine_request.sampling_params.seed for request in requests]
    assert len(set(seeds)) == 3
    # What a choice's seed is depends on nothing but the request's and its place, so n = 1 is the first of n = 3.
    assert seeds[:3] == seeds[3:]
    assert again.requests[0].engine_request.sampling_params.seed == seeds[0]
    assert requests[0].prompt is requests[2].prompt


async def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "min_p": 0.25,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -3},
        "min_tokens": 2,
        "cache_salt": "mine",
        "include_stop_str_in_output": True,
    }
    async with admitting() as admission:
        (request,) = (await admission.admit_completion(completion("a", logprobs=3, **fields))).requests
        (asked,) = (await admission.admit_chat(chat(logprobs=True, top_logprobs=2, prompt_logprobs=1))).requests
    params = request.engine_request.sampling_params
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.25, -1, 0.5)
    assert (params.repetition_penalty, params.logit_bias, params.min_tokens) == (1.5, {7: -3.0}, 2)
    assert (params.num_logprobs, params.num_prompt_logprobs) == (3, None)
    assert (request.engine_request.cache_salt, request.shows_stop) == ("0:mine", True)
    assert not request.engine_request.skip_reading_prefix_cache
    params = asked.engine_request.sampling_params
    assert (params.num_logprobs, params.num_prompt_logprobs) == (2, 1)
    # A prompt token that came from the cache would have no logits (F6).
    assert asked.engine_request.skip_reading_prefix_cache


async def test_no_offsets_are_worked_out_for_a_prompt_that_is_too_long() -> None:
    class OffsetCounter(FakeTokenizer):
        num_texts = 0

        def encode_with_offsets(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
            self.num_texts += 1
            return super().encode_with_offsets(text, add_special_tokens)

    tokenizer = OffsetCounter()
    async with admitting(tokenizer=tokenizer) as admission:
        with pytest.raises(RequestError, match="too long"):
            await admission.admit_completion(completion("a" * 64, echo=True, logprobs=1))
        assert tokenizer.num_texts == 0
        await admission.admit_completion(completion("a", echo=True, logprobs=1))
    assert tokenizer.num_texts == 1


async def test_an_echo_keeps_the_prompts_text_and_with_logprobs_its_offsets() -> None:
    async with admitting() as admission:
        silent = (await admission.admit_completion(completion("ab"))).requests[0].prompt
        echoed = (await admission.admit_completion(completion(["ab", [1, 97]], echo=True))).requests
        told = (await admission.admit_completion(completion(["ab", [1, 97]], echo=True, logprobs=0))).requests
    assert (silent.text, silent.offsets) == (None, ())
    assert [(each.prompt.text, each.prompt.offsets) for each in echoed] == [("ab", ()), ("<s>a", ())]
    assert [(each.prompt.text, list(each.prompt.offsets)) for each in told] == [("ab", [0, 0, 1]), ("<s>a", [0, 3])]


async def test_no_tokens_at_all_are_one_that_is_not_shown() -> None:
    async with admitting() as admission:
        (request,) = (await admission.admit_completion(completion("ab", echo=True, max_tokens=0))).requests
    assert (request.is_prompt_only, request.engine_request.sampling_params.max_tokens) == (True, 1)


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
async def test_every_field_that_holds_token_ids_is_held_to_the_vocabulary(field: str) -> None:
    sent = [1000] if field == "stop_token_ids" else {"1000": 1}
    error = await refuse_completion(completion(**{field: sent}))
    assert (error.kind, error.param) == (ErrorKind.INVALID_VALUE, field)
    assert "token id 1000" in error.message and "from 0 to 999" in error.message


async def test_min_tokens_above_what_the_answer_may_have_are_refused() -> None:
    for fields in ({"max_tokens": 3, "min_tokens": 4}, {"prompt": [5] * 60, "max_tokens": 20, "min_tokens": 5}):
        error = await refuse_completion(completion(**fields))
        assert (error.kind, error.param) == (ErrorKind.INVALID_VALUE, "min_tokens")


async def test_a_nucleus_of_nothing_is_the_likeliest_token() -> None:
    async with admitting() as admission:
        (request,) = (await admission.admit_completion(completion(top_p=0))).requests
    assert 0 < request.engine_request.sampling_params.top_p < 1e-6


async def test_the_message_that_the_template_refuses_is_named() -> None:
    roles = ["user", "assistant", "assistant", "user"]
    messages = [{"role": role, "content": "a"} for role in roles]
    wire = parse_chat({"messages": messages}, is_strict=True, on_unknown=print)
    async with admitting() as admission:
        with pytest.raises(RequestError, match=r"Roles must alternate\.") as caught:
            await admission.admit_chat(wire)
    assert caught.value.param == "messages[2]"


async def test_a_prompts_logprobs_are_asked_for_once_however_many_choices() -> None:
    async with admitting() as admission:
        admitted = await admission.admit_completion(completion(["a", "b"], n=3, echo=True, logprobs=2))
    asked = [each.engine_request.sampling_params.num_prompt_logprobs for each in admitted.requests]
    assert asked == [2, None, None, 2, None, None]
    assert [each.engine_request.skip_reading_prefix_cache for each in admitted.requests] == [True, False, False] * 2
    assert {each.engine_request.sampling_params.num_logprobs for each in admitted.requests} == {2}


async def test_a_request_arrives_when_it_arrives_not_when_it_is_tokenised() -> None:
    now = [10.0]

    class Slow(FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            now[0] = 20.0
            return super().encode(text, add_special_tokens)

    async with admitting(tokenizer=Slow(), clock=lambda: now[0]) as admission:
        (request,) = (await admission.admit_completion(completion("a"))).requests
    assert (request.engine_request.arrival_time, now) == (10.0, [20.0])


async def test_of_several_prompts_the_one_at_fault_is_named() -> None:
    error = await refuse_completion(completion(["a", "b" * 100]))
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH_EXCEEDED, "prompt[1]")
    error = await refuse_completion(completion([[5], [5000]]))
    assert error.param == "prompt[1]"


async def test_no_tokens_cannot_be_at_least_one() -> None:
    error = await refuse_completion(completion("a", echo=True, max_tokens=0, min_tokens=1))
    assert error.param == "min_tokens"
