"""The runner over a decoder that is a function of (token, position): sampling, prompt logprobs and errors, row by row.

What a request gets must not depend on the batch: not on who is in it, on their parameters, or on the place in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_core.messages import TokenLogprobs
from engine_core.model.runner import ModelRunner
from engine_core.model.sampler import are_finite
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from kernels.backend import StepMeta
from kernels.fused import HeadRows
from tests.engine_core.model.table_runner import MAX_MODEL_LEN, TableRunners

VOCAB = 40


def token_logits(token_id: int, position: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * token_id + position)) * 2


class Computes(Protocol):
    """A runner over ``token_logits``, as Run drives it.

    Attributes:
        page_size: Tokens a block.
        num_logit_rows: How many rows of logits each step was asked for.
    """

    page_size: int
    num_logit_rows: list[int]

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...

    def spoil(self, spoiled: dict[tuple[int, int], float]) -> None:
        """Have one of the logits after each (token, position) become something else."""


class TableDecoder:
    """Answers each wanted token with ``token_logits``, so many rows at a time; spoils those that it is told to.

    As sparing as kernels are: logits that nobody needs are not there.
    """

    def __init__(self, *, max_logit_rows: int) -> None:
        self._max_logit_rows = max_logit_rows
        self.arch = SimpleNamespace(vocab_size=VOCAB)
        self.spoiled: dict[tuple[int, int], float] = {}  # (token, position) -> what one of its logits becomes
        self.num_logit_rows: list[int] = []

    def compute(
        self, meta: StepMeta, kv: Any, *, needs_logits: NDArray[np.bool_], num_token_ids: int
    ) -> Iterator[HeadRows]:
        keys = [(int(meta.token_ids[at]), int(meta.positions[at])) for at in meta.logit_rows]
        logits = torch.stack([token_logits(*key) for key in keys]) if keys else torch.empty(0, VOCAB)
        for index, key in enumerate(keys):
            if key in self.spoiled:
                logits[index, 7] = self.spoiled[key]
        self.num_logit_rows.append(len(keys))
        for first in range(0, len(keys), self._max_logit_rows):
            rows = slice(first, first + self._max_logit_rows)
            known = logits[rows, :num_token_ids].numpy()
            read = logits[rows].numpy() if needs_logits[rows].any() else None
            yield HeadRows(known.argmax(axis=1).astype(np.int32), are_finite(known), read)


class PlainRunner:
    """The plain runner over TableDecoder."""

    page_size = 512

    def __init__(self, *, num_token_ids: int | None, max_logit_rows: int) -> None:
        decoder: Any = TableDecoder(max_logit_rows=max_logit_rows)
        kv: Any = SimpleNamespace(page_size=self.page_size)
        runner = ModelRunner(decoder=decoder, kv=kv, max_model_len=512, num_token_ids=num_token_ids)
        self._decoder, self.execute = decoder, runner.execute
        self.num_logit_rows: list[int] = decoder.num_logit_rows

    def spoil(self, spoiled: dict[tuple[int, int], float]) -> None:
        self._decoder.spoiled = spoiled


class PlainRunners:
    """Runners that cost nothing."""

    def start(self, *, num_token_ids: int | None, max_logit_rows: int) -> PlainRunner:
        return PlainRunner(num_token_ids=num_token_ids, max_logit_rows=max_logit_rows)

    def release(self) -> None:
        pass


Runners = PlainRunners | TableRunners


@pytest.fixture(scope="module", params=["torch", "flashinfer"])
def all_runners(request: pytest.FixtureRequest) -> Runners:
    """The plain ones, or a card's on the stand-ins."""
    return PlainRunners() if request.param == "torch" else TableRunners(token_logits, VOCAB)


@pytest.fixture
def runners(all_runners: Runners) -> Iterator[Runners]:
    yield all_runners
    all_runners.release()


