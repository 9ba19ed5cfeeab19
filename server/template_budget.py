"""What one render of a chat template may cost: loop steps, CPU time, the size of whatever it builds. Knows no Jinja.

A size is reckoned before the thing is built: one call of C code can neither be watched nor be stopped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

# Far above what any prompt needs, far below what hurts.
MAX_CHARACTERS = 32 * 1024 * 1024
MAX_LOOP_STEPS = 1_000_000
# Of all that a render makes, kept or not: the largest body, passed through a dozen filters.
MAX_MADE_CHARACTERS = 8 * MAX_CHARACTERS
# Of its thread, which other work does not make longer. The largest body with the most messages takes a third of it.
MAX_CPU_S = 2.0
_STEPS_A_LOOK = 128
# The largest body's messages have 250,000 keys and values; each takes half a microsecond.
_MAX_MEASURED = 400_000
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_MAX_INT_BITS = 1 << 16
_NUMBER = re.compile(r"\d+")
_LONGEST_NUMBER = 9
# A width that is not written down, but comes from a value.
_DYNAMIC_WIDTH = re.compile(r":[^{}]*\{|%[^%a-zA-Z]*\*")


class ChatTemplateError(ValueError):
    """The template is broken, or refuses these messages. The message is a sentence for the client."""


class TemplateLimitError(ChatTemplateError):
    """The template takes too long or builds too much. It would with other messages, too: it is not their fault."""


class RenderBudget:
    """One render's.

    Args:
        cpu_clock: CPU time of the calling thread, in seconds.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self._cpu_clock = cpu_clock
        self._end_time = cpu_clock() + MAX_CPU_S
        self._num_steps = 0
        self._num_made = 0

    def count(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Yield what a loop walks through; each item is a step."""
        for item in iterable:
            self._num_steps += 1
            if self._num_steps > MAX_LOOP_STEPS:
                raise TemplateLimitError("The model's chat template loops too long on these messages; send fewer.")
            if self._num_steps % _STEPS_A_LOOK == 0:
                self.check_time()
            yield item

    def take_result(self, result: Any) -> Any:
        """Return what an operator, call or filter has made, counted by its size; what it makes later is steps."""
        if isinstance(result, str | bytes):
            check_size(len(result))
        elif isinstance(result, list | tuple):
            check_items(len(result))
        elif isinstance(result, Iterator):
            return self.count(result)
        else:
            return result
        self._num_made += len(result)
        if self._num_made > MAX_MADE_CHARACTERS:
            raise TemplateLimitError("The model's chat template makes too much of these messages; send fewer.")
        return result

    def check_time(self) -> None:
        """Raise once the time is up."""
        if self._cpu_clock() > self._end_time:
            raise TemplateLimitError("The model's chat template takes too long on these messages; send fewer.")


def check_size(num_characters: float) -> None:
    """Raise where a text would get too long."""
    if num_characters > MAX_CHARACTERS:
        raise TemplateLimitError("The model's chat template builds too large a value from these messages.")


def check_items(num_items: float) -> None:
    """Raise where a list would get too long."""
    if num_items > MAX_LOOP_STEPS:
        raise TemplateLimitError("The model's chat template builds too large a value from these messages.")


def check_value(value: Any) -> Any:
    """Return a value that may be turned into text. Lists within lists can stand for far more than they take."""
    if isinstance(value, (dict, *_CONTAINERS)):
        measure(value)
    elif isinstance(value, str | bytes):
        check_size(len(value))
    return value


def measure(*values: Any) -> tuple[int, int]:
    """Return how much text values come to, about, and the largest whole number among them.

    Raises:
        TemplateLimitError: They come to too much.
    """
    num_characters = largest = num_seen = 0
    stack = list(values)
    while stack:
        value = stack.pop()
        num_seen += 1
        if isinstance(value, str | bytes):
            num_characters += len(value)
        elif isinstance(value, int):
            largest = max(largest, abs(value))
            num_characters += value.bit_length() // 3
        elif isinstance(value, Mapping):
            stack += value.keys()
            stack += value.values()
        elif isinstance(value, _CONTAINERS):
            stack += value
        if num_characters > MAX_CHARACTERS or num_seen + len(stack) > _MAX_MEASURED:
            raise TemplateLimitError("The model's chat template builds too large a value from these messages.")
    return num_characters, largest


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise where an operator would make something huge of two small things."""
    if isinstance(left, int) and isinstance(right, int):
        num_bits = 0
        if operator == "*":
            num_bits = left.bit_length() + right.bit_length()
        elif operator == "**":
            num_bits = max(left.bit_length(), 1) * abs(right)
        check_size(MAX_CHARACTERS + 1 if num_bits > _MAX_INT_BITS else 0)
    elif operator == "%" and isinstance(left, str | bytes):
        check_format(str(left), right)
    elif operator == "+":
        _check_length(left, sum(len(value) for value in (left, right) if _has_length(value)))
    elif operator == "*":
        count, sequence = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(count, int) and _has_length(sequence):
            _check_length(sequence, len(sequence) * count)


def _has_length(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _check_length(like: Any, length: int) -> None:
    if isinstance(like, str | bytes):
        check_size(length)
    else:
        check_items(length)


def check_format(pattern: str, *values: Any) -> None:
    """Raise where a pattern for ``%`` or ``format`` would fill in too much."""
    widths = sum(int(each) if len(each) <= _LONGEST_NUMBER else MAX_CHARACTERS + 1 for each in _NUMBER.findall(pattern))
    num_characters, largest = measure(*values)
    if _DYNAMIC_WIDTH.search(pattern):
        num_characters += largest
    check_size(widths + len(pattern) + (pattern.count("%") + pattern.count("{")) * num_characters)


def check_replace(text: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    """Raise where replacing would make a text too long."""
    text, old, new = str(text), str(old), str(new)
    num_places = text.count(old) if old else len(text) + 1
    if isinstance(count, int) and count >= 0:
        num_places = min(num_places, count)
    check_size(len(text) + num_places * len(new))


def check_join(separator: Any, items: list[Any]) -> None:
    """Raise where joining would make a text too long."""
    check_size(measure(items)[0] + len(str(separator)) * len(items))
