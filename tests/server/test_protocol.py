from __future__ import annotations

from typing import Any

import pytest

from server.errors import ErrorKind, RequestError
from server.protocol import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    MESSAGE_FIELDS,
    STREAM_OPTIONS_FIELDS,
    TOKENIZE_FIELDS,
    FieldTable,
    Treatment,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from server.wire_types import (
    MAX_CHOICES,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)

USER = {"role": "user", "content": "hi"}


def completion(*, is_strict: bool = False, unknown: list[str] | None = None, **fields: Any) -> CompletionRequest:
    seen: list[str] = [] if unknown is None else unknown
    return parse_completion({"prompt": "a", **fields}, is_strict=is_strict, on_unknown=seen.append)


def chat(*, is_strict: bool = False, unknown: list[str] | None = None, **fields: Any) -> ChatRequest:
    seen: list[str] = [] if unknown is None else unknown
    return parse_chat({"messages": [USER], **fields}, is_strict=is_strict, on_unknown=seen.append)


@pytest.mark.parametrize(
    ("sent", "parsed"),
    [
        ("hi", ["hi"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [5]], ["a", [5]]),
    ],
)
def test_a_prompt_is_always_a_list_of_prompts(sent: Any, parsed: Any) -> None:
    assert completion(prompt=sent).prompt == parsed


@pytest.mark.parametrize("sent", ["", [], None, 5, {}, [""], [[]], [1, "a"], [True], ["a", 3], [1.5], ["a"] * 257])
def test_a_bad_prompt_is_refused_by_name(sent: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion(prompt=sent)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_VALUE, "prompt")
    assert caught.value.message.startswith("`prompt` ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", True),
        ("temperature", "hot"),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["x"] * 1000),
        ("stop", ["x", "y" * 257]),
        ("stop", [1]),
        ("stop", {}),
        ("stop_token_ids", "a"),
        ("stop_token_ids", [1] * 257),
        ("n", 0),
        ("n", 129),
        ("n", 10_000),
        ("n", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"١": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": -100.1}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {str(token_id): 1 for token_id in range(1025)}),
        ("min_tokens", -1),
        ("include_stop_str_in_output", "no"),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", "5"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("echo", 1),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", 5),
        ("ignore_eos", 1),
        ("priority", True),
        ("priority", False),
        ("priority", "1"),
        ("priority", 1.0),
        ("priority", 2**31),
        ("priority", -(2**31) - 1),
        ("priority", 10**30),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_a_value_out_of_range_is_refused_with_a_sentence(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**{field: value})
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_VALUE, field)
    assert caught.value.message.startswith(f"`{field}` ")
    assert caught.value.message.endswith(".")


def test_null_means_the_default_everywhere() -> None:
    names = [name for name in COMPLETION_FIELDS if name != "prompt"]
    assert completion(**dict.fromkeys(names)) == completion()
    names = [name for name in CHAT_FIELDS if name != "messages"]
    assert chat(**dict.fromkeys(names)) == chat()


def test_honoured_values_arrive() -> None:
    wire = completion(
        max_tokens=10**30, temperature=1, top_p=0.5, top_k=-1, seed=-5, stop="x", stop_token_ids=[7], ignore_eos=True
    )
    assert wire.max_tokens == 10**30
    assert (wire.temperature, wire.top_p, wire.top_k, wire.seed) == (1.0, 0.5, -1, -5)
    assert (wire.stop, wire.stop_token_ids, wire.ignore_eos) == (("x",), [7], True)


@pytest.mark.parametrize("priority", [-(2**31), -1, 0, 1, 2**31 - 1])
def test_a_priority_is_any_signed_32_bit_number(priority: int) -> None:
    assert completion(priority=priority).priority == priority
    assert chat(priority=priority).priority == priority