class Run:
    """A runner driven as the scheduler drives it: every request in chunks, then token by token."""

    def __init__(self, runners: Runners, *, num_token_ids: int | None = None, max_logit_rows: int = 1000) -> None:
        self.runner: Computes = runners.start(num_token_ids=num_token_ids, max_logit_rows=max_logit_rows)
        self.token_ids: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.errors: dict[str, str] = {}
        self._starts: dict[str, int] = {}
        self._entering: list[NewRequestData] = []
        self._num_blocks = 0

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, outputs: Sequence[int] = ()) -> None:
        known = [*prompt, *outputs]
        first = self._num_blocks + 1
        self._num_blocks += -(-MAX_MODEL_LEN // self.runner.page_size)
        blocks = list(range(first, self._num_blocks + 1))
        self._entering.append(NewRequestData(request_id, known, len(prompt), params, blocks, 0, bool(outputs)))
        self.token_ids[request_id] = list(outputs)
        self._starts[request_id] = 0

    def step(self, counts: dict[str, int], *, preempted: Iterable[str] = ()) -> ModelRunnerOutput:
        output = SchedulerOutput(
            req_ids=list(counts),
            token_counts=list(counts.values()),
            starts=[self._starts[request_id] for request_id in counts],
            scheduled_new_reqs=[new for new in self._entering if new.request_id in counts],
            preempted_req_ids=list(preempted),
            total_num_scheduled_tokens=sum(counts.values()),
        )
        self._entering = [new for new in self._entering if new.request_id not in counts]
        result = self.runner.execute(output)
        for (request_id, count), token_id in zip(counts.items(), result.token_ids, strict=True):
            self._starts[request_id] += count
            self.token_ids[request_id] += [token_id] if token_id >= 0 else []
        for request_id, logprobs in result.logprobs.items():
            self.logprobs.setdefault(request_id, []).extend(logprobs)
        assert not set(result.prompt_logprobs) & set(self.prompt_logprobs)
        self.prompt_logprobs |= result.prompt_logprobs
        self.errors |= result.errors
        return result


def params(**overrides: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 250, **overrides})


def generate(runners: Runners, asked: Sequence[tuple[list[int], SamplingParams]], num_tokens: int) -> list[list[int]]:
    """Return the tokens of requests that run side by side."""
    run = Run(runners)
    for index, (prompt, each) in enumerate(asked):
        run.add(str(index), prompt, each)
    run.step({str(index): len(prompt) for index, (prompt, _) in enumerate(asked)})
    for _ in range(num_tokens - 1):
        run.step(dict.fromkeys(run.token_ids, 1))
    runners.release()
    return list(run.token_ids.values())


IDS = st.integers(0, VOCAB - 1)
DRAWING: dict[str, Any] = {
    "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 1, 5, 39, 40]),
    "top_p": st.sampled_from([1.0, 0.9, 0.3]),
    "min_p": st.sampled_from([0.0, 0.05, 0.5]),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "eos_token_ids": st.frozensets(IDS, max_size=3),
    "stop_token_ids": st.frozensets(IDS, max_size=3),
    "ignore_eos": st.booleans(),
}
BENDING: dict[str, Any] = {
    "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
    "frequency_penalty": st.sampled_from([0.0, 0.7, -2.0]),
    "repetition_penalty": st.sampled_from([1.0, 1.3, 0.6]),
    "logit_bias": st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
    "min_tokens": st.integers(0, 4),
    "num_logprobs": st.sampled_from([None, 0, 3]),
    "num_prompt_logprobs": st.sampled_from([None, 0, 3]),
}
# A device picks for the first kind itself; the second nearly always needs the host.
PARAMS = st.one_of(st.builds(params, **DRAWING), st.builds(params, **DRAWING, **BENDING))
ASKED = st.tuples(st.lists(IDS, min_size=1, max_size=12), PARAMS)


def test_a_request_does_not_know_its_neighbours(runners: Runners) -> None:
    """E25: flags and arrays that were made for the batch once made penalties depend on who else was in it."""

    @settings(max_examples=120 if isinstance(runners, PlainRunners) else 25, deadline=None)
    @given(mine=ASKED, others=st.lists(ASKED, min_size=1, max_size=5), place=st.integers(0, 5))
    def check_it(
        mine: tuple[list[int], SamplingParams], others: list[tuple[list[int], SamplingParams]], place: int
    ) -> None:
        place = min(place, len(others))
        (alone,) = generate(runners, [mine], 4)
        assert generate(runners, [*others[:place], mine, *others[place:]], 4)[place] == alone
        assert [alone] == generate(PlainRunners(), [mine], 4), "the same draws, whoever makes them"
        assert len(alone) == 4

    check_it()


