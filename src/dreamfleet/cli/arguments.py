"""Options of commands: from a function's signature or a configuration, to values and to help.

argparse splits the words. What a word may be is judged by `dreamfleet.settings`, so that the
command line and Python refuse the same value with the same sentence.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.settings import (
    Setting,
    closest_setting,
    convert,
    describe,
    is_under,
    read,
    settings,
    switchable_groups,
)

_MAX_WIDTH = 100
_REQUIRED = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Option(Setting):
    """One option, or one positional argument. Its value is its default."""

    positional: bool = False

    @property
    def flag(self) -> str:
        """What is typed: --train-ratio, or LOGDIR."""
        label = self.path.replace("_", "-")
        return label.upper() if self.positional else f"--{label}"

    @property
    def negation(self) -> str:
        """What switches it off: --replay.no-online."""
        group, dot, label = self.flag.removeprefix("--").rpartition(".")
        return f"--{group}{dot}no-{label}"

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value: --greedy, and --no-greedy."""
        return _bare(self.type) is bool

    @property
    def takes_several(self) -> bool:
        """Whether it takes several words."""
        inner = [_bare(each) for each in (_bare(self.type), *typing.get_args(_bare(self.type)))]
        return any(each is dict or typing.get_origin(each) in (tuple, dict) for each in inner)


def function_options(function: Callable[..., Any]) -> list[Option]:
    """The options of a command: the parameters of its function. A parameter `**settings:
    Annotated[Any, mark]` stands for the settings of a run that have this mark."""
    hints = typing.get_type_hints(function, include_extras=True)
    _, _, arguments = (inspect.getdoc(function) or "").partition("\nArgs:")
    entries = re.split(r"\n    (?=\w+: )", arguments.split("\n\n")[0])[1:]
    helps = {name.strip(): " ".join(text.split()) for name, _, text in
             (entry.partition(": ") for entry in entries)}  # fmt: skip
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (mark,) = hints[name].__metadata__
            marked = [each for each in run_options(RunConfig()) if mark in each.marks]
            found += [dataclasses.replace(each, value=None) for each in marked]
            continue
        positional = parameter.kind is parameter.POSITIONAL_ONLY
        found.append(
            Option(name, hints[name], parameter.default, helps.get(name, ""), positional=positional)
        )
    return found


def setting_options(config: Any, prefix: str = "") -> list[Option]:
    """An option for each setting of a configuration, and for each group that can be chosen by a
    name."""
    groups = switchable_groups(config, prefix)
    found = [Option(**vars(setting)) for setting in settings(config, prefix)]
    return found + [Option(group.path, str, None, group.help) for group in groups]


def run_options(config: RunConfig) -> list[Option]:
    """The options of the settings that every run has."""
    return [each for each in setting_options(config) if not is_under(each.path, ["agent_config"])]


