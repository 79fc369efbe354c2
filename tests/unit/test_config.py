"""Settings that cannot work are refused, and every setting is used."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dreamfleet
from dreamfleet.agents import size_preset
from dreamfleet.agents.random import RandomConfig
from dreamfleet.agents.registry import BUILT_IN, find_agent
from dreamfleet.cli.train import config_of
from dreamfleet.config import Resources, RunConfig, RunResources
from dreamfleet.errors import ConfigError
from dreamfleet.presets import PRESETS, preset
from dreamfleet.settings import describe
from dreamfleet.training import configure

SOURCE = Path(dreamfleet.__file__).parent


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"envs": 0}, "envs=0"),
        ({"steps": -1}, "steps=-1"),
        ({"from_checkpoint_regex": "actor"}, "from_checkpoint_regex needs from_checkpoint"),
        ({"remote_envs": True}, "remote_envs needs an actor_addr"),
        ({"remote_replay": True}, "remote_replay needs a replay_addr"),
        ({"envs": 2, "actors": 3}, "actors=3 exceeds the 2 environments"),
        (
            {"offline": ("runs/a",), "actors": 2},
            "without environments: leave bind, actors",
        ),
        ({"offline": ("runs/a",), "pretrain": 5}, "use prefill, not offline"),
        ({"offline_fraction": 0.5, "replay_shards": 2}, "cannot be used with replay_shards=2"),
        ({"train_ratio": float("nan")}, "train_ratio=nan"),
        ({"log_every": 0.0}, "log_every=0"),
        ({"env_options": {"seed": 3}}, "set the run's seed"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig(**settings)


def test_a_policy_batch_of_zero_is_half_the_environments() -> None:
    assert RunConfig(envs=6, eval_envs=2, actor_batch=0).policy_batch == 4
    assert RunConfig(envs=1, actor_batch=0).policy_batch == 1
    assert RunConfig(envs=6, actor_batch=5).policy_batch == 5


def settings_read_in_the_source() -> set[str]:
    """Names that are read as an attribute anywhere, outside of the statements of settings."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        found |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return found


ALL = {s.path: s for agent in BUILT_IN for s in RunConfig(agent=agent).settings()}


@pytest.mark.parametrize("path", ALL)
def test_every_setting_is_read_and_has_help_and_a_range(path: str) -> None:
    setting = ALL[path]
    assert path.rpartition(".")[2] in READ, "nothing reads this setting: delete it"
    assert setting.help.endswith("."), "it has no help"
    if isinstance(setting.value, (int, float)) and not isinstance(setting.value, bool):
        words = describe(setting.type)
        assert any(word in words for word in ("at least", "above", "at most", "below")), words


# Addresses are read by the name of their server.
READ = settings_read_in_the_source() | {"actor_addr", "learner_addr", "logger_addr"}


def test_settings_of_the_agent_stand_under_its_name() -> None:
    config = RunConfig().changed({"dreamer.model": "1m", "dreamer.loss.horizon": 50, "envs": 4})
    assert config.agent_config.model == size_preset("1m")
    assert (config.agent_config.loss.horizon, config.envs) == (50.0, 4)
    values = json.loads(config.to_json())
    assert values["dreamer"]["loss"]["horizon"] == 50
    assert "agent_config" not in values
    assert RunConfig.from_json(config.to_json()) == config
    for path, words in (
        ("dreamer.loss.horizn", "did you mean 'dreamer.loss.horizon'"),
        ("replay.capcity", "did you mean 'replay.capacity'"),
        ("dreamer.hats.more", "There is no setting 'dreamer.hats.more'"),
        ("random.loss", "There is no setting 'random.loss'"),
    ):
        with pytest.raises(ConfigError, match=words):
            config.changed({path: 1})
    other = config.changed({"agent": "random"})
    assert other.agent_config == RandomConfig()
    with pytest.raises(ConfigError, match=r"There is no setting 'dreamer\.loss\.horizon'"):
        other.changed({"dreamer.loss.horizon": 1})
    with pytest.raises(ConfigError, match="DreamerConfig, and the agent random takes"):
        replace(config, agent="random")


def test_a_configuration_can_be_written_down() -> None:
    for config in PRESETS.values():
        assert json.loads(config.to_json())["task"] == config.task


def test_an_unknown_preset_suggests_a_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        preset("defualt")


