import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDeadError,
    FinishReason,
    SchedulerStats,
    TokenLogprobs,
)
from server.errors import ServerStoppingError
from server.generation import GenerationOutput
from server.metrics import ServerMetrics
from server.output_processor import OutputProcessor
from server.output_stream import OutputStream
from server.tokenizer import TokenizerError
from tests.server.fake_engine import CharDecodeStream, HoldingDecodeStream, char_bytes, create_request, output

STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def create_processor(
    decoder: type[CharDecodeStream] = CharDecodeStream,
    metrics: ServerMetrics | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> OutputProcessor:
    metrics = metrics or ServerMetrics("tiny")
    return OutputProcessor(new_decode_stream=decoder, token_bytes=char_bytes, metrics=metrics, clock=clock)


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """The lines of /metrics, without the labels that all have."""
    lines = metrics.render()[0].decode().replace('engine="0",', "").replace('model_name="tiny"', "").splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def step(processor: OutputProcessor, *outputs: EngineCoreOutput) -> list[str]:
    return processor.process(EngineCoreOutputs(list(outputs), SchedulerStats()))


def step_in_columns(processor: OutputProcessor, *outputs: EngineCoreOutput) -> list[str]:
    """The same step, with a line for each output that is one token of a request that goes on."""
    lines = [each for each in outputs if each == EngineCoreOutput(each.request_id, each.new_token_ids[:1])]
    lines = [each for each in lines if each.new_token_ids]
    return processor.process(
        EngineCoreOutputs(
            [each for each in outputs if each not in lines],
            SchedulerStats(),
            token_req_ids=[each.request_id for each in lines],
            token_ids=[each.new_token_ids[0] for each in lines],
        )
    )


async def take_all(stream: OutputStream) -> GenerationOutput:
    """Everything up to the end as one output: texts joined, the rest from the last."""
    taken = [part async for part in stream]
    assert [part.finish_reason is not None for part in taken] == [False] * (len(taken) - 1) + [True]
    last = taken[-1]
    text = "".join(part.text for part in taken)
    return GenerationOutput(
        text, last.num_output_tokens, last.finish_reason, last.stop_reason, last.num_cached_tokens, last.error
    )


async def test_tokens_become_text_and_the_stopping_token_is_counted_but_not_shown() -> None:
    processor = create_processor()
    stream = processor.add(create_request())
    assert step(processor, output("he", num_cached_tokens=3)) == []
    assert step(processor, output("y$", STOP)) == []
    assert await take_all(stream) == GenerationOutput("hey", 4, STOP, None, 3)
    assert processor.num_live == 0


async def test_a_stop_token_of_the_client_is_named() -> None:
    processor = create_processor()
    stream = processor.add(create_request())
    step(processor, output("ok$", STOP, stop_token_id=ord("$")))
    assert await take_all(stream) == GenerationOutput("ok", 3, STOP, ord("$"))


async def test_the_last_token_of_a_full_length_is_shown() -> None:
    processor = create_processor()
    stream = processor.add(create_request())
    step(processor, output("abc", LENGTH))
    assert await take_all(stream) == GenerationOutput("abc", 3, LENGTH)


async def test_an_engines_error_reaches_the_client_with_the_text_so_far() -> None:
    processor = create_processor()
    stream = processor.add(create_request())
    step(processor, output("ab"))
    step(processor, output("", ERROR, error="The logits were not finite."))
    assert await take_all(stream) == GenerationOutput("ab", 2, ERROR, error="The logits were not finite.")


async def test_an_abort_by_the_engine_ends_the_request() -> None:
    processor = create_processor()
    stream = processor.add(create_request())
    step(processor, output("", ABORT))
    assert await take_all(stream) == GenerationOutput("", 0, ABORT)


async def test_a_stop_string_ends_the_request_at_once_and_later_tokens_are_ignored() -> None:
    processor = create_processor()
    stream = processor.add(create_request(stop=["END"]))
    assert step(processor, output("one E")) == []
    assert step(processor, output("ND two")) == ["r"]
    assert step(processor, output("three")) == []
    assert step(processor, output("", ABORT)) == []
    assert await take_all(stream) == GenerationOutput("one ", 7, STOP, "END")


async def test_one_step_collects_all_its_aborts() -> None:
    processor = create_processor()
    for request_id in "abc":
        processor.add(create_request(request_id, stop=["!"]))
    outputs = [output("x!", request_id="a"), output("xy", request_id="b"), output("!", request_id="c")]
    assert step(processor, *outputs) == ["a", "c"]
    assert processor.num_live == 1


async def test_tokens_behind_a_stop_string_are_not_counted_however_they_come() -> None:
    counts = []
    for parts in (["a", "b", "c"], ["abc"]):
        processor = create_processor()
        stream = processor.add(create_request(stop=["b"]))
        for part in parts:
            step(processor, output(part))
        counts.append((await take_all(stream)).num_output_tokens)
    assert counts == [2, 2]


async def test_a_stop_string_in_the_engines_last_output_wins_and_needs_no_abort() -> None:
    processor = create_processor()
    stream = processor.add(create_request(stop=["ND"]))
    assert step(processor, output("the ENDs", LENGTH)) == []
    assert await take_all(stream) == GenerationOutput("the E", 7, STOP, "ND")


@pytest.mark.parametrize("reason", [LENGTH, ABORT])
async def test_held_back_text_comes_out_at_the_end(reason: FinishReason) -> None:
    processor = create_processor(HoldingDecodeStream)
    stream = processor.add(create_request(stop=["ab!"]))
    step(processor, output("xa"))
    step(processor, output("b"))
    step(processor, output("", reason))
    assert await take_all(stream) == GenerationOutput("xab", 3, reason)


async def test_a_stop_string_that_the_decoder_held_back_is_found_at_the_end() -> None:
    processor = create_processor(HoldingDecodeStream)
    stream = processor.add(create_request(stop=["!"]))
    step(processor, output("hi!", LENGTH))
    assert await take_all(stream) == GenerationOutput("hi", 3, STOP, "!")


@given(pieces=st.lists(st.text("ab!", min_size=1, max_size=4), max_size=12), taken_after=st.sets(st.integers(0, 11)))
def test_the_text_is_the_same_however_slow_the_consumer(pieces: list[str], taken_after: set[int]) -> None:
    async def run() -> None:
        processor = create_processor()
        stream = processor.add(create_request(stop=["!!"]))
        texts = []
        for index, piece in enumerate(pieces):
            before = processor.num_live
            step(processor, output(piece))
            if index in taken_after and before:
                texts.append((await anext(stream)).text)
        step(processor, output("", LENGTH))
        texts += [part.text async for part in stream]
        assert "".join(texts) == "".join(pieces).split("!!")[0]

    asyncio.run(run())


async def test_what_was_not_taken_in_time_is_merged_into_one_output() -> None:
    processor = create_processor()
    stream = processor.add(create_request())
    for char in "hello":
        step(processor, output(char))
    step(processor, output("$", STOP))
    assert await anext(stream) == GenerationOutput("hello", 6, STOP)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_waiting_consumer_is_woken() -> None:
    processor = create_processor()
    stream = processor.add(create_request())
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # let it start to wait
    step(processor, output("x"))
    assert (await waiting).text == "x"


async def test_the_engines_death_ends_every_request_once_after_its_text() -> None:
    metrics = ServerMetrics("tiny")
    processor = create_processor(metrics=metrics)
    streams = [processor.add(create_request(request_id)) for request_id in "ab"]
    step(processor, output("x", request_id="a"))
    assert processor.process(EngineCoreOutputs([], engine_error="a step failed")) == []
    assert processor.num_live == 0
    assert (await anext(streams[0])).text == "x"
    for stream in streams:
        with pytest.raises(EngineDeadError, match="a step failed"):
            await anext(stream)
    with pytest.raises(EngineDeadError, match="a step failed"):
        processor.add(create_request("c"))
    assert (
        b'vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 2.0'
        in (processor._metrics.render()[0])
    )


async def test_outputs_of_the_last_step_are_delivered_before_the_death_is() -> None:
    processor = create_processor()
    done, going_on = (processor.add(create_request(request_id)) for request_id in "ab")
    outputs = [output("x", LENGTH, request_id="a"), output("y", request_id="b")]
    processor.process(EngineCoreOutputs(outputs, engine_error="boom"))
    assert (await take_all(done)).finish_reason is LENGTH
    assert (await anext(going_on)).text == "y"
    with pytest.raises(EngineDeadError):
        await anext(going_on)


async def test_a_discarded_request_is_forgotten_and_counted_once() -> None:
    metrics = ServerMetrics("tiny")
    processor = create_processor(metrics=metrics)
    processor.add(create_request())
    assert processor.discard("r") is True
    assert processor.discard("r") is False
    assert step(processor, output("late"), output("", ABORT)) == []
    found = samples(metrics)
    assert found['vllm:request_success_total{finished_reason="abort",}'] == 1
    assert found["vllm:generation_tokens_total{}"] == 0


async def test_fail_all_ends_everything_and_leaves_the_processor_usable() -> None:
    metrics = ServerMetrics("tiny")
    processor = create_processor(metrics=metrics)
    stream = processor.add(create_request("a"))
    assert processor.fail_all("shutting down") == ["a"]
    assert samples(metrics)['vllm:request_success_total{finished_reason="abort",}'] == 1
    with pytest.raises(ServerStoppingError, match="shutting down"):
        await anext(stream)
    processor.add(create_request("b"))
    assert processor.num_live == 1


async def test_a_request_whose_tokens_cannot_be_decoded_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    processor = create_processor()
    broken, fine = (processor.add(create_request(request_id)) for request_id in "ab")
    with caplog.at_level(logging.ERROR):
        to_abort = step(processor, EngineCoreOutput("a", [2**40]), output("ok", LENGTH, request_id="b"))
    assert to_abort == ["a"]
    failed = await take_all(broken)
    assert failed.finish_reason is ERROR
    assert failed.error is not None
    assert (await take_all(fine)).text == "ok"
    assert "request a" in caplog.text


class PanickingDecodeStream(CharDecodeStream):
    def feed(self, token_ids: Sequence[int]) -> str:
        if 0 in token_ids:
            raise TokenizerError("panicked")
        return super().feed(token_ids)


async def test_a_panic_in_one_requests_text_fails_it_alone() -> None:
    processor = create_processor(PanickingDecodeStream)
    broken, fine = (processor.add(create_request(request_id)) for request_id in "ab")
    to_abort = step(processor, EngineCoreOutput("a", [0]), output("ok", LENGTH, request_id="b"))
    assert to_abort == ["a"]
    assert (await take_all(broken)).finish_reason is ERROR
    assert (await take_all(fine)).text == "ok"


async def test_an_id_in_use_is_refused() -> None:
    processor = create_processor()
    processor.add(create_request())
    with pytest.raises(ValueError, match="in use"):
        processor.add(create_request())


async def test_latencies_and_tokens_are_counted_on_the_engines_clock() -> None:
    clock, metrics = FakeClock(), ServerMetrics("tiny")
    processor = OutputProcessor(
        new_decode_stream=CharDecodeStream, token_bytes=char_bytes, metrics=metrics, clock=clock
    )
    processor.add(create_request(prompt="12345678", arrival_time=1.0))
    for now, part in ((1.5, output("a")), (1.75, output("bc")), (2.25, output("$", STOP))):
        clock.now = now
        step(processor, part)
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_sum{}"] == 0.5
    assert found["vllm:time_to_first_token_seconds_count{}"] == 1
    assert found["vllm:inter_token_latency_seconds_sum{}"] == 0.75
    assert found["vllm:inter_token_latency_seconds_count{}"] == 2
    assert found["vllm:e2e_request_latency_seconds_sum{}"] == 1.25
    assert found["vllm:prompt_tokens_total{}"] == 8
    assert found["vllm:generation_tokens_total{}"] == 4


async def test_a_requests_own_record_tells_its_gaps_and_when_it_lost_its_blocks() -> None:
    clock = FakeClock()
    processor, request = create_processor(clock=clock), create_request()
    processor.add(request)
    for now, part in ((1.0, output("a")), (1.5, output("b")), (1.75, output("c")), (3.0, output("d"))):
        clock.now = now
        step_in_columns(processor, part)
    for time_s in (3.25, 3.5):
        processor.process(EngineCoreOutputs([], preemptions=[("r", time_s), ("gone", time_s)]))
    record = request.record
    assert (record.gaps.get_median(), record.first_token_time, record.num_output_tokens) == (0.5, 1.0, 4)
    assert (record.num_preemptions, record.preempted_times) == (2, [3.25, 3.5])


async def test_only_the_first_few_losses_have_their_times_kept() -> None:
    processor, request = create_processor(), create_request()
    processor.add(request)
    for number in range(1000):
        processor.process(EngineCoreOutputs([], preemptions=[("r", float(number))]))
    assert request.record.num_preemptions == 1000
    assert request.record.preempted_times == [float(number) for number in range(16)]


@given(
    events=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["token", "stop", "finish", "discard", "death"])),
        max_size=30,
    )
)
def test_every_request_ends_exactly_once_whatever_happens(events: list[tuple[str, str]]) -> None:
    metrics = ServerMetrics("tiny")
    processor = create_processor(metrics=metrics)
    streams = {request_id: processor.add(create_request(request_id, stop=["!"])) for request_id in "abc"}
    discarded = set()
    for request_id, event in events:
        if event == "discard":
            processor.discard(request_id)
            discarded.add(request_id)
        elif event == "death":
            processor.process(EngineCoreOutputs([], engine_error="boom"))
        else:
            text, reason = {"token": ("x", None), "stop": ("!", None), "finish": ("$", STOP)}[event]
            step(processor, output(text, reason, request_id=request_id))
    processor.process(EngineCoreOutputs([], engine_error="the end"))
    assert processor.num_live == 0
    for request_id in streams.keys() - discarded:
        asyncio.run(assert_ends_once(streams[request_id]))
    ended = [value for name, value in samples(metrics).items() if name.startswith("vllm:request_success_total{")]
    assert sum(ended) == 3