def call(command: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Run a command's function with what was typed.

    Raises:
        ConfigError: An option does not exist, or its value does not fit.
    """
    options = function_options(function)
    values = parse(options, arguments)
    for option in options:
        if option.path in values:
            value = values[option.path]
            values[option.path] = convert(option.flag, value, option.type)
        elif option.value is _REQUIRED:
            raise ConfigError(f"{option.flag} is missing. See 'dreamfleet {command} --help'.")
    places = [values.pop(o.path) for o in options if o.positional and o.path in values]
    function(*places, **values)


def parse(
    options: Sequence[Option], arguments: Sequence[str], others: Sequence[Option] = ()
) -> dict[str, Any]:
    """The values of the options that were typed; options of the command that were parsed before
    are `others`.

    Raises:
        ConfigError: An option does not exist, or has no value.
    """
    values, rest = parse_known(options, arguments)
    if rest:
        raise _unknown_option(rest[0], [*others, *options])
    return values


def parse_known(
    options: Sequence[Option], arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The values of the options that were typed, and the words that belong to none of them.

    Raises:
        ConfigError: An option has no value.
    """
    parser = argparse.ArgumentParser(
        usage="",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
    )
    parser._negative_number_matcher = re.compile(r"-[\d.]")  # also -1e5, which is a number too
    for option in options:
        if option.positional:
            parser.add_argument(option.path, nargs="*" if option.takes_several else "?")
        elif option.is_switch:
            for flag, value in ((option.flag, True), (option.negation, False)):
                parser.add_argument(flag, dest=option.path, action="store_const", const=value)
        else:
            nargs = "+" if option.takes_several else 1
            parser.add_argument(option.flag, dest=option.path, nargs=nargs)
    try:
        found, rest = parser.parse_known_intermixed_args([_with_dashes(each) for each in arguments])
    except argparse.ArgumentError as error:
        (option,) = (o for o in options if error.argument_name in (o.flag, o.negation))
        if option.is_switch:
            raise ConfigError(f"{error.argument_name} takes no value.") from None
        raise ConfigError(f"{option.flag} needs a value: {describe(option.type)}.") from None
    values = vars(found)
    for option in options:
        if option.path in values and not option.is_switch:
            words = values[option.path]
            words = [words] if isinstance(words, str) else words
            values[option.path] = read(words, option.type)
    return values, rest


def help_of(
    command: str,
    summary: str,
    groups: Mapping[str, Sequence[Option]],
    *,
    examples: Iterable[tuple[str, str]] = (),
    footer: str = "",
) -> RenderableType:
    """The help of a command: what it does, its options by the titles of their groups, examples."""
    places = [o for members in groups.values() for o in members if o.positional]
    words = [o.flag + (" ..." if o.takes_several else "") for o in places]
    shown = [w if o.value is _REQUIRED else f"[{w}]" for o, w in zip(places, words, strict=True)]
    usage = " ".join(["usage: dreamfleet", command, *shown, "[OPTIONS]"])
    parts: list[RenderableType] = [Text(usage), Text(), Text(summary), Text()]
    for title, members in groups.items():
        if members:
            parts += [Text(title, style="bold"), _rows(members), Text()]
    if footer:
        parts += [Text(footer), Text()]
    table = Table.grid(padding=(0, 3))
    # Of a command to be copied nothing may be cut off; what is said about it may wrap.
    table.add_column(no_wrap=True)
    for line, text in examples:
        table.add_row(Text(f"dreamfleet {line}"), Text(text, style="dim"))
    if table.rows:
        parts += [Text("examples", style="bold"), Padding(table, (0, 0, 0, 2), expand=False)]
    return Constrain(Group(*parts), _MAX_WIDTH)


def function_help(
    command: str, function: Callable[..., Any], examples: Iterable[tuple[str, str]]
) -> RenderableType:
    """The help of a command that is a function."""
    options = function_options(function)
    groups = {
        "arguments": [option for option in options if option.positional],
        "options": [option for option in options if not option.positional],
    }
    return help_of(command, summary_of(function), groups, examples=examples)


def summary_of(function: Callable[..., Any]) -> str:
    """What a docstring says before it comes to the arguments."""
    return (inspect.getdoc(function) or "").split("\nArgs:")[0].strip()


def _with_dashes(word: str) -> str:
    """A flag that was typed with underscores, as settings have them."""
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def _unknown_option(word: str, options: Sequence[Option]) -> ConfigError:
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return ConfigError(f"Unexpected argument {word!r}. See --help.")
    for option in options:
        if option.positional and flag == f"--{option.path}":
            return ConfigError(f"Give {option.flag} as a plain argument, without {flag}.")
    flags = {option.path: option.flag for option in options if not option.positional}
    close = closest_setting(flag, flags)
    hint = f"Did you mean {flags[close]}?" if close else "See --help."
    return ConfigError(f"There is no option {flag}. {hint}")


def _rows(options: Sequence[Option]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=30, max_width=44)
    for option in options:
        text, default = Text(option.help), option.value
        empty: tuple[Any, ...] = (_REQUIRED, None, (), "", False, {})
        if default not in empty:
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
            if default is True:
                shown = "on"
            elif isinstance(default, dict):
                shown = " ".join(f"{name}={value}" for name, value in default.items())
            text.append(f" ({shown})", style="dim")
        typed = option.flag
        if option.is_switch:
            typed += f", {option.negation}" if default else ""
        elif not option.positional:
            typed += f" {_metavar(option.type)}"
        table.add_row(Text(typed, style="cyan"), text)
    return Padding(table, (0, 0, 0, 2), expand=False)


def _bare(kind: Any) -> Any:
    """A type without its range."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _metavar(kind: Any) -> str:
    """A type in the help: INT, NUMBER, TEXT, PATH or the choices."""
    kind = _bare(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_metavar(each) for each in inner if each is not type(None))
    if origin is typing.Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin is tuple:
        # The help says which names there are.
        named = typing.get_origin(inner[0]) is typing.Literal
        return f"{'NAME' if named else _metavar(inner[0])} ..."
    if origin is dict or kind is dict:
        return "NAME=VALUE ..."
    return {int: "INT", float: "NUMBER", str: "TEXT", bool: "", Path: "PATH"}.get(kind, "VALUE")
