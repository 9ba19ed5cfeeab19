"""The soak's parts, without a server: its load is the same every time, and its report notices a leak."""

from __future__ import annotations

import os
import random
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest

from tests.bench.soak_load import draw_soak_plan, iter_plans
from tests.bench.soak_report import Soak, draw, find_problems, fit_slope, format_markdown, summarize
from tests.bench.soak_watch import METRICS, Sample, read_metrics, read_process
from tests.long.storm import CHAT, COMPLETIONS

MIB = 1024


def sample(seconds: float, *, is_idle: bool, **overrides: Any) -> Sample:
    plain: dict[str, Any] = {
        "anon_kib": 600 * MIB,
        "num_files": 30,
        "num_threads": 12,
        "num_tasks": 6.0,
        "num_running": 0.0 if is_idle else 8.0,
        "num_waiting": 0.0,
        "kv_usage": 0.0 if is_idle else 0.7,
        "num_tokens": seconds * 100,
        "num_preemptions": 3.0,
    }
    return Sample(seconds=seconds, is_idle=is_idle, **{**plain, **overrides})


def create_soak(minutes: int = 10, **per_minute: float) -> Soak:
    """Two looks a minute; what ``per_minute`` names rises by so much each."""
    samples = []
    for half_minute in range(2 * minutes + 1):
        plain = sample(half_minute * 30.0, is_idle=half_minute % 2 == 0)
        grown = {name: getattr(plain, name) + rise * half_minute / 2 for name, rise in per_minute.items()}
        samples.append(replace(plain, **grown))
    return Soak(1, 24, minutes * 60.0, samples, {"whole": 5, "refused": 1}, [], [])


def test_the_load_is_the_same_for_a_seed_and_of_every_kind() -> None:
    plans = [draw_soak_plan(random.Random(seed), seed) for seed in range(600)]
    assert plans == [draw_soak_plan(random.Random(seed), seed) for seed in range(600)]
    bodies = [plan.body for plan in plans if not plan.is_bad]
    texts = [str(body.get("prompt", body.get("messages"))) for body in bodies]
    assert {plan.path for plan in plans} == {CHAT, COMPLETIONS}
    assert any(plan.is_bad for plan in plans) and any(plan.leaves_after_s for plan in plans)
    assert any(len(text) > 2000 for text in texts) and any(len(text) < 100 for text in texts)
    for has in ("priority", "logprobs", "stop"):
        assert 0 < sum(has in body for body in bodies) < len(bodies)
    assert {body["n"] for body in bodies} == {1, 2, 3}
    assert {body["stream"] for body in bodies} == {True, False}
    assert max(body["max_tokens"] for body in bodies) > 32


def test_the_load_ends_with_its_time() -> None:
    assert list(iter_plans(random.Random(1), 0, 0.0)) == []
    assert len(list(zip(range(5), iter_plans(random.Random(1), 0, 60.0), strict=False))) == 5


@pytest.mark.parametrize(
    ("points", "slope"),
    [([(0, 1), (1, 3), (2, 5)], 2.0), ([(0, 5), (1, 5)], 0.0), ([(1, 7)], 0.0), ([(1, 7), (1, 9)], 0.0), ([], 0.0)],
)
def test_slopes(points: list[tuple[float, float]], slope: float) -> None:
    assert fit_slope(points) == pytest.approx(slope)


def test_a_healthy_soak_has_no_problems() -> None:
    soak = create_soak()
    assert find_problems(soak) == []
    report = format_markdown(soak)
    assert "Nothing leaks." in report and "600 MB" not in report  # MiB are not MB
    assert "6: 1 refused, 5 whole" in report


@pytest.mark.parametrize(
    ("soak", "told"),
    [
        (create_soak(anon_kib=2 * MIB), "memory grows by"),
        (create_soak(num_files=1), "files grow"),
        (create_soak(num_tasks=1), "tasks grow"),
        (create_soak(num_threads=7), "threads grow"),
        (create_soak(kv_usage=0.01), "KV blocks are held"),
        (replace(create_soak(), wrong=["a 500"]), "a client saw: a 500"),
        (replace(create_soak(), log_errors=["Traceback"]), "the log says: Traceback"),
    ],
)
def test_a_leak_is_a_problem(soak: Soak, told: str) -> None:
    assert any(told in problem for problem in find_problems(soak)), find_problems(soak)
    assert told in format_markdown(soak)


def test_pools_that_fill_up_are_no_leak() -> None:
    filling = create_soak()
    samples = [replace(each, num_threads=8 + min(7, int(each.seconds / 80))) for each in filling.samples]
    assert find_problems(replace(filling, samples=samples)) == []


def test_a_rise_that_ends_with_warming_up_is_none() -> None:
    soak = create_soak()
    warming = [
        replace(each, anon_kib=int(each.anon_kib * (0.5 + min(each.seconds / 400, 0.5)))) for each in soak.samples
    ]
    assert find_problems(replace(soak, samples=warming)) == []


def test_the_slope_is_per_hour_and_in_mb() -> None:
    assert summarize(create_soak(anon_kib=1000))["slope_mb_per_h_idle"] == pytest.approx(60 * 1.024, rel=0.01)


def test_the_plot_is_an_image() -> None:
    root = ET.fromstring(draw(create_soak()))
    assert root.tag.endswith("svg") and len(list(root.iter())) > 50


def test_a_page_of_metrics_and_a_process_are_read() -> None:
    page = "".join(f'{name}{{model_name="m"}} 2\n{name}{{model_name="n"}} 1.5\n' for name in METRICS.values())
    assert read_metrics(f"# HELP x\n{page}other 7\n") == dict.fromkeys(METRICS, 3.5)
    anon, files, threads = read_process(os.getpid())
    assert anon > 1000 and files > 2 and threads >= 1
