import pytest
import yaml

from server.monitoring.alert import Alert, format_alerts, format_runbook
from server.monitoring.series import UnknownSeriesError

ALERT = Alert(
    name="Busy",
    expr="vllm:num_requests_running > 3",
    hold="5m",
    severity="warning",
    summary="{{ $labels.instance }} runs {{ $value | humanize }}.",
    description="Much to do.",
    runbook=("Wait.", 'Say "please".'),
)


def test_a_rule_is_narrowed_to_our_servers_and_says_what_to_do() -> None:
    document = yaml.safe_load(format_alerts([ALERT], "Made."))
    assert document == {
        "groups": [
            {
                "name": "pointsman",
                "rules": [
                    {
                        "alert": "PointsmanBusy",
                        "expr": 'vllm:num_requests_running{job=~".*pointsman.*"} > 3',
                        "for": "5m",
                        "labels": {"severity": "warning"},
                        "annotations": {
                            "summary": "{{ $labels.instance }} runs {{ $value | humanize }}.",
                            "description": "Much to do.",
                            "runbook": '1. Wait.\n2. Say "please".',
                        },
                    }
                ],
            }
        ]
    }


def test_the_runbook_has_a_part_for_each_alert_without_templates() -> None:
    text = format_runbook([ALERT], "Made.")
    assert "## PointsmanBusy\n\nwarning, after 5m: a server runs ….\n\nMuch to do.\n\n1. Wait.\n2. Say" in text
    assert "{{" not in text
    assert ALERT.query.text in text


def test_an_alert_cannot_name_what_nobody_counts() -> None:
    alert = Alert(name="X", expr="vllm:gone > 0", hold="5m", severity="info", summary="", description="", runbook=())
    with pytest.raises(UnknownSeriesError):
        format_alerts([alert], "")
