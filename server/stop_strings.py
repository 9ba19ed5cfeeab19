"""Finds stop strings in text that arrives in pieces, holding back no more than might still become one.

Pure: knows no tokens, no requests, no clock.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Sequence

_NO_MATCH = -1


class StopStrings:
    """An automaton over all stop strings at once: one dictionary step a character, however many strings there are.

    A state is a prefix of some stop string: the longest one that the text seen so far ends with. Its length is
    exactly what must be held back. While the state is empty, a regular expression skips to the next character that
    begins any stop string.

    Source: Aho and Corasick, "Efficient string matching" (1975).

    Args:
        strings: None of them empty. Where two matches end at the same character the earlier in this list wins.

    Raises:
        ValueError: A string is empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise ValueError("a stop string must not be empty")
        self._strings = tuple(strings)
        self._next: list[dict[str, int]] = [{}]  # state -> character -> longer state
        self._depth = [0]  # state -> its length
        self._fail = [0]  # state -> the longest other state that it ends with
        self._match = [_NO_MATCH]  # state -> index of the first listed string that it ends with
        for index, string in enumerate(self._strings):
            self._add(string, index)
        self._link()
        starts = "".join(re.escape(char) for char in self._next[0])
        self._start_of_any = re.compile(f"[{starts}]") if starts else None
        self._state = 0
        self._held = ""

    @property
    def is_empty(self) -> bool:
        """There are none: every text goes through as it is."""
        return self._start_of_any is None

    def fork(self) -> StopStrings:
        """Return one for another text, at no cost: the automaton, large and never changed, is shared."""
        other = copy.copy(self)
        other._state, other._held = 0, ""
        return other

    def feed(self, text: str, *, is_exempt: bool = False) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            text: It may be empty.
            is_exempt: A stop string that ends in this piece is none; one that begins here may end in a later piece.

        Returns:
            What may be shown now, and the stop string that was found, or None. On a match the text ends right before
            it; whatever followed is gone, and nothing may be fed any more.
        """
        if self._start_of_any is None:
            return text, None
        end, index = self._scan(text, is_exempt=is_exempt)
        seen = self._held + text[:end]
        if index != _NO_MATCH:
            match = self._strings[index]
            self._held, self._state = "", 0
            return seen[: len(seen) - len(match)], match
        shown = len(seen) - self._depth[self._state]
        self._held = seen[shown:]
        return seen[:shown], None

    def flush(self) -> str:
        """Return what was held back: no more text will come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _scan(self, text: str, *, is_exempt: bool) -> tuple[int, int]:
        """Advance the state; return how much of ``text`` was read and the match that completes first."""
        assert self._start_of_any is not None
        state, position, length = self._state, 0, len(text)
        while position < length:
            if state == 0:
                start = self._start_of_any.search(text, position)
                if start is None:
                    break
                position = start.start()
            char = text[position]
            position += 1
            while state and char not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(char, 0)
            if self._match[state] != _NO_MATCH and not is_exempt:
                return position, self._match[state]
        self._state = state
        return length, _NO_MATCH

    def _add(self, string: str, index: int) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fail.append(0)
                self._match.append(_NO_MATCH)
            state = self._next[state][char]
        if self._match[state] == _NO_MATCH:
            self._match[state] = index

    def _link(self) -> None:
        """Set fail links breadth first, so that a state's shorter suffixes are done before it."""
        todo = deque(self._next[0].values())
        while todo:
            state = todo.popleft()
            todo.extend(self._next[state].values())
            self._inherit_match(state)
            for char, child in self._next[state].items():
                fail = self._fail[state]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)

    def _inherit_match(self, state: int) -> None:
        own, suffix = self._match[state], self._match[self._fail[state]]
        if own == _NO_MATCH or (suffix != _NO_MATCH and suffix < own):
            self._match[state] = suffix
