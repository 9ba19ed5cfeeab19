import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.stop_strings import StopStrings


def find_at_once(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the match that completes earliest, ties by list order."""
    hits = [(text.find(stop) + len(stop), order, stop) for order, stop in enumerate(stops) if stop in text]
    if not hits:
        return text, None
    end, _, stop = min(hits)
    return text[: end - len(stop)], stop


def feed_all(finder: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        text, match = finder.feed(piece)
        shown += text
        if match is not None:
            return shown, match
    return shown + finder.flush(), None


small_text = st.text(alphabet="abé]", max_size=30)
small_stops = st.lists(st.text(alphabet="abé]", min_size=1, max_size=5), max_size=5)


@given(pieces=st.lists(small_text, max_size=8), stops=small_stops)
@example(pieces=["a", "ab"], stops=["aab", "ab", "b"])
@example(pieces=["xab"], stops=["b", "ab"])
@example(pieces=["xab"], stops=["ab", "b"])
@example(pieces=["abab", "abc"], stops=["ababc"])
def test_any_chunking_equals_one_search_over_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    assert feed_all(StopStrings(stops), pieces) == find_at_once("".join(pieces), stops)


@given(pieces=st.lists(small_text, max_size=8), stops=small_stops)
def test_only_the_longest_possible_beginning_of_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    finder, shown, seen = StopStrings(stops), "", ""
    for piece in pieces:
        text, match = finder.feed(piece)
        shown, seen = shown + text, seen + piece
        if match is not None:
            return
        prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((len(prefix) for prefix in prefixes if seen.endswith(prefix)), default=0)
        assert shown == seen[: len(seen) - longest]


def test_text_after_a_match_is_dropped() -> None:
    assert StopStrings(["\n\n"]).feed("one\n\ntwo") == ("one", "\n\n")


def test_flush_gives_back_an_unfinished_beginning_once() -> None:
    finder = StopStrings(["###"])
    assert finder.feed("a##") == ("a", None)
    assert finder.flush() == "##"
    assert finder.flush() == ""


def test_no_stop_strings_passes_everything_through() -> None:
    finder = StopStrings([])
    assert finder.feed("anything") == ("anything", None)
    assert finder.flush() == ""


def test_characters_that_mean_something_in_regular_expressions_are_plain() -> None:
    assert feed_all(StopStrings(["^-]", "\\d"]), ["a1", "-^", "-]z"]) == ("a1-", "^-]")


def test_a_fork_shares_the_automaton_but_not_the_text() -> None:
    finder = StopStrings(["abc"])
    assert finder.feed("xab") == ("x", None)
    fork = finder.fork()
    assert fork.feed("cab") == ("c", None)
    assert fork.feed("c") == ("", "abc")
    assert finder.feed("c") == ("", "abc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["ok", ""])


def test_a_thousand_stop_strings_cost_one_step_a_character() -> None:
    stops = [f"stop number {i}!" for i in range(1000)]
    finder = StopStrings(stops)
    text = "stop number 12, stop numbers, stopping " * 250
    started = time.process_time()
    shown, match = feed_all(finder, [*list(text), "stop number 999!"])
    assert (shown, match) == (text, "stop number 999!")
    assert time.process_time() - started < 2.0  # a search a string and character takes far longer


def test_a_piece_is_found_inside_self_similar_text() -> None:
    assert feed_all(StopStrings(["a" * 50 + "b"]), ["a" * 5000, "b"]) == ("a" * 4950, "a" * 50 + "b")