async def assert_ends_once(stream: OutputStream) -> None:
    try:
        ends = [part.finish_reason async for part in stream if part.finish_reason is not None]
    except EngineDeadError:
        ends = [ERROR]
    assert len(ends) == 1


# ---------------------------------------------------------------------- the token columns
async def test_a_line_of_the_columns_is_one_more_token() -> None:
    processor = create_processor()
    streams = {request_id: processor.add(create_request(request_id)) for request_id in "abc"}
    step(processor, *(output("x", request_id=request_id, num_cached_tokens=3) for request_id in "abc"))
    outputs = [output("$", STOP, request_id="b")]
    to_abort = processor.process(EngineCoreOutputs(outputs, token_req_ids=["c", "a"], token_ids=[ord("z"), ord("y")]))
    assert to_abort == []
    assert await anext(streams["a"]) == GenerationOutput("xy", 2, num_cached_tokens=3)
    assert await anext(streams["b"]) == GenerationOutput("x", 2, STOP, num_cached_tokens=3)
    assert await anext(streams["c"]) == GenerationOutput("xz", 2, num_cached_tokens=3)


async def test_a_stop_string_ends_a_line_and_lines_of_requests_that_are_gone_are_ignored() -> None:
    metrics = ServerMetrics("tiny")
    processor = create_processor(metrics=metrics)
    stream = processor.add(create_request(stop=["!"]))
    step(processor, output("x"))
    lines = {"token_req_ids": ["gone", "r"], "token_ids": [ord("?"), ord("!")]}
    assert processor.process(EngineCoreOutputs([], **lines)) == ["r"]
    assert processor.process(EngineCoreOutputs([], **lines)) == []
    assert await take_all(stream) == GenerationOutput("x", 2, STOP, "!")
    assert samples(metrics)["vllm:generation_tokens_total{}"] == 2


