"""Help that a person can read, and mistakes that are answered with what was meant."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import typing
from collections.abc import Callable
from typing import Any

import pytest
import tyro

from dreamfleet.cli import COMMANDS, main
from dreamfleet.cli.help import _GROUPS, EXAMPLES
from dreamfleet.cli.options import check_flags, options_of, parse_settings, summary_of
from dreamfleet.errors import ConfigError
from dreamfleet.presets import preset


def function_of(command: str) -> Callable[..., Any]:
    name = command.replace("-", "_")
    function: Callable[..., Any] = getattr(importlib.import_module(f"dreamfleet.cli.{name}"), name)
    return function


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text, "something is cut off"
    words = " ".join(text.split())
    for option in options_of(function_of(command)):
        assert option.sentence, f"{command} {option.flag} has no sentence"
        assert option.sentence in words
        assert option.flag in text
    assert summary_of(function_of(command)).split("\n")[0] in text


def test_train_shows_groups_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    titles = re.findall(r"^(\w[\w ]*)$", text, re.MULTILINE)
    assert titles[0] == "what"
    assert titles[-1] == "examples"
    # A new option that no group knows would show up here.
    assert "options" not in titles
    assert f"({preset('default').steps})" in text
    assert "dreamfleet train --task" in text


def test_groups_name_each_option_once() -> None:
    for groups in _GROUPS.values():
        names = [name for members in groups.values() for name in members]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "line", [line for examples in EXAMPLES.values() for line, _ in examples], ids=str
)
def test_every_example_is_a_command(line: str) -> None:
    """Parsed as it stands there; what it does is tested where the command is."""
    command, *arguments = shlex.split(line)
    function = function_of(command)
    given: dict[str, Any] = {}

    def stand_in(*args: Any, **kwargs: Any) -> None:
        given.update(inspect.signature(function).bind(*args, **kwargs).arguments)

    stand_in.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    stand_in.__annotations__ = typing.get_type_hints(function, include_extras=True)
    stand_in.__doc__ = function.__doc__
    check_flags(function, arguments)
    tyro.cli(stand_in, args=arguments)
    assert given or not arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--stesp", "5"], "no option --stesp. Did you mean --steps?"),
        (["train", "--train_ration=5"], "Did you mean --train-ratio?"),
        (["eval", "runs", "--vidoe", "x.mp4"], "Did you mean --video?"),
        (["status", "runs", "--zzz"], "no option --zzz. See --help."),
    ],
)
def test_a_mistyped_option_is_answered_with_the_right_one(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert words in capsys.readouterr().err


def test_right_options_pass() -> None:
    check_flags(function_of("train"), ["--train_ratio", "5", "--batch-size=3", "--steps", "-1"])
    check_flags(function_of("status"), ["runs", "--no-follow"])


def test_settings_are_pairs() -> None:
    texts = ["a=1", "b.c=[2,3]", "d=true", "e=text", "f=x=y"]
    assert parse_settings(texts) == {"a": 1, "b.c": (2, 3), "d": True, "e": "text", "f": "x=y"}
    for wrong in ("a", "=1"):
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            parse_settings([wrong])
