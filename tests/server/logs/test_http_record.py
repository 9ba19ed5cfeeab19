from __future__ import annotations

from engine_core import FinishReason
from server.logs.http_record import (
    ErrorNote,
    HttpRecord,
    get_http_record,
    note_answer,
    note_disconnect,
    note_error,
    set_http_record,
)
from tests.server.http_records import create_answer, create_gaps, create_http_record
from tests.server.metric_samples import create_record


def test_what_is_noted_on_a_scope_is_in_its_record() -> None:
    scope = {"type": "http"}
    record = HttpRecord("POST", "/v1/completions", 1.0)
    set_http_record(scope, record)
    answer, error = create_answer(), ErrorNote("internal_error", 500)
    note_answer(dict(scope), answer)  # a copy of the scope, as routers make them, has the same record
    note_error(scope, error)
    note_disconnect(scope)
    assert get_http_record(scope) is record
    assert (record.answer, record.error, record.client_disconnected) == (answer, error, True)


def test_where_nobody_keeps_a_record_notes_are_lost_and_nothing_else() -> None:
    scope = {"type": "http"}
    note_answer(scope, create_answer())
    note_error(scope, ErrorNote("internal_error", 500))
    note_disconnect(scope)
    assert scope == {"type": "http"}


def test_a_refused_request_has_no_figures() -> None:
    record = create_http_record(answer=None)
    assert (record.num_input_tokens, record.num_cached_tokens, record.num_output_tokens) == (0, 0, 0)
    assert (record.arrival_time, record.first_token_time, record.last_end_time, record.median_gap_s) == (None,) * 4
    assert (record.requests, record.finish_reasons, record.num_preemptions) == ((), (), 0)


def test_several_choices_are_added_up_and_a_prompt_counts_once() -> None:
    first = create_record(n=2, gaps=create_gaps(0.1), num_preemptions=1)
    second = create_record(
        n=2,
        choice=1,
        first_scheduled_time=100.25,
        first_token_time=101.75,
        last_token_time=103.0,
        end_time=103.5,
        num_output_tokens=7,
        gaps=create_gaps(0.2),
        finish_reason=FinishReason.LENGTH,
        num_preemptions=2,
    )
    other_prompt = create_record(num_prompt_tokens=5, num_cached_tokens=0, gaps=create_gaps(0.3))
    record = create_http_record(answer=create_answer(first, second, other_prompt))
    assert (record.num_input_tokens, record.num_cached_tokens, record.num_output_tokens) == (17, 8, 15)
    assert record.finish_reasons == ("stop", "length", "stop")
    assert record.num_preemptions == 3
    assert (record.arrival_time, record.first_scheduled_time, record.first_token_time) == (100.0, 100.25, 101.5)
    assert (record.last_token_time, record.last_end_time, record.median_gap_s) == (103.0, 103.5, 0.2)


def test_a_choice_that_never_began_does_not_hide_the_others() -> None:
    waiting = create_record(
        first_scheduled_time=None, first_token_time=None, last_token_time=None, end_time=None, finish_reason=None
    )
    record = create_http_record(answer=create_answer(waiting, create_record()))
    assert (record.first_token_time, record.last_end_time, record.finish_reasons) == (101.5, 102.5, ("stop",))


def test_a_time_of_zero_is_a_time() -> None:
    record = create_http_record(answer=create_answer(create_record(first_token_time=0.0)))
    assert record.first_token_time == 0.0
