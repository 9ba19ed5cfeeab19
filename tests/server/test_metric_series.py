import sys
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server.metric_row import MetricRow, build_1_2_5
from server.metric_series import Counter, Family, Gauge, Histogram, RateWindow

ROW = MetricRow(name="h", kind="histogram", unit="seconds", help="Some.", labels=("zone",), values=("a",))


@given(st.lists(st.floats(0, 20, allow_nan=False) | st.sampled_from([0.5, 1.0, 2.5, 1e6]), max_size=20))
def test_a_histogram_is_written_as_prometheus_own_client_writes_it(values: list[float]) -> None:
    bounds = (0.5, 1.0, 2.5, 1_000_000)
    registry = CollectorRegistry()
    reference = PrometheusHistogram("h", "Some.", ("zone", "engine"), buckets=bounds, registry=registry)
    one_by_one, at_once = (Family(ROW, {"engine": "0"}, lambda: Histogram(bounds)) for _ in range(2))
    child = reference.labels(zone="a", engine="0")
    for value in values:
        child.observe(value)
        one_by_one.at("a").observe(value)
    at_once.at("a").observe_all(values)
    expected = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    written = "".join(one_by_one.write()).splitlines()
    assert [line for line in written if "_sum" not in line] == [line for line in expected if "_sum" not in line]
    assert "".join(at_once.write()).splitlines()[:-1] == written[:-1]
    sums = [float(lines[-1].split()[-1]) for lines in (written, expected, "".join(at_once.write()).splitlines())]
    assert sums == [pytest.approx(sum(values))] * 3


def test_a_counter_refuses_to_go_down() -> None:
    counter = Counter()
    counter.inc(2)
    with pytest.raises(ValueError, match="cannot go down by 1"):
        counter.inc(-1)
    assert list(counter.samples()) == [("", "", 2)]


def test_a_gauge_is_never_negative() -> None:
    gauge = Gauge()
    gauge.set(2.5)
    assert list(gauge.samples()) == [("", "", 2.5)]
    gauge.set(-1e-17)
    assert list(gauge.samples()) == [("", "", 0.0)]


def test_an_alias_shows_the_same_series_under_its_own_name() -> None:
    family = Family(ROW, {}, lambda: Histogram((1.0,)))
    family.at("a").observe(0.5)
    alias = MetricRow(name="old", kind="histogram", unit="seconds", help="The same as h.", alias_of="h")
    original, shown = "".join(family.write()), "".join(family.write(alias))
    assert shown == original.replace("h{", "old{").replace("h_", "old_").replace(" h ", " old ").replace(
        "Some.", "The same as h."
    )
    assert "old_count" in shown


# Whatever Python, or a reader in any other language, may take for the end of a line, and what UTF-8 cannot hold.
UNPRINTABLE = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp")]
UNPRINTABLE += ["\ud800", "\udfff"]


@pytest.mark.parametrize("value", UNPRINTABLE, ids=ascii)
def test_no_label_ends_a_line_of_the_page(value: str) -> None:
    family = Family(replace(ROW, kind="gauge"), {"model_name": f"m{value}forged 1"}, Gauge)
    family.at(f"z{value}forged 1").set(2)
    page = "".join(family.write())
    assert page.encode().decode().splitlines() == page.split("\n")[:-1]
    shown = "\n" if value == "\n" else "?"
    (read,) = text_string_to_metric_families(page)
    assert [sample.labels for sample in read.samples if sample.value == 2] == [
        {"zone": f"z{shown}forged 1", "model_name": f"m{shown}forged 1"}
    ]


def test_values_that_are_shown_alike_are_one_series() -> None:
    family = Family(ROW, {}, Counter)
    for value in ("x\r", "x\0", "x?"):
        family.at(value).inc()
    assert family.at("x?").value == 3
    assert "".join(family.write()).count("x?") == 1


@pytest.mark.parametrize(
    ("limit", "bounds"),
    [
        (1, (1,)),
        (7, (1, 2, 5)),
        (10, (1, 2, 5, 10)),
        (2048, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)),
    ],
)
def test_1_2_5_goes_as_far_as_the_context(limit: int, bounds: tuple[int, ...]) -> None:
    assert build_1_2_5(limit) == bounds


def test_a_rate_counts_the_present_second_as_far_as_it_has_gone() -> None:
    now = 50.0
    window = RateWindow(lambda: now)
    assert window.get_rate() == 0
    window.add(18)
    assert window.get_rate() == pytest.approx(18 / 9)
    now = 50.75
    window.add(18)
    assert window.get_rate() == pytest.approx(36 / 9.75)
    now = 59.5
    assert window.get_rate() == pytest.approx(36 / 9.5)
    now = 60.0
    assert window.get_rate() == 0
