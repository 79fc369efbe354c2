"""Options of commands: from a function's signature or a configuration, to values and to help.

tyro splits the words. What a word may be is judged by `dreamfleet.settings`, so that the command
line and Python refuse the same value with the same sentence.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tyro.constructors import PrimitiveConstructorSpec

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.settings import closest_setting, convert, describe, read, switchable_groups

_WIDEST = 100
_NOT_GIVEN: Any = object()

Groups = Mapping[str, Sequence[str]]
"""Titles, and the names of the options under each."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option, or one positional argument."""

    name: str
    """The parameter, or the path of the setting."""
    kind: Any
    default: Any
    sentence: str
    positional: bool = False

    @property
    def flag(self) -> str:
        """What is typed: --train-ratio, or LOGDIR."""
        label = self.name.replace("_", "-")
        return label.upper() if self.positional else f"--{label}"

    @property
    def flags(self) -> str:
        """Everything that may be typed: a switch that is on by default is switched off."""
        if not (self.switch and self.default):
            return self.flag
        group, dot, label = self.flag.removeprefix("--").rpartition(".")
        return f"{self.flag}, --{group}{dot}no-{label}"

    @property
    def switch(self) -> bool:
        """Whether it takes no value: --greedy, and --no-greedy."""
        return _bare(self.kind) is bool

    @property
    def several(self) -> bool:
        """Whether it takes several words."""
        inner = [_bare(each) for each in (_bare(self.kind), *typing.get_args(_bare(self.kind)))]
        return any(each is dict or typing.get_origin(each) in (tuple, dict) for each in inner)


@dataclasses.dataclass(frozen=True)
class SettingsNamed:
    """Marks a command's `**settings`: options for these settings of a run."""

    names: tuple[str, ...]


def function_options(function: Callable[..., Any]) -> list[Option]:
    """The options of a command: the parameters of its function."""
    hints = typing.get_type_hints(function, include_extras=True)
    sentences = dict(_sentences(inspect.getdoc(function) or ""))
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (named,) = hints[name].__metadata__
            settings = {option.name: option for option in setting_options(RunConfig())}
            found += [dataclasses.replace(settings[each], default=None) for each in named.names]
            continue
        positional = parameter.kind is parameter.POSITIONAL_ONLY
        sentence = sentences.get(name, "")
        found.append(Option(name, hints[name], parameter.default, sentence, positional))
    return found


def setting_options(config: RunConfig) -> list[Option]:
    """An option for each setting of a run, and for each group that can be chosen by a name."""
    found = [Option(s.path, s.kind, s.value, s.sentence) for s in config.settings()]
    agent = config.agent_type
    groups = switchable_groups(config.settings_of(agent), f"{agent.name}.")
    return found + [Option(group.path, str, None, group.sentence) for group in groups]


