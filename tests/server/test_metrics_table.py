from server.metrics_table import TABLE, _build_alias
from tests.server.test_metric_row import ROW, get_changes


def test_an_alias_is_its_row_but_for_what_is_said_of_it() -> None:
    alias = _build_alias("old_total", ROW)
    assert get_changes(ROW, alias) == {
        "name": "old_total",
        "help": "The same as h_total.",
        "tells": "",
        "alias_of": "h_total",
    }


def test_every_alias_of_the_table_has_its_rows_shape() -> None:
    rows = {row.name: row for row in TABLE}
    aliases = [row for row in TABLE if row.alias_of]
    assert aliases
    for alias in aliases:
        assert set(get_changes(rows[alias.alias_of], alias)) <= {"name", "help", "tells", "alias_of"}
