"""Settings that cannot work are refused, and every setting is used."""

import ast
import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dreamfleet
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.presets import PRESETS, preset

SOURCE = Path(dreamfleet.__file__).parent


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"envs": 0}, "envs=0"),
        ({"steps": -1}, "steps=-1"),
        ({"report_length": 65}, "report_length=65 is above batch_length=64"),
        ({"actor_batch": 9}, "actor_batch=9 is never reached with 8"),
        ({"from_checkpoint_regex": "actor"}, "from_checkpoint, which is empty"),
        ({"remote_envs": True}, "remote_envs needs an actor_addr"),
        ({"remote_replay": True}, "remote_replay needs an replay_addr"),
        ({"train_ratio": float("nan")}, "train_ratio=nan"),
        ({"log_every": 0.0}, "log_every=0"),
        ({"env_options": {"seed": 3}}, "set the run's seed"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig(**settings)


def test_a_policy_batch_of_zero_is_half_the_environments() -> None:
    assert RunConfig(envs=6, eval_envs=2).policy_batch == 4
    assert RunConfig(envs=1).policy_batch == 1
    assert RunConfig(envs=6, actor_batch=5).policy_batch == 5


def test_every_setting_is_read_somewhere_and_has_a_sentence() -> None:
    names = {field.name for field in dataclasses.fields(RunConfig)}
    read: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and path.name != "config.py":
                read.add(node.attr)
    # These two are read as `policy_batch` and `all_envs`.
    assert names - read - {"actor_batch", "eval_envs"} == set()
    body = next(
        node
        for node in ast.walk(ast.parse((SOURCE / "config.py").read_text()))
        if isinstance(node, ast.ClassDef)
    ).body
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), f"{ast.unparse(field.target)} has no sentence"


def test_a_configuration_can_be_written_down() -> None:
    for config in PRESETS.values():
        assert json.loads(config.to_json())["task"] == config.task


def test_an_unknown_preset_suggests_a_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        preset("defualt")


def test_presets_need_no_jax() -> None:
    code = "import sys, dreamfleet.presets; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
