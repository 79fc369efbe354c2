"""Options of commands: from a function's signature or a configuration, to values and to help.

argparse splits the words and lays out the help. What a word may be is judged by
`dreamfleet.settings`, so that the command line and Python refuse a value with the same sentence.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.settings import (
    Setting,
    closest_setting,
    convert,
    describe,
    read,
    switchable_groups,
    type_info,
)

_REQUIRED = inspect.Parameter.empty
_METAVARS = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH", dict: "NAME=VALUE ..."}


def function_options(function: Callable[..., Any]) -> list[Setting]:
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
        found.append(Setting(name, hints[name], parameter.default, text, positional=positional))
    return found


def run_options(config: RunConfig) -> list[Setting]:
    """The settings of a run and its agent, and the groups that can be chosen by a name."""
    return [*config.settings(), *switchable_groups(config)]


def call(command: str, function: Callable[..., Any], arguments: Sequence[str]) -> Any:
    """What a command's function returns for what was typed.

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
    return function(*places, **values)


def parse(options: Sequence[Setting], arguments: Sequence[str]) -> dict[str, Any]:
    """The values of the options that were typed.

    Raises:
        ConfigError: An option does not exist, or has no value.
    """
    values, rest = parse_known(options, arguments)
    if not rest:
        return values
    flag = rest[0].partition("=")[0]
    if not flag.startswith("-"):
        raise ConfigError(f"Unexpected argument {rest[0]!r}. See --help.")
    flags = {option.path: option.flag for option in options}
    close = closest_setting(flag, flags)
    hint = f"Did you mean {flags[close]}?" if close else "See --help."
    raise ConfigError(f"There is no option {flag}. {hint}")


def parse_known(
    options: Sequence[Setting], arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The values of the options that were typed, and the words that belong to none of them.

    Raises:
        ConfigError: An option has no value.
    """
    parser = _parser(options)
    parser._negative_number_matcher = re.compile(r"-[\d.]")  # also -1e5, which is a number too
    try:
        # Flags may be typed with underscores, as settings have them.
        words = [re.sub("^--[^=]+", lambda m: m[0].replace("_", "-"), each) for each in arguments]
        found, rest = parser.parse_known_intermixed_args(words)
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


def help_of(
    command: str,
    function: Callable[..., Any],
    options: Sequence[Setting],
    examples: Sequence[str],
    *,
    everything: bool,
) -> str:
    """The help of a command: what it does, its options, and examples.

    Of the settings of a run only those of a section are shown, unless everything is asked for.
    """
    of_run = any(option.section for option in options)
    shown = [o for o in options if everything or not of_run or o.section or o.positional]
    usage = f"dreamfleet {command} "
    for each in (option for option in options if option.positional):
        words = each.flag + (" ..." if each.takes_several else "")
        usage += f"{words} " if each.value is _REQUIRED else f"[{words}] "
    end = f"'dreamfleet {command} --help-all' shows every setting, also of the agent.\n\n"
    pairs = [line.split(" | ") for line in examples]
    width = min(53, max((len(line) for line, _ in pairs), default=0))
    table = "".join(f"\n  dreamfleet {line:<{width}}   {text}" for line, text in pairs)
    parser = _parser(
        sorted(shown, key=lambda each: (not each.positional, not each.section)),
        usage=f"{usage}[OPTIONS]",
        description=summary_of(function),
        epilog=(end if len(shown) < len(options) else "") + (table and f"examples:{table}"),
    )
    return parser.format_help().rstrip()


def summary_of(function: Callable[..., Any]) -> str:
    """What a docstring says before it comes to the arguments."""
    return (inspect.getdoc(function) or "").split("\nArgs:")[0].strip()


class _Layout(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return str(action.metavar)


def _parser(options: Sequence[Setting], **about: Any) -> argparse.ArgumentParser:
    """What reads the options, and lays out their help."""
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
        formatter_class=_Layout,
        **about,
    )
    groups: dict[str, Any] = {}
    of_run = any(option.section for option in options)
    for option in options:
        group = option.path.rpartition(".")[0] or "other settings of the run"
        title = option.section or (group if of_run else "options")
        title = "arguments" if option.positional else title
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        add, several = groups[title].add_argument, option.takes_several
        text, usage = _text(option).replace("%", "%%"), option.flag
        if option.positional:
            made = add(option.path, nargs="*" if several else "?", help=text)
        elif option.is_switch:
            usage += f", {option.negation}" if option.value is True else ""
            switch = {"dest": option.path, "action": "store_const"}
            made = add(option.flag, const=True, **switch, help=text)
            add(option.negation, const=False, **switch, help=argparse.SUPPRESS)
        else:
            usage += f" {_metavar(option.type)}"
            made = add(option.flag, dest=option.path, nargs="+" if several else 1, help=text)
        made.metavar = usage
    return parser


def _text(option: Setting) -> str:
    """What an option is for, and its default."""
    value = option.value
    if value is _REQUIRED or not value:
        return option.help
    if isinstance(value, dict):
        value = tuple(f"{name}={each}" for name, each in value.items())
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{option.help} ({'on' if value is True else shown})"


def _metavar(kind: Any) -> str:
    """A type in the help: INT, NUMBER, TEXT, PATH or the choices."""
    base, inner, _, _ = type_info(kind)
    if base is typing.Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if base is tuple:  # the help says which names there are
        named = type_info(inner[0]).base is typing.Literal
        return f"{'NAME' if named else _metavar(inner[0])} ..."
    return _METAVARS.get(base, "VALUE")
