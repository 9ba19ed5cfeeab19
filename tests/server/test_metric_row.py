from dataclasses import fields

from server.metric_row import MetricRow, by_label

# No field has its default, so that none can be lost unseen.
ROW = MetricRow(
    name="h_total",
    kind="histogram",
    unit="seconds",
    help="Some.",
    labels=("old",),
    values=("x",),
    buckets=(1.0, 2.0),
    tells="Short.",
    alias_of="other",
    has_model_labels=False,
)


def get_changes(before: MetricRow, after: MetricRow) -> dict[str, object]:
    """The fields of ``after`` that ``before`` has otherwise."""
    found = {field.name: getattr(after, field.name) for field in fields(MetricRow)}
    return {name: value for name, value in found.items() if value != getattr(before, name)}


def test_no_field_of_the_row_above_has_its_default() -> None:
    assert [field.name for field in fields(MetricRow) if getattr(ROW, field.name) == field.default] == []


def test_a_label_changes_nothing_else_of_a_row() -> None:
    labelled = by_label("reason", ("room", "turn"), ROW)
    assert get_changes(ROW, labelled) == {"labels": ("reason",), "values": ("room", "turn")}
