"""The one gate for code that a file names."""

from __future__ import annotations

from typing import Any

import pytest

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.trust import CodeRef, admit, code_in

CODE = [CodeRef("task", "mine:make"), CodeRef("dreamer.model.encoder", "mine:Encoder")]


def test_names_of_this_package_are_no_code_of_others() -> None:
    values = [("task", "gym:CartPole-v1"), ("agent", "dreamer"), ("outputs", ("jsonl", "media"))]
    assert code_in(values) == []
    named = [("task", "gym:mine:Env-v0"), ("outputs", ("jsonl", "a:B")), ("x", {"c:D": 1})]
    expected = [("task", "gym:mine:Env-v0"), ("outputs", "a:B"), ("x", "c:D")]
    assert [ref[:2] for ref in code_in(named)] == expected
    assert RunConfig().named_code == []
    config = RunConfig(task="mine:make").changed({"dreamer.model.encoder": "mine:Encoder"})
    assert config.code_refs == CODE


@pytest.mark.parametrize(
    "allowed",
    [
        {"trust": True},
        {"trust": ["mine:make", "mine:Encoder"]},
        {"trust": "mine:make", "stated": ["dreamer.model"]},
        {"stated": ["task", "dreamer.model.encoder"]},
    ],
)
def test_what_the_user_names_or_trusts_is_admitted(allowed: dict[str, Any]) -> None:
    admit("a run", CODE, **allowed)


def test_the_flag_in_the_message_can_be_typed() -> None:
    code = code_in([("dreamer.loss.extra", {"mine:Loss": 0.1})])
    with pytest.raises(ConfigError, match=r"add --dreamer\.loss\.extra mine:Loss=0\.1, or"):
        admit("a run", code)


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        ({}, "add --task mine:make --dreamer.model.encoder mine:Encoder, or --trust"),
        ({"trust": ["mine"]}, "a run names mine:make and mine:Encoder, which is not part"),
        ({"trust": "mine:make"}, "a run names mine:Encoder, which"),
        ({"stated": ["task", "dreamer.mod"]}, "a run names mine:Encoder, which"),
        ({"may_state": ["task"]}, "if you name it too: add --trust (trust=True in Python)."),
        ({"trust": []}, "add --task"),
    ],
)
def test_everything_else_is_refused(allowed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        admit("a run", CODE, **allowed)
    assert words in str(error.value)
