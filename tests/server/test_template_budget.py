from __future__ import annotations

from typing import Any

import pytest

from server.template_budget import (
    MAX_CHARACTERS,
    MAX_CPU_S,
    MAX_LOOP_STEPS,
    ChatTemplateError,
    RenderBudget,
    TemplateLimitError,
    check_format,
    check_operation,
    check_replace,
    check_value,
    measure,
)


class CpuClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_steps_are_counted_over_all_loops() -> None:
    budget = RenderBudget(CpuClock())
    for _ in range(2):
        assert sum(1 for _ in budget.count(range(MAX_LOOP_STEPS // 2))) == MAX_LOOP_STEPS // 2
    with pytest.raises(TemplateLimitError, match="loops too long"):
        next(budget.count([1]))


def test_time_is_looked_at_now_and_then_within_a_loop() -> None:
    clock = CpuClock()
    steps = RenderBudget(clock).count(range(MAX_LOOP_STEPS))
    next(steps)
    clock.now = MAX_CPU_S + 0.1
    with pytest.raises(TemplateLimitError, match="takes too long"):
        for _ in range(200):
            next(steps)


def test_a_limit_is_a_refusal_like_others() -> None:
    assert issubclass(TemplateLimitError, ChatTemplateError)


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("operator", "left", "right"),
    [
        ("*", "x", MAX_CHARACTERS + 1),
        ("*", MAX_CHARACTERS + 1, b"x"),
        ("*", [1], MAX_LOOP_STEPS + 1),
        ("*", 1 << 40_000, 1 << 40_000),
        ("**", 10, 10**9),
        ("**", 1 << 10_000, 10),
        ("**", 2, -(10**9)),
        ("+", "x" * MAX_CHARACTERS, "x"),
        ("+", [0] * MAX_LOOP_STEPS, [0]),
        ("%", "%999999999d", 1),
        ("%", "%99999999999999999999d", 1),
        ("%", "%*d", (10**9, 1)),
        ("%", "%s" * 1000, ("x" * 100_000,) * 1000),
        ("%", "%s", (nest(40),)),
    ],
    ids=lambda value: type(value).__name__,  # the values themselves are far too long
)
def test_operators_make_nothing_huge(operator: str, left: Any, right: Any) -> None:
    with pytest.raises(TemplateLimitError):
        check_operation(operator, left, right)


@pytest.mark.parametrize(
    ("operator", "left", "right"),
    [
        ("*", "ab", 1000),
        ("*", 3, 4.5),
        ("*", 2.5, 10**12),
        ("**", 2, 64),
        ("**", 2.0, 1000),
        ("+", 10**18, 10**18),
        ("+", "a", 1),
        ("+", [1], [2]),
        ("%", "%05.2f of %s", (1.5, "x")),
        ("%", 1_700_000_000, 60),
        ("%", "%d", 1_700_000_000),
    ],
)
def test_what_templates_do_is_left_alone(operator: str, left: Any, right: Any) -> None:
    check_operation(operator, left, right)


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("{:999999999}", ("x",)),
        ("{:{}}", ("x", 10**9)),
        ("{:>{w}}", ({"w": 10**9},)),
        ("{0}" * 10_000, ("x" * 10_000,)),
    ],
)
def test_formats_make_nothing_huge(pattern: str, values: tuple[Any, ...]) -> None:
    with pytest.raises(TemplateLimitError):
        check_format(pattern, *values)


def test_a_time_stamp_is_no_width() -> None:
    check_format("{} {:%d}", 1_700_000_000, "x")


def test_replacing_is_reckoned_by_the_places() -> None:
    check_replace("a" * 1000, "a", "b" * 1000)
    check_replace("a" * 100_000, "b", "x" * 100_000)
    check_replace("a" * 100_000, "a", "x" * 100_000, 3)
    for old in ("a", ""):
        with pytest.raises(TemplateLimitError):
            check_replace("a" * 100_000, old, "x" * 100_000)


def test_lists_within_lists_are_measured_by_what_they_stand_for() -> None:
    assert measure(["ab", ("c",), {"d": 5}, [[12]]]) == (4 + 1 + 1, 12)
    with pytest.raises(TemplateLimitError):
        check_value(nest(40))
    with pytest.raises(TemplateLimitError):
        check_value({"a": nest(40)}.items())
    assert check_value(nest(3)) == nest(3)
    assert check_value(None) is None
