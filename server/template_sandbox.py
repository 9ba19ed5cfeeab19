"""Jinja's sandbox for templates that come from anybody, with limits on its operators, calls and filters.

No template, however it is written, reaches Python or changes a message; what one render may cost is template_budget's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from server.template_budget import (
    RenderBudget,
    check_format,
    check_items,
    check_join,
    check_operation,
    check_replace,
    check_size,
    check_value,
)

# The name under which a render finds its budget. No template can spell it: a variable's name has no space.
BUDGET = "render budget"
_COUNTED, _JOINED, _CHECKED = "_counted", "_joined", "_checked"
_MAX_INDENT = 16
# What no chat needs, and what takes long on texts that it is not made for.
_UNWANTED_FILTERS = ("urlize", "pprint", "random")
_UNWANTED_GLOBALS = ("lipsum",)


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a budget."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return budget_of(context).take_result(super().call_binop(context, operator, left, right))

    # Positional only: a macro may have a parameter of any name.
    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.check_time()
        args = _check_call(context, function, args, kwargs)
        return budget.take_result(super().call(context, function, *args, **kwargs))


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that Python gives a meaning to."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template may not set {name}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # what it holds may be far longer than anybody wants


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a model is trained on; its content is plain text here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def build_sandbox() -> Sandbox:
    """Return an environment with the settings that templates are written for.

    Source: transformers, utils/chat_template_utils.py.
    """
    sandbox = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, LoopControlExtension],
        finalize=check_value,
    )
    for name in _UNWANTED_FILTERS:
        del sandbox.filters[name]
    for name in _UNWANTED_GLOBALS:
        del sandbox.globals[name]
    sandbox.filters["tojson"] = _to_json
    sandbox.filters[_CHECKED] = lambda value: value
    sandbox.filters.update({name: _guard(name, function) for name, function in sandbox.filters.items()})
    sandbox.filters["join"] = _guard_join(sandbox.filters["join"])
    sandbox.filters[_COUNTED] = _count_steps
    sandbox.filters[_JOINED] = _join_texts
    sandbox.globals["namespace"] = _TemplateNamespace
    return sandbox


def add_limits(tree: nodes.Template) -> None:
    """Have a template's own constructs pass through its budget: what loops walk through, ``~``, and captured blocks."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filter(_COUNTED, loop.iter, loop.lineno)
    for block in list(tree.find_all(nodes.AssignBlock)):
        block.filter = _filter(_CHECKED, block.filter, block.lineno)
    _replace_concats(tree)


def budget_of(context: Context) -> RenderBudget:
    """Return the budget of a render."""
    budget: RenderBudget = context.parent[BUDGET]
    return budget


def _filter(name: str, node: nodes.Node | None, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


def _replace_concats(node: nodes.Node) -> None:
    for child in list(node.iter_child_nodes()):
        _replace_concats(child)
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, field, _join_node(value))
        elif isinstance(value, list):
            value[:] = [_join_node(each) if isinstance(each, nodes.Concat) else each for each in value]


def _join_node(concat: nodes.Concat) -> nodes.Filter:
    return _filter(_JOINED, nodes.List(concat.nodes, lineno=concat.lineno), concat.lineno)


# ---------------------------------------------------------------------- filters
@pass_context
def _count_steps(context: Context, iterable: Any) -> Iterator[Any]:
    return budget_of(context).count(iterable)


@pass_context
def _join_texts(context: Context, items: list[Any]) -> str:
    budget_of(context).check_time()
    check_join("", items)
    text: str = budget_of(context).take_result("".join(map(str, items)))
    return text


def _guard(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that looks at what it is given and at what it returns."""
    check_arguments = _FILTER_CHECKS.get(name)

    @pass_context
    @functools.wraps(function)
    def guarded(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.check_time()
        if check_arguments is not None:
            check_arguments(value, *args, **kwargs)
        return budget.take_result(function(*_first_argument(context, function), value, *args, **kwargs))

    return guarded


def _guard_join(guarded_join: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def join(context: Context, value: Any, /, d: Any = "", attribute: Any = None) -> Any:
        items = list(budget_of(context).count(value))
        if attribute is not None:
            items = list(map(make_attrgetter(context.environment, attribute), items))
        check_join(d, items)
        return guarded_join(context, items, d)

    return join


def _first_argument(context: Context, function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return what a filter wants before its value, by the mark that Jinja's decorators leave."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    given = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
    return () if wanted is None else (given[wanted],)


def _check_indent(text: Any, width: Any = 4, *args: Any, **kwargs: Any) -> None:
    check_size((str(text).count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))


def _check_wordwrap(
    text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *args: Any, **kwargs: Any
) -> None:
    check_size(len(str(text)) * (1 + len(wrapstring or "")))


def _check_width(value: Any, width: Any = 0, *args: Any, **kwargs: Any) -> None:
    check_size(width if isinstance(width, int) else 0)


def _check_parts(value: Any, linecount: Any = 0, *args: Any, **kwargs: Any) -> None:
    count = kwargs.get("slices", linecount)
    check_items(count if isinstance(count, int) else 0)


def _check_s_replace(s: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    check_replace(s, old, new, count)


def _check_pattern(value: Any, *args: Any, **kwargs: Any) -> None:
    check_format(str(value), *args, kwargs)


def _check_text(value: Any, *args: Any, **kwargs: Any) -> None:
    check_value(value)


_FILTER_CHECKS: Mapping[str, Callable[..., None]] = {
    "batch": _check_parts,
    "center": _check_width,
    "format": _check_pattern,
    "indent": _check_indent,
    "replace": _check_s_replace,
    "slice": _check_parts,
    "wordwrap": _check_wordwrap,
    # These turn whatever it is into text.
    **dict.fromkeys(("string", "upper", "lower", "title", "capitalize", "trim", "striptags", "wordcount"), _check_text),
    **dict.fromkeys(("e", "escape", "forceescape", "safe", "urlencode", "xmlattr", "tojson", "truncate"), _check_text),
}


# ---------------------------------------------------------------------- methods
def _check_call(context: Context, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Look at a call of a method of a text or number; return its arguments, a lazy one of them walked through."""
    method = getattr(function, "__wrapped__", function)
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(owner, str | bytes | int):
        return args
    if name == "join" and args:
        items = list(budget_of(context).count(args[0]))
        check_join(owner, items)
        return (items, *args[1:])
    if name == "replace":
        check_replace(owner, *args[:3])
    elif name in ("format", "format_map"):
        check_format(str(owner), *args, kwargs)
    elif name == "translate":
        check_size(len(str(owner)) * (1 + max((len(str(each)) for each in _values(args)), default=0)))
    elif name == "expandtabs":
        check_size(
            str(owner).count("\t") * max((each for each in (*args, *kwargs.values()) if _is_int(each)), default=8)
        )
    else:
        for each in (*args, *kwargs.values()):
            check_size(abs(each) if _is_int(each) and name not in _PLACES else 0)
    return args


# Their numbers are places and counts, not widths.
_PLACES = frozenset({"find", "rfind", "index", "rindex", "count", "startswith", "endswith", "split", "rsplit"})


def _is_int(value: Any) -> bool:
    return isinstance(value, int)


def _values(args: tuple[Any, ...]) -> list[Any]:
    return [value for each in args if isinstance(each, Mapping) for value in each.values()]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which a model has never seen escaped.
    widths = (indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ()))
    if max(widths) > _MAX_INDENT:
        raise SecurityError(f"a chat template may not indent or separate by more than {_MAX_INDENT} characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
