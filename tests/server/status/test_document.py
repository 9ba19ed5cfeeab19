from __future__ import annotations

import pytest

from engine_core import EnginePhase
from server.json_text import decode_json, encode_json
from server.metrics import ServerMetrics
from server.metrics_table import TABLE
from server.records import StepRecord
from server.status.document import FIGURES, build_blocks, build_document, read_figures
from server.status.error_log import LoggedError
from server.status.history import Durations, SecondFigures, StepFigures
from tests.server.fake_engine_client import create_state
from tests.server.metric_samples import STATS, create_record, read_samples
from tests.server.status_samples import create_present, create_row, create_snapshot


def test_every_figure_is_a_row_of_the_metrics_table_by_its_own_name() -> None:
    rows = {row.name: row for row in TABLE}
    for name, *labels in FIGURES.values():
        assert not rows[name].alias_of and len(labels) == len(rows[name].labels)
        assert all(label in rows[name].values for label in labels), "a typing error would make a series of its own"


def test_the_figures_are_those_of_the_metrics_page() -> None:
    now = 50.0
    metrics = ServerMetrics("tiny", clock=lambda: now)
    metrics.record_step(StepRecord(num_generation_tokens=7, started=[create_record()], ended=[create_record()]), STATS)
    now = 52.5
    figures, page = read_figures(metrics), read_samples(metrics)
    for name, (metric, *labels) in FIGURES.items():
        own = ",".join(f"finished_reason={label}" for label in labels)
        assert figures[name] == page[metric, own], name
    assert (figures["running"], figures["waiting"], figures["kv_usage"]) == (3, 4, 0.6)
    assert figures["prefix_hit_ratio"] == 64 / 90 and figures["output_tokens_per_s"] > 0
    assert read_samples(metrics) == page, "reading changes nothing"


def test_all_figures_together_are_one_look_at_what_others_watch() -> None:
    metrics, looks = ServerMetrics("tiny"), []
    metrics.watch(lambda: looks.append(1) or {})
    read_figures(metrics)
    assert len(looks) == 1


def test_a_server_that_is_still_loading_has_no_engine_to_show() -> None:
    state = create_state(EnginePhase.LOADING, detail="packing layer 3", progress=0.4567, max_model_len=0)
    document = build_document(create_present(phase="loading", state=state))
    assert document["engine"] is None
    assert document["server"] == {
        "model": "org/model",
        "version": "1.2.3",
        "started": 1_700_000_000.0,
        "uptime_s": 61.2,
        "phase": "loading",
        "stalled_s": 0.0,
        "detail": "packing layer 3",
        "progress": 0.457,
        "max_model_len": 0,
    }


def test_requests_are_told_with_their_age_key_and_reason() -> None:
    waiting = create_row("w", status="waiting", num_computed_tokens=0, num_output_tokens=0, wait_reason="behind r")
    snapshot = create_snapshot(create_row("r", num_preemptions=2), waiting=(waiting,))
    document = build_document(create_present(snapshot=snapshot, snapshot_age_s=2.0, key_ids={"w": "alice"}))
    engine = document["engine"]
    assert (engine["num_running"], engine["num_waiting"], engine["max_num_seqs"]) == (1, 1, 4)
    assert engine["age_s"] == 2.0
    assert engine["running"] == [
        {
            "id": "r",
            "key_id": "",
            "status": "running",
            "age_s": 12.0,
            "prompt_tokens": 12,
            "prompt_computed": 12,
            "prompt_cached": 8,
            "output_tokens": 3,
            "blocks": 2,
            "preemptions": 2,
            "waits_for": "",
        }
    ]
    (told,) = engine["waiting"]
    assert (told["key_id"], told["prompt_computed"], told["waits_for"]) == ("alice", 0, "behind r")


def test_an_age_is_never_negative() -> None:
    document = build_document(create_present(snapshot=create_snapshot(create_row("r", arrival_time=100.5))))
    assert document["engine"]["running"][0]["age_s"] == 0.0


def test_steps_and_seconds_become_rows_and_columns() -> None:
    seconds = [
        SecondFigures(1, 10, 4, num_prefix_queries=8, num_prefix_hits=2, num_running=3, num_waiting=1, kv_usage=0.5),
        SecondFigures(2, first_token=Durations(2, 0.5, 0.4), token_gap=Durations(4, 0.2, 0.08)),
    ]
    document = build_document(create_present(steps=[StepFigures(128, 3, 0.0421)], seconds=seconds))
    assert document["steps"] == [[128, 3, 42.1]]
    assert document["seconds"] == {
        "running": [3, 0],
        "waiting": [1, 0],
        "kv_usage": [0.5, 0.0],
        "prompt_tokens": [10, 0],
        "output_tokens": [4, 0],
        "prefix_hit_ratio": [0.25, None],
        "first_token_ms": [[None, None], [250.0, 400.0]],
        "token_gap_ms": [[None, None], [50.0, 80.0]],
    }
    assert document["latency"] == {"first_token_ms": [250.0, 400.0], "token_gap_ms": [50.0, 80.0]}


def test_latency_is_of_the_last_minute() -> None:
    old, recent = Durations(1, 9.0, 9.0), Durations(1, 1.0, 1.0)
    seconds = [
        SecondFigures(0, token_gap=old),
        *(SecondFigures(i) for i in range(59)),
        SecondFigures(60, token_gap=recent),
    ]
    assert build_document(create_present(seconds=seconds))["latency"]["token_gap_ms"] == [1000.0, 1000.0]


def test_what_a_client_may_have_written_is_passed_on_as_it_is() -> None:
    text = "<script>alert(1)</script>\u2028"
    document = build_document(create_present(errors=[LoggedError(1.23456, "error", text)]))
    assert document["errors"] == [{"unix_time": 1.235, "level": "error", "text": text}]
    assert decode_json(encode_json(document)) == document


@pytest.mark.parametrize(("max_cells", "per_cell"), [(16, 1), (8, 2)])
def test_blocks_are_counted_and_drawn(max_cells: int, per_cell: int) -> None:
    snapshot = create_snapshot(create_row("a"), create_row("b"))
    blocks = build_blocks(snapshot.blocks, 64, max_cells)
    cells = blocks.pop("cells")
    assert blocks == {"total": 16, "used": 4, "cached": 1, "free": 11, "block_size": 64, "per_cell": per_cell}
    assert sum(count for _, count in cells) == 16 // per_cell
    assert cells[:2] == [(0, 2 // per_cell), (1, 2 // per_cell)]
