"""Chat messages to prompt text, through the model's own Jinja template in a sandbox. Pure; knows no tokenizer.

A template comes with the weights, from anybody: it reaches no Python, changes no message, and cannot run away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Far above what any prompt needs, far below what hurts.
MAX_CHARACTERS = 32 * 1024 * 1024
MAX_LOOP_STEPS = 1_000_000
_MAX_EXPONENT = 64
_LOOP_BUDGET = "_loop_budget"


class ChatTemplateError(ValueError):
    """The template is broken, or refuses these messages. The message is a sentence for the client."""


class ChatTemplate:
    """A compiled chat template; may be used from several threads.

    Args:
        source: Jinja, as tokenizer_config.json or the GGUF holds it.
        bos_token: What the template knows as ``bos_token``; None = empty.
        eos_token: Likewise ``eos_token``.
        clock: Gives ``strftime_now`` its time.

    Raises:
        ChatTemplateError: The source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = _build_environment(clock)
        try:
            tree = environment.parse(source)
            _count_loop_steps(tree)
            code = environment.compile(tree)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            place = "" if line is None else f" (line {line})"
            raise ChatTemplateError(f"The model's chat template is not valid Jinja{place}: {error}.") from error
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return the prompt's text, special tokens included: encode it without adding them again.

        Args:
            messages: Each with ``role`` and ``content``, as the client sent them.
            add_generation_prompt: End with the opening of the assistant's turn.

        Raises:
            ChatTemplateError: The template refuses the messages, or fails on them.
        """
        variables = {
            **self._tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            _LOOP_BUDGET: _LoopBudget(),
        }
        try:
            return "".join(_within_limit(self._template.generate(variables)))
        except ChatTemplateError:
            raise
        # Whatever a template does wrong with unforeseen messages: TypeError, KeyError, RecursionError ...
        except Exception as error:
            raise ChatTemplateError(f"The model's chat template cannot render these messages: {error}.") from error


class _LoopBudget:
    def __init__(self) -> None:
        self._num_left = MAX_LOOP_STEPS

    def count(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self._num_left -= 1
            if self._num_left < 0:
                raise ChatTemplateError("The model's chat template loops too long on these messages; send fewer.")
            yield item


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with operators that can make a huge value out of two small ones held back."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > MAX_CHARACTERS:
            raise ChatTemplateError("The model's chat template builds too large a value from these messages.")
        return super().call_binop(context, operator, left, right)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that Python gives a meaning to."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template may not set {name}")
        super().__setitem__(name, value)


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a model is trained on; its content is plain text here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _build_environment(clock: Callable[[], datetime]) -> _Sandbox:
    # The settings that templates are written for. Source: transformers, utils/chat_template_utils.py.
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
    environment.filters["tojson"] = _to_json
    environment.filters[_LOOP_BUDGET] = _count_steps
    environment.globals["namespace"] = _TemplateNamespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: clock().strftime(layout)
    return environment


def _count_loop_steps(tree: nodes.Template) -> None:
    """Pass what every ``for`` walks through the render's budget. Jinja alone bounds range(), not nested loops."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, _LOOP_BUDGET, [], [], None, None).set_lineno(loop.lineno)


@pass_context
def _count_steps(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    budget: _LoopBudget = context.parent[_LOOP_BUDGET]
    return budget.count(iterable)


def _result_size(operator: str, left: Any, right: Any) -> int:
    if operator == "**":
        return MAX_CHARACTERS + 1 if isinstance(right, int) and abs(right) > _MAX_EXPONENT else 0
    sizes = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
    if operator == "+":
        return sum(sizes)
    factors = [value for value in (left, right) if isinstance(value, int)]
    return sizes[0] * factors[0] if sizes and factors else 0


def _within_limit(pieces: Iterable[str]) -> Iterator[str]:
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > MAX_CHARACTERS:
            raise ChatTemplateError("The model's chat template makes these messages too long; send fewer.")
        yield piece


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which a model has never seen escaped.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(str(message))
