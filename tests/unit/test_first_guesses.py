"""What a user of another library types first works, or is answered with the right word."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dreamfleet
from dreamfleet import Policy, RunConfig, configure, evaluate, train
from dreamfleet.agents import DreamerConfig, RandomAgent, size_preset
from dreamfleet.cli import main
from dreamfleet.cli.train import options_of
from dreamfleet.config import read_config
from dreamfleet.envs import make_env
from dreamfleet.envs.bundled import Dummy
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.settings import WORDS_ELSEWHERE

SMALL: dict[str, Any] = {
    "agent": "random",
    "launcher": "serial",
    "steps": 40,
    "envs": 2,
    "env_options": {"length": 5, "size": (8, 8)},
    "display": None,
    "say": lambda _: None,
}


def test_the_environment_may_come_first(tmp_path: Path) -> None:
    train("bundled:dummy", logdir="one", eval_episodes=0, **SMALL)
    train(Dummy, logdir="two", eval_episodes=0, **SMALL)
    found = [read_config(tmp_path / name).task for name in ("one", "two")]
    assert found == ["bundled:dummy", "dreamfleet.envs.bundled:Dummy"]
    with pytest.raises(ConfigError, match="Two environments are given"):
        train("bundled:dummy", env=Dummy)
    with pytest.raises(DreamfleetError, match="pass the class, or a function that returns one"):
        train(Dummy())  # type: ignore[arg-type]
    policy = Policy.load("two")
    lengths = [evaluate(policy, Dummy, episodes=2).lengths, evaluate(policy, 3, env=Dummy).lengths]
    assert lengths == [[5, 5], [5, 5, 5]]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("learning_rate", "'dreamer.optimizer.learning_rate'? As an argument of a function: dre"),
        ("total_timesteps", "'steps'?"),
        ("env_kwargs", "'env_options'?"),
        ("n_envs", "'envs'?"),
        ("gamma", "'dreamer.loss.horizon'?"),
        ("policy_kwargs", "'dreamer.model'?"),
        ("dreamer__learning_rate", "'dreamer.optimizer.learning_rate'?"),
    ],
)
def test_python_says_the_right_name_of_a_setting(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        train("bundled:dummy", **{name: 1})
    assert f"did you mean {meant}" in str(error.value)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--lr", "--dreamer.optimizer.learning-rate"),
        ("--learning-rate", "--dreamer.optimizer.learning-rate"),
        ("--entropy-scal", "--dreamer.loss.entropy-scale"),
        ("--wandb", "--outputs"),
        ("--configs", "--preset"),
        ("--run.train_ratio", "--train-ratio"),
        ("--replay.size", "--replay.capacity"),
        ("--run.steps=5", "--steps"),
    ],
)
def test_the_command_line_says_the_right_option(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", flag, "1"]) == 2
    assert capsys.readouterr().err.endswith(f" Did you mean {meant}?\n")


def test_what_is_like_nothing_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--xyz", "1"]) == 2
    assert capsys.readouterr().err.endswith("There is no option --xyz. See --help.\n")


def test_words_of_others_lead_to_options_that_exist_and_are_none_themselves() -> None:
    options = {option.path for option in options_of([])}
    assert options >= WORDS_ELSEWHERE.keys()
    words = [word for each in WORDS_ELSEWHERE.values() for word in each.split()]
    assert len(words) == len(set(words))
    assert options.isdisjoint(words)


def test_settings_of_the_agent_are_read_under_its_name() -> None:
    config = RunConfig().changed({"dreamer.optimizer.learning_rate": 1e-3})
    assert config.dreamer.optimizer.learning_rate == 1e-3
    for same in (copy.copy(config), copy.deepcopy(config)):
        assert same.dreamer == config.agent_config
    assert not hasattr(RunConfig(agent="random"), "dreamer")
    foreign = RunConfig.from_json(config.to_json().replace('"dreamer"', '"not_there:AGENT"'))
    assert not hasattr(foreign, "AGENT")


def test_train_offers_every_setting_with_its_type_and_default() -> None:
    """Editors, notebooks and `help` complete them; `RunConfig` states them."""
    offered = inspect.signature(train).parameters
    for name, field in inspect.signature(RunConfig).parameters.items():
        assert name in offered
        assert name == "config" or offered[name].default == field.default
    assert (offered["steps"].annotation, offered["task"].annotation) == (int, str)
    assert list(offered)[:3] == ["config", "env", "preset"]
    assert list(offered)[-1] == "settings", "those of the agent, dreamer__loss__horizon"
    assert "agent_config" in inspect.signature(dreamfleet.resume).parameters


def test_settings_of_the_agent_may_be_given_as_a_whole() -> None:
    agent = DreamerConfig(model=size_preset("debug"))
    for path in ("agent_config", "dreamer"):
        config = configure({path: agent, "dreamer.loss.horizon": 50})
        assert config.dreamer == agent.__class__(agent.model, replace(agent.loss, horizon=50.0))
    nested = configure({"dreamer": {"model": "debug"}, "replay": {"capacity": 5000}})
    assert (nested.dreamer.model, nested.replay.capacity) == (agent.model, 5000)


def test_a_policy_says_how_it_is_called() -> None:
    env = make_env("bundled:dummy", length=5, size=(8, 8))
    policy = Policy(RandomAgent(env.obs_space, env.act_space), env.obs_space, env.act_space)
    for name in ("predict", "act"):
        with pytest.raises(AttributeError, match=r"policy\(observation, state\), or use .*for_gym"):
            getattr(policy, name)
    assert not hasattr(policy, "anything_else")


def test_the_package_lists_its_names() -> None:
    assert {"train", "evaluate", "Policy", "Dream", "make_env"} <= set(dir(dreamfleet))
