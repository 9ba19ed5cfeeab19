"""Chat messages to prompt text, through the model's own Jinja template in a sandbox. Pure; knows no tokenizer.

A template comes with the weights, from anybody: it reaches no Python, changes no message, and cannot run away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError

from server.template_budget import MAX_CHARACTERS, RenderBudget, TemplateLimitError
from server.template_budget import ChatTemplateError as ChatTemplateError
from server.template_sandbox import BUDGET, add_limits, build_sandbox

# The longest that are known have 20,000 characters; compiling takes time, and more than in proportion.
_MAX_SOURCE_CHARACTERS = 1_000_000
_MAX_MESSAGE_CHARACTERS = 1_000
# Python's words for an object end in its place in memory, which is nobody's business.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


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
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise ChatTemplateError(f"The model's chat template has {len(source)} characters, too many for one.")
        environment = build_sandbox()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: clock().strftime(layout)
        try:
            tree = environment.parse(source)
            add_limits(tree)
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
            TemplateLimitError: It takes too long, or builds too much.
        """
        variables = {
            **self._tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            BUDGET: RenderBudget(),
        }
        try:
            return "".join(_within_limit(self._template.generate(variables)))
        except ChatTemplateError:
            raise
        # Whatever a template does wrong with unforeseen messages: TypeError, KeyError, RecursionError ...
        except Exception as error:
            reason = _ADDRESS.sub("", str(error)[:_MAX_MESSAGE_CHARACTERS])
            raise ChatTemplateError(f"The model's chat template cannot render these messages: {reason}.") from error


def _within_limit(pieces: Iterable[str]) -> Iterator[str]:
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > MAX_CHARACTERS:
            raise TemplateLimitError("The model's chat template makes these messages too long; send fewer.")
        yield piece


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(str(message)[:_MAX_MESSAGE_CHARACTERS])