@pytest.mark.parametrize(
    ("table", "wire_type"),
    [
        (COMPLETION_FIELDS, CompletionRequest),
        (CHAT_FIELDS, ChatRequest),
        (MESSAGE_FIELDS, ChatMessage),
        (STREAM_OPTIONS_FIELDS, StreamOptions),
        (TOKENIZE_FIELDS, TokenizeRequest),
        (DETOKENIZE_FIELDS, DetokenizeRequest),
    ],
)
def test_a_table_honours_exactly_what_its_wire_type_holds(table: FieldTable, wire_type: Any) -> None:
    honoured = {name for name, rule in table.items() if rule.treatment is Treatment.HONOURED}
    assert honoured == set(wire_type.model_fields)


@pytest.mark.parametrize("name", [n for n, rule in COMPLETION_FIELDS.items() if rule.treatment is Treatment.REFUSED])
def test_every_refused_completion_field_takes_its_no_ops_and_nothing_else(name: str) -> None:
    for no_op in COMPLETION_FIELDS[name].no_ops:
        completion(**{name: no_op})
    with pytest.raises(RequestError) as caught:
        completion(**{name: {"some": "value"}})
    assert (caught.value.kind, caught.value.param) == (ErrorKind.UNSUPPORTED_PARAMETER, name)


@pytest.mark.parametrize("name", [n for n, rule in CHAT_FIELDS.items() if rule.treatment is Treatment.REFUSED])
def test_every_refused_chat_field_takes_its_no_ops_and_nothing_else(name: str) -> None:
    for no_op in CHAT_FIELDS[name].no_ops:
        chat(**{name: no_op})
    with pytest.raises(RequestError) as caught:
        chat(**{name: {"some": "value"}})
    assert (caught.value.kind, caught.value.param) == (ErrorKind.UNSUPPORTED_PARAMETER, name)


@pytest.mark.parametrize(("name", "value"), [("best_of", 3), ("best_of", True), ("suffix", "x"), ("store", True)])
def test_values_that_would_change_the_answer_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**{name: value})
    assert caught.value.kind is ErrorKind.UNSUPPORTED_PARAMETER


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"prompt": ["a", "b", "c"], "n": 128}, "n"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_VALUE, param)


def test_no_request_may_ask_for_more_answers_than_there_may_be() -> None:
    assert completion(prompt=["a", "b"], n=MAX_CHOICES // 2).n == MAX_CHOICES // 2


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(RequestError) as caught:
        chat(top_logprobs=3)
    assert caught.value.param == "top_logprobs"
    assert chat(logprobs=True, top_logprobs=3).num_logprobs == 3
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=False).num_logprobs is None


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_completions_logprobs_in_chat_are_told_where_the_number_goes(logprobs: int) -> None:
    with pytest.raises(RequestError) as caught:
        chat(logprobs=logprobs)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_VALUE, "logprobs")
    assert "`top_logprobs`" in caught.value.message


def test_an_echo_with_logprobs_wants_the_prompts_too() -> None:
    assert completion(logprobs=2).num_prompt_logprobs is None
    assert completion(logprobs=2, echo=True).num_prompt_logprobs == 2
    assert completion(logprobs=2, echo=True, prompt_logprobs=5).num_prompt_logprobs == 5
    assert completion(echo=True).num_prompt_logprobs is None
    assert chat(logprobs=True, prompt_logprobs=1).num_prompt_logprobs == 1


