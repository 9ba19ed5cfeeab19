"""The dashboard as Grafana would draw it: nothing overlaps, the overview comes first, every metric is somewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from server.monitoring.dashboard import build_dashboard, format_dashboard
from server.monitoring.panel import NUM_COLUMNS, Panel
from server.monitoring.panels import OVERVIEW, Section
from server.monitoring.rest import build_sections

ALL = build_sections()
BOARD = build_dashboard(ALL)


def walk(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel, also of folded rows."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    at = panel["gridPos"]
    return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}


def test_no_panel_lies_over_another_or_beside_the_page() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        own = cells(panel)
        assert own and not own & taken, panel["title"]
        assert {x for x, _ in own} <= set(range(NUM_COLUMNS))
        taken |= own
    for row in BOARD["panels"]:
        within: set[tuple[int, int]] = set()
        for panel in row.get("panels", []):
            assert not cells(panel) & within
            within |= cells(panel)


def test_panels_come_in_the_order_in_which_they_are_drawn_without_gaps_between_lines() -> None:
    places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in BOARD["panels"]]
    assert places == sorted(places)
    covered = {y for panel in BOARD["panels"] for _, y in cells(panel)}
    assert covered == set(range(max(covered) + 1))


def test_the_overview_comes_first_and_fits_a_screen() -> None:
    head, *panels = BOARD["panels"][: len(OVERVIEW.panels) + 1]
    assert (head["type"], head["title"]) == ("row", "Overview")
    assert [panel["title"] for panel in panels] == [panel.title for panel in OVERVIEW.panels]
    assert {panel["type"] for panel in panels} == {"stat"}
    assert max(y for panel in panels for _, y in cells(panel)) < 10


def test_ids_and_titles_are_the_panels_own() -> None:
    ids = [panel["id"] for panel in walk(BOARD)]
    titles = [panel["title"] for panel in walk(BOARD)]
    assert len(ids) == len(set(ids)) and len(titles) == len(set(titles))


def test_each_query_of_a_panel_has_a_letter_of_its_own() -> None:
    for panel in walk(BOARD):
        letters = [target["refId"] for target in panel.get("targets", [])]
        assert len(letters) == len(set(letters))
        assert bool(letters) == (panel["type"] != "row")
        if panel["type"] == "row":
            continue
        (built,) = [each.queries for section in ALL for each in section.panels if each.title == panel["title"]]
        assert len(letters) == len(built), "every query has a letter"


def test_a_line_that_is_full_is_followed_by_the_next_one() -> None:
    panels = tuple(Panel(title=str(i), queries={"": "up"}, unit="short", width=10, height=3 + i % 2) for i in range(3))
    board = build_dashboard(
        [Section("One", panels), Section("Folded", panels[:1], is_folded=True), Section("Last", ())]
    )
    places = [(panel["title"], panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert places == [("One", 0, 0), ("0", 0, 1), ("1", 10, 1), ("2", 0, 5), ("Folded", 0, 8), ("Last", 0, 9)]
    assert [panel["title"] for panel in board["panels"][4]["panels"]] == ["0"]


def test_variables_choose_the_source_the_model_and_the_server() -> None:
    variables = BOARD["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "model_name", "instance"]
    assert '{model_name=~"$model_name"}' in variables[2]["query"]["query"]
    assert json.loads(format_dashboard()) == BOARD