async def test_a_panic_in_one_line_fails_it_alone() -> None:
    processor = create_processor(PanickingDecodeStream)
    broken, fine = (processor.add(create_request(request_id)) for request_id in "ab")
    lines = EngineCoreOutputs([], token_req_ids=["a", "b"], token_ids=[0, ord("y")])
    assert processor.process(lines) == ["a"]
    assert (await take_all(broken)).finish_reason is ERROR
    assert await anext(fine) == GenerationOutput("y", 1)


async def test_lines_of_the_last_step_are_delivered_before_the_death_is() -> None:
    processor = create_processor()
    stream = processor.add(create_request())
    processor.process(EngineCoreOutputs([], engine_error="boom", token_req_ids=["r"], token_ids=[ord("y")]))
    assert (await anext(stream)).text == "y"
    with pytest.raises(EngineDeadError, match="boom"):
        await anext(stream)


OUTPUT = st.builds(
    output,
    st.text("ab!", max_size=2),
    st.sampled_from([None, None, None, STOP, LENGTH, ABORT]),
    num_cached_tokens=st.sampled_from([0, 0, 5]),
)


@given(steps=st.lists(st.dictionaries(st.sampled_from("abcd"), OUTPUT), max_size=12), is_slow=st.booleans())
def test_a_step_in_columns_and_one_in_records_deliver_the_same(
    steps: list[dict[str, EngineCoreOutput]], is_slow: bool
) -> None:
    async def run(take_step: Callable[..., list[str]]) -> list[object]:
        clock, metrics = FakeClock(), ServerMetrics("tiny", clock=lambda: 0.0)
        processor = create_processor(HoldingDecodeStream, metrics, clock)
        streams = [processor.add(create_request(request_id, stop=["b!"])) for request_id in "abc"]
        consumers = [asyncio.create_task(take_parts(stream)) for stream in streams]
        aborts = []
        for parts in steps:
            clock.now += 0.25
            outputs = [replace(part, request_id=request_id) for request_id, part in parts.items()]
            aborts.append(sorted(take_step(processor, *outputs)))
            if not is_slow:
                await asyncio.sleep(0)  # the consumers take what came
        processor.fail_all("the end")
        found = {name: value for name, value in samples(metrics).items() if name.startswith("vllm")}
        return [aborts, await asyncio.gather(*consumers), found]

    assert asyncio.run(run(step_in_columns)) == asyncio.run(run(step))


