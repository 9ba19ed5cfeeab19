"""Flags as fields of a frozen dataclass: a field's metadata is its flag's only description. Knows no field.

The other half, ServerConfig, is config.py.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from engine_core import ConfigError
from server.flag_values import as_argparse_type, parse_bool, parse_bool_or_auto

ENV_PREFIX = "POINTSMAN_"


@dataclass(frozen=True, slots=True)
class Flag:
    """What a field's metadata holds: how its text is read and what it is for.

    A repeatable one may be given several times: its parser returns a tuple, and the tuples are joined.
    """

    parse: Callable[[str], Any]
    help: str
    metavar: str
    shown_default: str | None
    choices: tuple[str, ...]
    is_repeatable: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value: --x turns it on, --no-x off."""
        return self.parse in (parse_bool, parse_bool_or_auto)


def flag(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    *,
    metavar: str = "N",
    shown_default: str | None = None,
    choices: tuple[str, ...] = (),
    is_repeatable: bool = False,
) -> Any:
    """A field with its flag. ``shown_default``: what stands in the help where the default itself would say nothing."""
    metadata = {"flag": Flag(parse, help, metavar, shown_default, choices, is_repeatable)}
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(config: type) -> Iterator[tuple[dataclasses.Field[Any], Flag]]:
    """Yield the fields of a configuration with their flags, in order."""
    for field in dataclasses.fields(config):
        yield field, field.metadata["flag"]


def add_flags_of(config: type, parser: argparse.ArgumentParser, only: Container[str] | None = None) -> None:
    """Add one flag a field, and the positional MODEL. Flags that are not given leave no trace in the namespace.

    Args:
        config: Whose fields.
        parser: Of one command.
        only: Names of the fields that this command has flags for; None = all.
    """
    for field, flag in flags_of(config):
        if only is not None and field.name not in only:
            continue
        help = f"{flag.help} [default: {_shown_default(field, flag)}]".replace("%", "%%")
        if field.name == "model":
            parser.add_argument("model", nargs="?", metavar=flag.metavar, default=argparse.SUPPRESS, help=help)
        elif flag.is_switch:
            parser.add_argument(
                _flag_name(field), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help
            )
        else:
            parser.add_argument(
                _flag_name(field),
                action="extend" if flag.is_repeatable else "store",
                type=as_argparse_type(flag.parse),
                choices=flag.choices or None,
                metavar=None if flag.choices else flag.metavar,
                default=argparse.SUPPRESS,
                help=help,
            )


def build_flags_table(config: type) -> str:
    """Return the README's table of flags, in Markdown."""
    lines = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for field, flag in flags_of(config):
        name = f"`{flag.metavar}`" if field.name == "model" else f"`{_usage(field, flag)}`"
        variable = f"`{ENV_PREFIX}{field.name.upper()}`"
        lines.append(f"| {name} | {variable} | {_shown_default(field, flag)} | {flag.help} |")
    return "\n".join(lines) + "\n"


def parse_variable(variable: str, text: str, flag: Flag) -> Any:
    """Return the value that an environment variable gives a flag.

    Raises:
        ConfigError: The text is no value of it.
    """
    try:
        value = flag.parse(text)
    except ValueError as error:
        raise ConfigError(f"{variable} {error}") from None
    if flag.choices and value not in flag.choices:
        raise ConfigError(f"{variable} must be one of {', '.join(flag.choices)}, not {text!r}")
    return value


def _flag_name(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _usage(field: dataclasses.Field[Any], flag: Flag) -> str:
    name = _flag_name(field)
    if not flag.is_switch:
        return f"{name} {flag.metavar}"
    opposite = name.replace("--", "--no-", 1)
    if field.default is None:
        return f"{name} / {opposite}"
    return opposite if field.default else name


def _shown_default(field: dataclasses.Field[Any], flag: Flag) -> str:
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return flag.shown_default or str(field.default)