@pytest.mark.parametrize("chunk", [1, 7, 23])
def test_a_draw_does_not_depend_on_chunks_or_on_a_preemption(runners: Runners, chunk: int) -> None:
    prompt, asked = [5 * n % VOCAB for n in range(23)], params(seed=3, frequency_penalty=0.5, top_p=0.95)
    (whole,) = generate(runners, [(prompt, asked)], 6)
    run = Run(runners)
    run.add("a", prompt, asked)
    for start in range(0, len(prompt), chunk):
        run.step({"a": min(chunk, len(prompt) - start)})
    run.step({"a": 1})
    run.add("a", prompt, asked, run.token_ids["a"])
    for start in range(0, len(prompt) + 2, chunk):
        run.step({"a": min(chunk, len(prompt) + 2 - start)}, preempted=["a"] if start == 0 else [])
    while len(run.token_ids["a"]) < 6:
        run.step({"a": 1})
    assert run.token_ids["a"] == whole


# ---------------------------------------------------------------------- ids that the tokenizer does not know
@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_ids_of_a_padded_head_are_never_sampled_or_named(runners: Runners, temperature: float) -> None:
    """E4. The bias would make each of them certain."""
    asked = params(temperature=temperature, logit_bias=dict.fromkeys(range(20, VOCAB), 100.0), num_logprobs=VOCAB)
    run = Run(runners, num_token_ids=20)
    run.add("a", [1, 2], asked)
    run.step({"a": 2})
    for _ in range(60):
        run.step({"a": 1})
    assert max(run.token_ids["a"]) < 20
    assert all(sorted(each.top_token_ids) == list(range(20)) for each in run.logprobs["a"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_padded_head_holds_is_no_bodys_concern(runners: Runners, bad: float, temperature: float) -> None:
    """Rows of padding are whatever the checkpoint's author left there. Neither errors nor logprobs may show it."""
    asked = params(temperature=temperature, num_logprobs=4, num_prompt_logprobs=4)
    clean, spoiled = Run(runners, num_token_ids=7), Run(runners, num_token_ids=7)
    spoiled.runner.spoil({(token_id, position): bad for token_id in range(VOCAB) for position in range(6)})
    for run in (clean, spoiled):
        run.add("a", [1, 2, 3], asked)
        run.step({"a": 3})
        for _ in range(3):
            run.step({"a": 1})
    assert spoiled.errors == clean.errors == {}
    assert (spoiled.token_ids, spoiled.logprobs) == (clean.token_ids, clean.logprobs)
    assert spoiled.prompt_logprobs == clean.prompt_logprobs
    assert len(spoiled.token_ids["a"]) == 4 and len(spoiled.prompt_logprobs["a"]) == 2


def test_probabilities_of_the_ids_that_exist_add_up_to_1(runners: Runners) -> None:
    run = Run(runners, num_token_ids=20)
    run.add("a", [1, 2], params(num_logprobs=VOCAB, num_prompt_logprobs=VOCAB))
    run.step({"a": 2})
    for found in (*run.logprobs["a"], *run.prompt_logprobs["a"]):
        assert np.exp(found.top_logprobs).sum() == pytest.approx(1.0, abs=1e-6)


def test_a_prompt_may_hold_ids_of_a_padded_head(runners: Runners) -> None:
    run = Run(runners, num_token_ids=20)
    run.add("a", [1, 30, 2], params(num_prompt_logprobs=1))
    run.step({"a": 3})
    padded, known = run.prompt_logprobs["a"]
    assert (padded.logprob, padded.rank) == (-float("inf"), 21)
    assert np.isfinite(known.logprob)


@pytest.mark.parametrize("num_token_ids", [None, VOCAB, 1000])
def test_without_padding_all_ids_are_sampled(runners: Runners, num_token_ids: int | None) -> None:
    run = Run(runners, num_token_ids=num_token_ids)
    run.add("a", [1, 2], params(temperature=50.0))
    run.step({"a": 2})
    for _ in range(200):
        run.step({"a": 1})
    assert max(run.token_ids["a"]) >= 37


def test_biased_ids_that_no_vocabulary_has_do_not_end_the_engine(runners: Runners) -> None:
    """E1: the server refuses them first."""
    run = Run(runners)
    run.add("a", [1, 2], params(temperature=0.0, logit_bias={VOCAB: 100.0, 10**9: 100.0}))
    run.step({"a": 2})
    assert run.token_ids["a"] == [int(token_logits(2, 1).argmax())]


# ---------------------------------------------------------------------- logprobs
def expect(token_id: int, position: int, following: int, num_top: int) -> TokenLogprobs:
    """Look a token up by sorting everything, in float64."""
    logprobs = torch.log_softmax(token_logits(token_id, position).double(), -1).tolist()
    order = sorted(range(VOCAB), key=lambda each: (-logprobs[each], each))
    top = order[:num_top]
    return TokenLogprobs(
        following, logprobs[following], 1 + order.index(following), tuple(top), tuple(logprobs[each] for each in top)
    )


def check(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.token_id, mine.rank, mine.top_token_ids) == (theirs.token_id, theirs.rank, theirs.top_token_ids)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-5)


def expect_prompt(prompt: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    return [expect(prompt[p - 1], p - 1, prompt[p], num_top) for p in range(1, len(prompt))]


PROMPT = [7 * n % VOCAB for n in range(23)]


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_are_the_raw_models_whatever_is_asked(runners: Runners, num_top: int) -> None:
    bending = {"temperature": 1.7, "logit_bias": {3: 50.0}, "presence_penalty": 1.0, "top_k": 3, "min_tokens": 3}
    run = Run(runners)
    run.add("a", PROMPT, params(num_logprobs=num_top, eos_token_ids=frozenset({1}), **bending))
    run.add("b", PROMPT, params())
    run.step({"a": len(PROMPT), "b": len(PROMPT)})
    for _ in range(4):
        run.step({"b": 1, "a": 1})
    tokens = [*PROMPT, *run.token_ids["a"]]
    check(run.logprobs["a"], [expect(tokens[p - 1], p - 1, tokens[p], num_top) for p in range(23, 28)])
    assert set(run.logprobs) == {"a"} and not run.prompt_logprobs


@pytest.mark.parametrize("chunk", [1, 7, 22, 23])
def test_prompt_logprobs_are_gathered_over_chunks(runners: Runners, chunk: int) -> None:
    run = Run(runners)
    run.add("a", PROMPT, params(num_prompt_logprobs=4, num_logprobs=0))
    run.add("b", [1, 2, 3], params())
    run.step({"b": 3})
    for start in range(0, len(PROMPT), chunk):
        assert not run.prompt_logprobs
        run.step({"a": min(chunk, len(PROMPT) - start), "b": 1})
    check(run.prompt_logprobs["a"], expect_prompt(PROMPT, 4))
    assert set(run.prompt_logprobs) == {"a"} and len(run.logprobs["a"]) == 1
    run.step({"a": 1, "b": 1})
    assert run.runner.num_logit_rows[-1] == 2, "behind the prompt, only the rows that are sampled from"


def test_prompt_logprobs_start_anew_after_a_preemption_within_the_prompt(runners: Runners) -> None:
    asked = params(num_prompt_logprobs=0)
    run = Run(runners)
    run.add("a", PROMPT, asked)
    run.step({"a": 9})
    run.add("a", PROMPT, asked)
    run.step({"a": 23}, preempted=["a"])
    check(run.prompt_logprobs["a"], expect_prompt(PROMPT, 0))


def test_a_request_that_comes_back_with_outputs_has_had_its_prompts(runners: Runners) -> None:
    asked = params(num_prompt_logprobs=0)
    run = Run(runners)
    run.add("a", PROMPT, asked, [4, 5])
    run.step({"a": 25})
    assert not run.prompt_logprobs and run.runner.num_logit_rows == [1]


def test_a_prompt_of_one_token_has_an_empty_list(runners: Runners) -> None:
    run = Run(runners)
    run.add("a", [3], params(num_prompt_logprobs=1))
    run.step({"a": 1})
    assert run.prompt_logprobs == {"a": []}


@pytest.mark.parametrize("max_logit_rows", [1, 2, 7, 24])
@pytest.mark.parametrize("chunk", [9, 23])
def test_nobody_sees_how_many_rows_of_logits_come_at_a_time(runners: Runners, max_logit_rows: int, chunk: int) -> None:
    found = []
    for rows_at_a_time in (max_logit_rows, 1000):
        run = Run(runners, max_logit_rows=rows_at_a_time)
        run.runner.spoil({(17, 12): float("nan")})
        prompts = {"a": PROMPT, "b": PROMPT[:4], "bad": [*PROMPT[:12], 17, *PROMPT[13:]], "c": PROMPT[::-1]}
        for request_id, prompt in prompts.items():
            num_top = None if request_id == "b" else 2
            run.add(request_id, prompt, params(num_logprobs=1, num_prompt_logprobs=num_top))
        for start in range(0, len(PROMPT), chunk):
            counts = {each: min(chunk, len(prompt) - start) for each, prompt in prompts.items()}
            run.step({each: max(count, 1) for each, count in counts.items()})
        run.step(dict.fromkeys(prompts, 1))
        assert set(run.errors) == {"bad"} and set(run.prompt_logprobs) == {"a", "c"}
        found.append((run.token_ids, run.logprobs, run.prompt_logprobs, run.errors))
    assert found[0] == found[1]


# ---------------------------------------------------------------------- logits that are not finite
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_ends_its_own_request(runners: Runners, bad: float, temperature: float) -> None:
    asked = params(temperature=temperature, num_logprobs=1)
    clean, spoiled = Run(runners), Run(runners)
    spoiled.runner.spoil({(2, 1): bad})
    for run in (clean, spoiled):
        for request_id, prompt in {"a": [3, 4], "b": [1, 2], "c": [5, 6]}.items():
            run.add(request_id, prompt, asked)
        run.step({"a": 2, "b": 2, "c": 2})
        run.step({"a": 1, "b": 1, "c": 1})  # was scheduled already
        assert run.runner.num_logit_rows == [3, 3], "it finds a token for b, too"
    assert set(spoiled.errors) == {"b"} and "not finite" in spoiled.errors["b"]
    assert spoiled.errors["b"][0].isupper() and spoiled.errors["b"].endswith("."), "a client reads it"
    for request_id in "ac":
        assert spoiled.token_ids[request_id] == clean.token_ids[request_id]
        assert spoiled.logprobs[request_id] == clean.logprobs[request_id]


@pytest.mark.parametrize("chunk", [5, 23])
@pytest.mark.parametrize("position", [0, 3, 21])
def test_a_prompt_row_that_is_not_finite_does_so_too_where_it_is_read(
    runners: Runners, chunk: int, position: int
) -> None:
    run = Run(runners)
    run.runner.spoil({(PROMPT[position], position): float("nan")})
    run.add("a", PROMPT, params(num_prompt_logprobs=0))
    run.add("b", PROMPT, params())
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        result = run.step({"a": count, "b": count})
        assert ("a" in result.errors) == (start <= position < start + count)
        if result.errors:
            assert result.token_ids[0] == -1
    assert set(run.errors) == {"a"} and "a" not in run.prompt_logprobs
    assert len(run.token_ids["b"]) == 1
    run.step({"a": 1, "b": 1})  # was scheduled already


def test_logits_are_read_only_where_somebody_asked(runners: Runners) -> None:
    run = Run(runners)
    run.add("a", PROMPT, params())
    run.step({"a": 23})
    assert run.runner.num_logit_rows == [1]
    assert np.isin(run.token_ids["a"], range(VOCAB)).all()
