"""Options of commands: from a function's signature or a configuration, to values and to help.

argparse splits the words. What a word may be is judged by `dreamfleet.settings`, so that the
command line and Python refuse the same value with the same sentence.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.settings import (
    Section,
    Setting,
    closest_setting,
    convert,
    describe,
    is_under,
    read,
    settings,
    switchable_groups,
    type_info,
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
        return type_info(self.type).base is bool

    @property
    def takes_several(self) -> bool:
        """Whether it takes several words."""
        return type_info(self.type).base in (tuple, dict)


def function_options(function: Callable[..., Any]) -> list[Option]:
    """The options of a command: the parameters of its function. A parameter `**settings:
    Annotated[Any, mark]` stands for the settings of a run that have this mark."""
    hints = typing.get_type_hints(function, include_extras=True)
    _, _, arguments = (inspect.getdoc(function) or "").partition("\nArgs:")
    helps = dict(re.findall(r"\n    (\w+): (.*?)(?=\n    \w|\n\n|$)", arguments, re.DOTALL))
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (mark,) = hints[name].__metadata__
            marked = [each for each in run_options(RunConfig()) if mark in each.marks]
            found += [dataclasses.replace(o, value=None, marks=frozenset()) for o in marked]
            continue
        text = " ".join(helps.get(name, "").split())
        positional = parameter.kind is parameter.POSITIONAL_ONLY
        found.append(Option(name, hints[name], parameter.default, text, positional=positional))
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
            values[option.path] = convert(option.flag, values[option.path], option.type)
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
    if not rest:
        return values
    flag = rest[0].partition("=")[0]
    if not flag.startswith("-"):
        raise ConfigError(f"Unexpected argument {rest[0]!r}. See --help.")
    flags = {option.path: option.flag for option in (*others, *options)}
    close = closest_setting(flag, flags)
    hint = f"Did you mean {flags[close]}?" if close else "See --help."
    raise ConfigError(f"There is no option {flag}. {hint}")


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
            values[option.path] = read([words] if isinstance(words, str) else words, option.type)
    return values, rest


def _with_dashes(word: str) -> str:
    """A flag that was typed with underscores, as settings have them."""
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


# --- help ----------------------------------------------------------------------------------------


def help_of(
    command: str,
    function: Callable[..., Any],
    options: Sequence[Option],
    examples: Iterable[tuple[str, str]],
    *,
    everything: bool,
) -> RenderableType:
    """The help of a command: what it does, its options, and examples.

    Of the settings of a run only those of a section are shown, unless everything is asked for.
    """
    groups: dict[str, list[Option]] = {"arguments": []}
    others: dict[str, list[Option]] = {}
    settings_of_run = any(isinstance(mark, Section) for o in options for mark in o.marks)
    for option in options:
        titles = [mark.title for mark in option.marks if isinstance(mark, Section)]
        if option.positional:
            groups["arguments"].append(option)
        elif titles or not settings_of_run:
            groups.setdefault(titles[0] if titles else "options", []).append(option)
        else:
            group = option.path.rpartition(".")[0] or "other settings of the run"
            others.setdefault(group, []).append(option)
    places = groups["arguments"]
    words = [o.flag + (" ..." if o.takes_several else "") for o in places]
    shown = [w if o.value is _REQUIRED else f"[{w}]" for o, w in zip(places, words, strict=True)]
    usage = " ".join(["usage: dreamfleet", command, *shown, "[OPTIONS]"])
    parts: list[RenderableType] = [Text(usage), Text(), Text(summary_of(function)), Text()]
    for title, members in {**groups, **(others if everything else {})}.items():
        if members:
            parts += [Text(title, style="bold"), _rows(members), Text()]
    if others and not everything:
        every = f"'dreamfleet {command} --help-all' shows every setting, also of the agent."
        parts += [Text(every), Text()]
    table = Table.grid(padding=(0, 3))
    # Of a command to be copied nothing may be cut off; what is said about it may wrap.
    table.add_column(no_wrap=True)
    for line, text in examples:
        table.add_row(Text(f"dreamfleet {line}"), Text(text, style="dim"))
    if table.rows:
        parts += [Text("examples", style="bold"), Padding(table, (0, 0, 0, 2), expand=False)]
    return Constrain(Group(*parts), _MAX_WIDTH)


def summary_of(function: Callable[..., Any]) -> str:
    """What a docstring says before it comes to the arguments."""
    return (inspect.getdoc(function) or "").split("\nArgs:")[0].strip()


def _rows(options: Sequence[Option]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=30, max_width=44)
    for option in options:
        text, default = Text(option.help), option.value
        if default is not _REQUIRED and default:
            shown = "on" if default is True else str(default)
            if isinstance(default, tuple):
                shown = " ".join(map(str, default))
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


def _metavar(kind: Any) -> str:
    """A type in the help: INT, NUMBER, TEXT, PATH or the choices."""
    base, inner, _, _ = type_info(kind)
    if base is typing.Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if base is tuple:  # the help says which names there are
        named = type_info(inner[0]).base is typing.Literal
        return f"{'NAME' if named else _metavar(inner[0])} ..."
    words = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH", dict: "NAME=VALUE ..."}
    return words.get(base, "VALUE")
