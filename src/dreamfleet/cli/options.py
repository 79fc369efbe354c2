"""What a command's options are, read from its function: for help and for suggestions."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dreamfleet.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """One option, or one positional argument."""

    name: str
    """The parameter's."""
    flag: str
    """As it is typed: --train-ratio, or LOGDIR."""
    values: str
    """What may follow it."""
    default: Any
    sentence: str
    positional: bool


def options_of(function: Callable[..., Any]) -> list[Option]:
    """The options of a command, in order."""
    hints = typing.get_type_hints(function, include_extras=True)
    sentences = dict(_sentences(inspect.getdoc(function) or ""))
    result = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, extras = hints[name], []
        if typing.get_origin(kind) is typing.Annotated:
            kind, *extras = typing.get_args(kind)
        positional = parameter.kind is parameter.POSITIONAL_ONLY
        told = next((e.name for e in extras if getattr(e, "name", None)), None)
        label = (told or name).replace("_", "-")
        flag = label.upper() if positional else f"--{label}"
        values = "..." if positional and "tuple" in str(kind) else _values(kind)
        result.append(
            Option(name, flag, values, parameter.default, sentences.get(name, ""), positional)
        )
    return result


def summary_of(function: Callable[..., Any]) -> str:
    """What a command's docstring says before it comes to the options."""
    return (inspect.getdoc(function) or "").split("\nArgs:")[0].strip()


def check_flags(function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Refuse an option that does not exist, and name the one that was meant.

    Raises:
        ConfigError: There is no such option.
    """
    known = {"--help"}
    for option in options_of(function):
        known.add(option.flag)
        if isinstance(option.default, bool):
            known.add(f"--no-{option.flag.removeprefix('--')}")
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in known:
            continue
        close = difflib.get_close_matches(flag, known, n=1)
        hint = f"Did you mean {close[0]}?" if close else "See --help."
        raise ConfigError(f"There is no option {flag}. {hint}")


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; values are JSON where they can be, and text otherwise.

    Raises:
        ConfigError: One is no pair.
    """
    return dict(_setting(text) for text in texts)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"Write options as NAME=VALUE, not {text!r}.")
    try:
        parsed = json.loads(value)
    except ValueError:
        return name, value
    return name, tuple(parsed) if isinstance(parsed, list) else parsed


def _sentences(documentation: str) -> Iterator[tuple[str, str]]:
    """The entries of a docstring's `Args:`."""
    _, _, arguments = documentation.partition("\nArgs:")
    entries = re.split(r"\n    (?=\w+: )", arguments.split("\n\n")[0])
    for entry in entries[1:]:
        name, _, words = entry.partition(": ")
        yield name.strip(), " ".join(words.split())


def _values(kind: Any) -> str:
    """A type, for a person: INT, NUMBER, TEXT, PATH or the choices."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_values(each) for each in inner if each is not type(None))
    if origin is typing.Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin is tuple:
        return f"{_values(inner[0])} ..."
    names = {int: "INT", float: "NUMBER", str: "TEXT", bool: ""}
    return names.get(kind, "PATH")