async def take_parts(stream: OutputStream) -> list[GenerationOutput]:
    parts = []
    with contextlib.suppress(ServerStoppingError):
        async for part in stream:
            parts.append(part)
    return parts


async def test_a_request_for_no_tokens_gets_none_and_none_is_counted() -> None:
    metrics = ServerMetrics("tiny")
    processor = create_processor(metrics=metrics)
    stream = processor.add(create_request(prompt="ab", is_prompt_only=True))
    part = output("x", STOP)
    step(processor, replace(part, prompt_logprobs=[TokenLogprobs(ord("b"), -0.5, 1)], num_cached_tokens=0))
    taken = [each async for each in stream]
    assert [(each.text, each.num_output_tokens, each.finish_reason) for each in taken] == [("", 0, LENGTH)]
    assert taken[0].prompt_logprobs == [TokenLogprobs(ord("b"), -0.5, 1)]
    counted = samples(metrics)
    assert counted["vllm:generation_tokens_total{}"] == 0
    assert counted["vllm:prompt_tokens_total{}"] == 2


async def test_a_stop_token_that_the_client_named_is_shown_where_it_wants_to_see_it() -> None:
    processor = create_processor()
    stream = processor.add(create_request(shows_stop=True))
    step(processor, output("ok$", STOP, stop_token_id=ord("$")))
    assert (await take_all(stream)).text == "ok$"
    stream = processor.add(create_request(shows_stop=True))
    step(processor, output("ok$", STOP))  # the model's own end token never is
    assert (await take_all(stream)).text == "ok"


async def test_tokens_and_prompt_tokens_survive_a_reader_that_falls_behind() -> None:
    processor = create_processor()
    stream = processor.add(create_request(prompt="ab"))
    first = replace(output("x"), logprobs=[TokenLogprobs(ord("x"), -1.0, 1)])
    step(processor, replace(first, prompt_logprobs=[TokenLogprobs(ord("b"), -0.5, 1)]))
    step(processor, replace(output("y", LENGTH), logprobs=[TokenLogprobs(ord("y"), -2.0, 1)]))
    (merged,) = [each async for each in stream]
    assert [token.logprob for token in merged.tokens] == [-1.0, -2.0]
    assert merged.prompt_logprobs == [TokenLogprobs(ord("b"), -0.5, 1)]
