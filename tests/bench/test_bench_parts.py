"""The benches' own parts, without a model: static batching, quantiles, tables and plots. Benches are run by hand."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from engine_core.config import SchedulerConfig
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import EngineCoreRequest
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler
from tests.bench.bench_report import Table, format_ms, format_s, quantile
from tests.bench.static_batching import StaticBatching
from tests.bench.svg_plot import Panel, Series, log_ticks, nice_step, plot

SVG = "{http://www.w3.org/2000/svg}"


def create_scheduler(max_num_seqs: int, *, budget: int = 64) -> Scheduler:
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    return Scheduler(
        config=config,
        kv_cache=KVCacheManager(num_blocks=32, block_size=4),
        max_model_len=64,
        constraints=[StaticBatching(max_num_seqs)],
    )


def add(scheduler: Scheduler, *lengths: tuple[int, int], start: int = 0) -> None:
    """Add requests of (prompt tokens, output tokens), named from ``start`` on."""
    for i, (num_prompt_tokens, max_tokens) in enumerate(lengths, start):
        prompt = [100 * i + position for position in range(num_prompt_tokens)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        scheduler.add_request(EngineCoreRequest(str(i), prompt, params, arrival_time=0.0))


def step(scheduler: Scheduler) -> dict[str, int]:
    """Run one step in which every request that is due samples; return its tokens by id."""
    output: SchedulerOutput = scheduler.schedule(0.0)
    requests = scheduler.requests
    sampled = [7 if requests[id_].num_computed_tokens >= requests[id_].num_tokens else -1 for id_ in output.req_ids]
    scheduler.update_from_output(output, ModelRunnerOutput(sampled))
    return output.num_scheduled_tokens


def test_a_batch_runs_to_its_last_member_before_the_next_one_enters() -> None:
    scheduler = create_scheduler(max_num_seqs=2)
    add(scheduler, (3, 1), (3, 3), (3, 1))
    assert [step(scheduler) for _ in range(4)] == [{"0": 3, "1": 3}, {"1": 1}, {"1": 1}, {"2": 3}]


def test_a_batch_that_is_not_full_is_closed_all_the_same() -> None:
    scheduler = create_scheduler(max_num_seqs=4)
    add(scheduler, (3, 2))
    assert step(scheduler) == {"0": 3}
    add(scheduler, (3, 1), start=1)
    assert [step(scheduler) for _ in range(2)] == [{"0": 1}, {"1": 3}]


def test_a_batch_fills_over_several_steps_where_the_prompts_are_long() -> None:
    scheduler = create_scheduler(max_num_seqs=3, budget=8)
    add(scheduler, (6, 4), (6, 4), (6, 4), (6, 4))
    assert step(scheduler) == {"0": 6, "1": 2}
    assert step(scheduler) == {"0": 1, "1": 4, "2": 3}
    assert step(scheduler) == {"0": 1, "1": 1, "2": 3}


def test_a_full_batch_is_closed_though_its_prompts_took_every_token() -> None:
    scheduler = create_scheduler(max_num_seqs=2, budget=8)
    add(scheduler, (4, 1), (4, 2), (4, 1))
    assert [step(scheduler) for _ in range(3)] == [{"0": 4, "1": 4}, {"1": 1}, {"2": 4}]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.01, 1.0), (0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_quantile_is_of_nearest_rank(share: float, expected: float) -> None:
    assert quantile([3.0, 1.0, 4.0, 2.0], share) == expected


def test_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        quantile([], 0.5)


def test_figures_are_written_with_the_digits_they_deserve() -> None:
    assert [format_ms(1.2345), format_s(1.2345), format_s(12.345)] == ["1,234", "1.23", "12.3"]


def test_a_table_is_markdown() -> None:
    table = Table(("what", "s"), [("static", "1.0"), ("continuous", "0.5")])
    assert table.to_markdown().splitlines() == [
        "| what | s |",
        "| --- | --: |",
        "| static | 1.0 |",
        "| continuous | 0.5 |",
    ]


@pytest.mark.parametrize(("span", "expected"), [(10.0, 2.0), (7.0, 2.0), (5.0, 1.0), (2600.0, 1000.0), (0.3, 0.1)])
def test_ticks_stand_at_round_figures(span: float, expected: float) -> None:
    assert nice_step(span) == pytest.approx(expected)


def test_log_ticks_thin_out_over_many_decades() -> None:
    assert list(log_ticks(30, 2600)) == pytest.approx([50, 100, 200, 500, 1000, 2000])
    assert list(log_ticks(1, 1000)) == pytest.approx([1, 10, 100, 1000])


def draw(*panels: Panel) -> ET.Element:
    return ET.fromstring(plot(panels, description='a "plot" & more'))


def test_a_plot_places_points_between_its_axes() -> None:
    series = Series("wait", [(0, 0), (5, 10), (10, 5)], style=0)
    root = draw(Panel("", "time (s)", "wait (s)", [series]))
    (line,) = root.iter(f"{SVG}polyline")
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split())
    assert x0 < x1 < x2 and x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 > y2 > y1, "a larger value stands higher"
    assert y0 - y2 == pytest.approx(y2 - y1, abs=0.11)
    assert len(list(root.iter(f"{SVG}rect"))) == 3, "a mark at each point, and no background"
    assert [text.text for text in root.iter(f"{SVG}text")][-2:] == ["time (s)", "wait (s)"]


def test_a_log_axis_gives_equal_factors_equal_room() -> None:
    root = draw(Panel("", "x", "y", [Series("gap", [(0, 10), (1, 100), (2, 1000)], style=1)], is_log=True))
    y0, y1, y2 = (float(circle.attrib["cy"]) for circle in root.iter(f"{SVG}circle"))
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)


def test_a_legend_names_each_series_once_and_only_where_there_are_several() -> None:
    def texts(*names: str) -> list[str | None]:
        series = [Series(name, [(1, 1)], style=i, is_line=False) for i, name in enumerate(names)]
        return [
            text.text for text in draw(Panel("a", "x", "y", series), Panel("b", "x", "y", series)).iter(f"{SVG}text")
        ]

    assert [texts("low", "high").count(name) for name in ("low", "high")] == [1, 1]
    assert "low" not in texts("low")


def test_text_and_axes_take_the_readers_color() -> None:
    svg = plot([Panel("", "x", "y", [Series("s", [(1, 1)], style=0)])], description="d")
    assert "prefers-color-scheme:dark" in svg
    assert "text{fill:currentColor}" in svg
    # Colours of their own have the series only.
    assert set(re.findall(r'(?:fill|stroke)="(#\w+)"', svg)) == {"#d9730d"}