def call(command: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Run a command's function with what was typed.

    Raises:
        ConfigError: An option does not exist, or its value does not fit.
    """
    options = function_options(function)
    values = parse(command, options, arguments)
    for option in options:
        if option.name in values:
            value = values[option.name]
            values[option.name] = convert(option.flag, value, option.kind)
        elif option.default is inspect.Parameter.empty:
            raise ConfigError(f"{option.flag} is missing. See 'dreamfleet {command} --help'.")
    places = [values.pop(o.name) for o in options if o.positional and o.name in values]
    function(*places, **values)


def parse(
    command: str, options: Sequence[Option], arguments: Sequence[str], *, strict: bool = True
) -> dict[str, Any]:
    """The values of the options that were given.

    Args:
        command: For messages.
        options: Those that there are.
        arguments: What was typed.
        strict: Whether anything else is an error.

    Raises:
        ConfigError: An option does not exist, or has no value.
    """
    _check_values(options, arguments)
    fields = [
        (f"option{number}", _typed(option), dataclasses.field(default=_start(option)))
        for number, option in enumerate(options)
    ]
    words: Any
    words, unknown = tyro.cli(
        dataclasses.make_dataclass("Options", fields),
        args=arguments,
        prog=f"dreamfleet {command}",
        return_unknown_args=True,
        add_help=False,
    )
    if unknown and strict:
        raise _unknown_option(unknown[0], options)
    values = {}
    for number, option in enumerate(options):
        value = getattr(words, f"option{number}")
        if value is not _start(option) and not (option.positional and value == []):
            values[option.name] = value if option.switch else read(value, option.kind)
    return values


def help_of(
    command: str,
    summary: str,
    options: Sequence[Option],
    *,
    groups: Groups | None = None,
    examples: Iterable[tuple[str, str]] = (),
    footer: str = "",
) -> RenderableType:
    """The help of a command: what it does, its options in groups, examples."""
    places = [o.flag + (" ..." if o.several else "") for o in options if o.positional]
    optional = [o.default is not inspect.Parameter.empty for o in options if o.positional]
    shown = [f"[{o}]" if free else o for o, free in zip(places, optional, strict=True)]
    usage = " ".join(["usage: dreamfleet", command, *shown, "[OPTIONS]"])
    parts: list[RenderableType] = [Text(usage), Text(), Text(summary), Text()]
    for title, members in _grouped(options, groups):
        parts += [Text(title, style="bold"), _rows(members), Text()]
    if footer:
        parts += [Text(footer), Text()]
    table = Table.grid(padding=(0, 3))
    # Of a command to be copied nothing may be cut off; what is said about it may wrap.
    table.add_column(no_wrap=True)
    for line, words in examples:
        table.add_row(Text(f"dreamfleet {line}"), Text(words, style="dim"))
    if table.rows:
        parts += [Text("examples", style="bold"), Padding(table, (0, 0, 0, 2), expand=False)]
    return Constrain(Group(*parts), _WIDEST)


def summary_of(function: Callable[..., Any]) -> str:
    """What a docstring says before it comes to the arguments."""
    return (inspect.getdoc(function) or "").split("\nArgs:")[0].strip()


def _typed(option: Option) -> Any:
    """The annotation that makes tyro split words as this option needs it."""
    marks: list[Any] = [tyro.conf.arg(name=option.flag.removeprefix("--"))]
    if option.positional:
        marks = [tyro.conf.Positional, tyro.conf.arg(name=option.name)]
    if option.switch:
        return Annotated[(bool, *marks)]
    unread = PrimitiveConstructorSpec(
        nargs="*" if option.several or option.positional else 1,
        metavar=_values(option.kind),
        instance_from_str=list,
        is_instance=lambda _: True,
        str_from_instance=lambda value: [str(value)],
    )
    return Annotated[(Any, unread, *marks)]


def _start(option: Option) -> Any:
    return bool(option.default) if option.switch else _NOT_GIVEN


def _check_values(options: Sequence[Option], arguments: Sequence[str]) -> None:
    """Refuse a flag without its value, which tyro answers with a box of several lines."""
    valued = {o.flag: o for o in options if not o.positional and not o.switch}
    for place, word in enumerate(arguments, 1):
        option = valued.get(word.replace("_", "-"))
        if option and (place == len(arguments) or re.match(r"-[^\d.]", arguments[place])):
            raise ConfigError(f"{option.flag} needs a value: {describe(option.kind)}.")


def _unknown_option(word: str, options: Sequence[Option]) -> ConfigError:
    flag = word.partition("=")[0].replace("_", "-")
    if not flag.startswith("-"):
        return ConfigError(f"{word!r} belongs to no option. See --help.")
    for option in options:
        if option.positional and flag == f"--{option.name}":
            return ConfigError(f"{option.flag} is written without {flag}: its value alone will do.")
    flags = {option.name: option.flag for option in options if not option.positional}
    close = closest_setting(flag, flags)
    hint = f"Did you mean {flags[close]}?" if close else "See --help."
    return ConfigError(f"There is no option {flag}. {hint}")


def _grouped(options: Sequence[Option], groups: Groups | None) -> list[tuple[str, list[Option]]]:
    """Options by what they are about."""
    rest = {option.name: option for option in options}
    found = [("arguments", [rest.pop(o.name) for o in options if o.positional])]
    for title, names in (groups or {}).items():
        found.append((title, [rest.pop(name) for name in names if name in rest]))
    if groups is None:
        found.append(("options", list(rest.values())))
    return [(title, members) for title, members in found if members]


def _rows(options: Sequence[Option]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=30, max_width=44)
    for option in options:
        words = Text(option.sentence)
        empty: tuple[Any, ...] = (inspect.Parameter.empty, None, (), "", False, {})
        if option.default not in empty:
            default = option.default
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
            if default is True:
                shown = "on"
            elif isinstance(default, dict):
                shown = " ".join(f"{name}={value}" for name, value in default.items())
            words.append(f" ({shown})", style="dim")
        values = "" if option.positional or option.switch else f" {_values(option.kind)}"
        table.add_row(Text(f"{option.flags}{values}", style="cyan"), words)
    return Padding(table, (0, 0, 0, 2), expand=False)


def _sentences(documentation: str) -> Iterator[tuple[str, str]]:
    """The entries of a docstring's `Args:`."""
    _, _, arguments = documentation.partition("\nArgs:")
    entries = re.split(r"\n    (?=\w+: )", arguments.split("\n\n")[0])
    for entry in entries[1:]:
        name, _, words = entry.partition(": ")
        yield name.strip(), " ".join(words.split())


def _bare(kind: Any) -> Any:
    """A type without its range."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _values(kind: Any) -> str:
    """A type, for a person: INT, NUMBER, TEXT, PATH or the choices."""
    kind = _bare(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_values(each) for each in inner if each is not type(None))
    if origin is typing.Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin is tuple:
        # The sentence says which names there are.
        named = typing.get_origin(inner[0]) is typing.Literal
        return f"{'NAME' if named else _values(inner[0])} ..."
    if origin is dict or kind is dict:
        return "NAME=VALUE ..."
    return {int: "INT", float: "NUMBER", str: "TEXT", bool: "", Path: "PATH"}.get(kind, "VALUE")
