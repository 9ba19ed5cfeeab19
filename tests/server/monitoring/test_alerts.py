"""All alerts together; that each fires when it should, promtool tells (tests/system)."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from server.monitoring.alert import JOB, Alert
from server.monitoring.alerts import ALERTS
from server.monitoring.rest import build_sections
from tests.server.monitoring.alert_cases import CASES
from tests.server.monitoring.promtool_file import PATH, format_tests

BY_NAME = {alert.name: alert for alert in ALERTS}
# Source: the chapter's section 3.9, and the list of alerts that an operator of such a server needs.
WANTED = {
    *("KVStarvation", "CappedByMaxNumSeqs", "WaitingWithFreeKV", "PrefillStarvation"),
    *("EngineDown", "NotReady", "EngineStuck", "QueueBacklog", "HighTTFT", "HighITL", "KVCacheFull"),
    *("PreemptionRate", "ErrorRate", "Rejections", "PrefixHitDrop", "RestartLoop", "AbortRate", "WatchdogNearMiss"),
    *("OpenFiles", "MemoryGrowth"),
}


def test_there_is_an_alert_for_every_sign() -> None:
    assert set(BY_NAME) >= WANTED
    assert len(BY_NAME) == len(ALERTS)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_says_where_and_what_and_what_to_do(alert: Alert) -> None:
    assert "{{ $labels.instance }}" in alert.summary
    assert "Look " in alert.description
    assert alert.runbook
    for text in (alert.summary, alert.description, *alert.runbook):
        assert text.endswith(".")
    assert re.fullmatch(r"\d+[mh]", alert.hold)
    assert alert.query.text.count(JOB) == len(re.findall(r"\{[^}]*\}", alert.query.text))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_what_an_alert_sends_its_reader_to_exists(alert: Alert) -> None:
    texts = " ".join((alert.description, *alert.runbook))
    assert {name.removeprefix("Pointsman") for name in re.findall(r"Pointsman[A-Z]\w+", texts)} <= set(BY_NAME)
    titles = {panel.title for section in build_sections() for panel in section.panels}
    assert set(re.findall("“(.*?)”", texts)) <= titles


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires = Counter(case.alert for case in CASES if case.shown is not None)
    quiet = Counter(case.alert for case in CASES if case.shown is None)
    assert set(fires) == set(quiet) == set(BY_NAME)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_case_has_every_series_that_its_alert_asks_for(alert: Alert) -> None:
    asked = {selector.split("{")[0] for selector in alert.query.selectors}
    for case in CASES:
        if case.alert == alert.name:
            assert {name.split("{")[0] for name in case.series} == asked


def test_promtools_file_is_made_from_the_cases() -> None:
    assert PATH.read_text(encoding="utf-8") == format_tests(), "python -m tests.server.monitoring.promtool_file"