def test_a_logit_bias_maps_ids_to_numbers() -> None:
    assert completion(logit_bias={"5": -100, "007": 0.5}).logit_bias == {5: -100.0, 7: 0.5}
    assert completion(logit_bias=None).logit_bias == completion().logit_bias == {}


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [USER]}, {"prompt": 5}, {"messages": []}])
def test_tokenize_takes_a_prompt_or_messages(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tokenize(body, is_strict=False, on_unknown=print)
    assert caught.value.reply.status == 400
    assert parse_tokenize({"prompt": ""}, is_strict=True, on_unknown=print).prompt == ""
    assert parse_tokenize({"messages": [USER]}, is_strict=True, on_unknown=print).messages


@pytest.mark.parametrize("body", [{}, {"tokens": "a"}, {"tokens": [True]}, {"tokens": [1.5]}, {"tokens": {}}])
def test_detokenize_takes_token_ids(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_detokenize(body, is_strict=False, on_unknown=print)
    assert caught.value.param == "tokens"
    assert parse_detokenize({"tokens": []}, is_strict=True, on_unknown=print).tokens == []


def test_inert_fields_change_nothing() -> None:
    fields = {"user": "u", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "verbosity": "low"}
    unknown: list[str] = []
    assert completion(is_strict=True, unknown=unknown, **fields) == completion()
    assert unknown == []


def test_unknown_fields_are_reported_and_ignored() -> None:
    unknown: list[str] = []
    assert completion(unknown=unknown, max_token=3, foo=1, nothing=None) == completion()
    assert unknown == ["max_token", "foo"]


def test_an_unknown_field_of_a_message_is_reported_without_its_index() -> None:
    unknown: list[str] = []
    chat(unknown=unknown, messages=[USER, {**USER, "mood": 1}])
    assert unknown == ["messages.mood"]


def test_strict_mode_names_the_nearest_field() -> None:
    with pytest.raises(RequestError) as caught:
        completion(is_strict=True, max_token=3)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.UNKNOWN_PARAMETER, "max_token")
    assert "did you mean `max_tokens`?" in caught.value.message


@pytest.mark.parametrize(
    ("parse", "name", "ours"),
    [
        (parse_completion, "max_completion_tokens", "max_tokens"),
        (parse_completion, "messages", "prompt"),
        (parse_completion, "num_predict", "max_tokens"),
        (parse_chat, "prompt", "messages"),
        (parse_tokenize, "text", "prompt"),
    ],
)
def test_strict_mode_knows_what_other_endpoints_and_servers_call_a_field(parse: Any, name: str, ours: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse({name: "x"}, is_strict=True, on_unknown=print)
    assert f"did you mean `{ours}`?" in caught.value.message


def test_strict_mode_reaches_into_messages_and_stream_options() -> None:
    with pytest.raises(RequestError) as caught:
        chat(is_strict=True, messages=[{**USER, "contents": 1}])
    assert caught.value.param == "messages[0].contents"
    with pytest.raises(RequestError) as caught:
        chat(is_strict=True, stream=True, stream_options={"usage": True})
    assert caught.value.param == "stream_options.usage"


def test_a_megabyte_name_does_not_come_back() -> None:
    with pytest.raises(RequestError) as caught:
        completion(is_strict=True, **{"x" * 1_000_000: 1})
    assert len(caught.value.message) < 300
    assert caught.value.param is not None
    assert len(caught.value.param) < 100


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_text_parts_are_joined_in_order(content: Any, text: str) -> None:
    assert chat(messages=[{"role": "user", "content": content}]).messages[0].content == text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "boss", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ],
)
def test_a_bad_message_is_refused_at_its_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=messages)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"`{param}` ")


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {"content": "x"}])
def test_a_message_that_lacks_something_lacks_a_parameter(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=[message])
    assert caught.value.kind is ErrorKind.MISSING_PARAMETER
    assert caught.value.message.endswith(" is required.")


def test_an_answer_of_the_sdk_can_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert chat(is_strict=True, messages=[USER, {**answer, "function_call": None}, USER]).messages[1].content == "x"


def test_tool_calls_in_a_message_are_refused_at_their_place() -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=[USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}])
    assert (caught.value.kind, caught.value.param) == (ErrorKind.UNSUPPORTED_PARAMETER, "messages[1].tool_calls")


@pytest.mark.parametrize("value", [None, [], "x", 5, True])
def test_a_body_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(value, is_strict=False, on_unknown=print)
    assert caught.value.kind is ErrorKind.MALFORMED_BODY


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({}, is_strict=False, on_unknown=print)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.MISSING_PARAMETER, "messages")


def test_a_messages_reasoning_has_two_names() -> None:
    message = {"role": "assistant", "content": "a"}
    (wire,) = chat(messages=[{**message, "reasoning": "why"}]).messages
    assert wire.reasoning == "why"
    chat(messages=[{**message, "reasoning": "why", "reasoning_content": "why"}])
    with pytest.raises(RequestError) as caught:
        chat(messages=[{**message, "reasoning": "why", "reasoning_content": "how"}])
    assert caught.value.param == "messages[0].reasoning"
