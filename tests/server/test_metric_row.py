from dataclasses import fields

from server.metric_row import MetricRow, by_label
from tests.server.metric_samples import ROW, get_changes


def test_no_field_of_the_row_above_has_its_default() -> None:
    assert [field.name for field in fields(MetricRow) if getattr(ROW, field.name) == field.default] == []


def test_a_label_changes_nothing_else_of_a_row() -> None:
    labelled = by_label("reason", ("room", "turn"), ROW)
    assert get_changes(ROW, labelled) == {"labels": ("reason",), "values": ("room", "turn")}