# Of the public reference implementation: task, train ratio, environments, agent steps, width.
REFERENCE = {
    "published": ("gym:CartPole-v1", 32, 16, 0, 8192),
    "atari": ("atari:pong", 32, 16, 51_000_000, 8192),
    "atari100k": ("atari100k:pong", 256, 1, 110_000, 8192),
    "crafter": ("crafter:reward", 512, 1, 1_100_000, 8192),
    "dmc_proprio": ("dmc:walker_walk", 1024, 16, 1_100_000, 512),
    "dmc_vision": ("dmc:walker_walk", 256, 16, 1_100_000, 8192),
    "size1m": ("gym:CartPole-v1", 32, 16, 0, 512),
    "size12m": ("gym:CartPole-v1", 32, 16, 0, 2048),
    "size25m": ("gym:CartPole-v1", 32, 16, 0, 3072),
    "size50m": ("gym:CartPole-v1", 32, 16, 0, 4096),
    "size100m": ("gym:CartPole-v1", 32, 16, 0, 6144),
    "size200m": ("gym:CartPole-v1", 32, 16, 0, 8192),
    "size400m": ("gym:CartPole-v1", 32, 16, 0, 12288),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_presets_of_the_reference_have_its_settings(name: str) -> None:
    config = preset(name)
    agent, model = config.agent_config, config.agent_config.model
    assert (
        config.task, config.train_ratio, config.envs, config.steps, model.deter
    ) == REFERENCE[name]  # fmt: skip
    assert (config.batch_size, config.batch_length, config.report_length) == (16, 64, 32)
    assert (config.log_every, config.report_every, config.save_every) == (120, 300, 900)
    assert config.replay.capacity == 5_000_000
    assert (model.stoch, model.blocks, model.mults) == (32, 8, (2, 3, 4, 4))
    assert agent.execution.compute_dtype == "bfloat16"
    assert (agent.optimizer.learning_rate, agent.optimizer.warmup) == (4e-5, 1000)
    assert (agent.optimizer.clip, agent.optimizer.beta1, agent.optimizer.beta2) == (0.3, 0.9, 0.999)
    loss = agent.loss
    assert (loss.horizon, loss.imag_length, loss.imag_last, loss.float_scale) == (333, 15, 0, 1)
    assert (loss.entropy_scale, loss.return_lambda, loss.slow_rate) == (3e-4, 0.95, 0.02)
    assert config.env_options == ({"obs": "pixels"} if name == "dmc_vision" else {})
    expected = "runs/" + config.task.replace(":", "-")
    assert str(config.logdir) == expected


def test_a_size_may_follow_a_preset() -> None:
    both = preset("crafter,size12m")
    assert both.agent_config.model == size_preset("12m")
    assert both == preset("crafter").changed({"dreamer.model": "12m"})
    with pytest.raises(ConfigError, match="two whole presets"):
        preset("crafter,atari")
    with pytest.raises(ConfigError, match="did you mean 'size12m'"):
        preset("crafter,size12")


def test_presets_need_no_jax() -> None:
    code = "import sys, dreamfleet.presets; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sizes_that_follow_from_others_are_cut_to_them() -> None:
    """Another number of environments needs no other batch settings."""
    few = preset("default").changed({"envs": 2, "batch_length": 4})
    assert (few.policy_batch, few.report_window) == (2, 4)
    assert replace(few, batch_length=64).report_window == 32  # nothing was lost
    assert RunConfig(envs=9, actor_batch=0).policy_batch == 4
    assert RunConfig(envs=1, actor_batch=0).policy_batch == 1


def test_an_agent_may_not_call_its_settings_like_a_setting() -> None:
    class Clash(type(find_agent("random"))):  # type: ignore[misc]
        name = "replay"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dreamfleet.config.find_agent", lambda _: Clash())
        with pytest.raises(ConfigError, match="give its type another name"):
            RunConfig(agent="random")


def test_numbers_of_numpy_among_options_stay_numbers(tmp_path: Path) -> None:
    options = {"gravity": np.float32(0.5), "size": np.array([8, 8])}
    config = RunConfig(logdir=tmp_path, env_options=options)
    assert RunConfig.from_json(config.to_json()).env_options == {"gravity": 0.5, "size": (8, 8)}


def test_paths_and_whole_floats_from_python_are_taken(tmp_path: Path) -> None:
    config = RunConfig(
        from_checkpoint=tmp_path,  # type: ignore[arg-type]
        prefill=[tmp_path / "a", "b"],  # type: ignore[arg-type, list-item]
        keys=tmp_path / "keys",  # type: ignore[arg-type]
        steps=1e6,  # type: ignore[arg-type]
    )
    assert (config.from_checkpoint, config.keys) == (str(tmp_path), str(tmp_path / "keys"))
    assert config.prefill == (str(tmp_path / "a"), "b")
    assert (config.steps, type(config.steps)) == (1_000_000, int)
    assert RunConfig().changed({"offline": (tmp_path,)}).offline == (str(tmp_path),)
    assert RunConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match=r"steps=1\.5 is not valid"):
        RunConfig(steps=1.5)  # type: ignore[arg-type]


def test_the_defaults_of_python_are_those_of_the_command() -> None:
    assert RunConfig() == configure({}) == preset("default") == config_of([])
    assert RunConfig().agent_config.model == size_preset("cpu-tiny")
    assert RunConfig().logdir == Path("runs/gym-CartPole-v1")


def test_the_directory_follows_the_task_unless_it_was_chosen() -> None:
    other = {"task": "gym:Acrobot-v1"}
    assert RunConfig().changed(other).logdir == Path("runs/gym-Acrobot-v1")
    assert RunConfig(logdir="runs/mine").changed(other).logdir == Path("runs/mine")
    assert RunConfig(logdir="all/{task}/1", **other).logdir == Path("all/gym-Acrobot-v1/1")


def test_where_and_how_a_run_is_computed_makes_it_no_other_experiment() -> None:
    """So seeds that differ only there are drawn as one curve."""
    plain = RunConfig()
    elsewhere = RunConfig(
        launcher="ray",
        ray_address="far:1",
        ray_runtime_env={"pip": ["minigrid"]},
        ray_wait=5.0,
        resources=RunResources(env=Resources(cpu=2, custom={"simulator": 1})),
        bind="0.0.0.0",
        profile=True,
        seed=3,
        logdir=Path("elsewhere"),
    ).changed({"dreamer.execution.cache_dir": "", "dreamer.execution.train_platform": "gpu"})
    assert elsewhere.experiment() == plain.experiment()
    for change in ({"batch_size": 3}, {"env_options": {"repeat": 2}}, {"dreamer.loss.horizon": 9}):
        assert plain.changed(change).experiment() != plain.experiment()
