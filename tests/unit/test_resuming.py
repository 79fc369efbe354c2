"""A resumed run keeps its settings, says what is changed, and imports nothing a file chose."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dreamfleet
from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.cli.train import config_of
from dreamfleet.config import RunConfig, read_config
from dreamfleet.envs import make_env
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.fleet.launchers import find_launcher
from dreamfleet.fleet.preflight import preflight
from dreamfleet.parallel import _prepared
from dreamfleet.policy import BLUEPRINT, Blueprint
from dreamfleet.presets import preset
from dreamfleet.resuming import differences, with_changes
from dreamfleet.training import _is_over, configure

RAN = "ran_because_a_file_said_so"


def a_run(logdir: Path, step: int = 0, **changes: Any) -> RunConfig:
    """A directory as a run leaves it."""
    base = preset("debug").changed({"logdir": logdir, "agent": "random", "steps": 500})
    config = base.changed(changes)
    logdir.mkdir(parents=True, exist_ok=True)
    (logdir / "config.json").write_text(config.to_json())
    if step:
        env = make_env("gym:CartPole-v1")
        agent = RandomAgent(env.obs_space, env.act_space)
        parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
        Checkpoint(logdir / "ckpt" / "agent").save(parts, step=step)
    return config


def resumed(logdir: Path, changes: dict[str, Any], *, trust: bool = False) -> RunConfig:
    return configure({"logdir": logdir, **changes}, trust=trust)


def test_what_is_not_named_is_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = a_run(run, task="gym:Pendulum-v1", batch_size=7, envs=3, seed=9, remote_envs=False)
    here = ["--logdir", str(run)]
    assert config_of(here) == before
    assert config_of([*here, "--preset", "pixels"]) == before
    after = config_of([*here, "--batch-size", "8", "--env-options", "g=2", "--set", "envs=4"])
    assert differences(before, after) == [
        "envs 3 -> 4", "batch_size 7 -> 8", "env_options.g none -> 2",
    ]  # fmt: skip
    assert configure({"logdir": run, "seed": 1}) == replace(before, seed=1)
    assert resumed(run, {}) == before
    assert configure({"logdir": tmp_path / "new"}).seed == 0


def test_the_default_directory_of_a_task_is_resumed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = a_run(Path("runs/gym-Pendulum-v1"), task="gym:Pendulum-v1", batch_size=7)
    assert config_of(["--task", "gym:Pendulum-v1"]) == before
    assert config_of([]).batch_size == preset("default").batch_size


def test_settings_of_the_agent_that_the_run_has_are_options(tmp_path: Path) -> None:
    a_run(tmp_path, agent="dreamer")
    after = config_of(["--logdir", str(tmp_path), "--dreamer.loss.horizon", "50"])
    assert (after.agent, after.agent_config.loss.horizon) == ("dreamer", 50)


def test_a_preset_that_is_named_again_changes_nothing_and_says_so(tmp_path: Path) -> None:
    config = preset("debug").changed({"logdir": tmp_path, "steps": 500, "batch_size": 7})
    (tmp_path / "config.json").write_text(config.to_json())
    said: list[str] = []
    assert configure({"logdir": tmp_path}, "debug", say=said.append) == config
    assert said == [
        f"The preset debug is for new runs: {tmp_path} keeps its own steps, batch_size."
    ]
    assert configure({"logdir": tmp_path, "batch_size": 7, "steps": 500}, "debug") == config
    (tmp_path / "config.json").write_text(
        preset("debug").changed({"logdir": tmp_path, "envs": 5}).to_json()
    )
    said.clear()
    configure({"logdir": tmp_path, "envs": 5}, "debug", say=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"task": f"{RAN}:make"}, f"--task {RAN}:make"),
        ({"task": f"gym:{RAN}:Env-v0"}, f"--task gym:{RAN}:Env-v0"),
        ({"agent": f"{RAN}:AGENT"}, f"--agent {RAN}:AGENT"),
        (
            {"agent": "dreamer", "dreamer.model.encoder": f"{RAN}:Encoder"},
            f"--dreamer.model.encoder {RAN}:Encoder",
        ),
        (
            {"agent": "dreamer", "dreamer.loss.extra": {f"{RAN}:Loss": 0.1}},
            f"--dreamer.loss.extra {RAN}:Loss=0.1",
        ),
    ],
    ids=["task", "gym", "agent", "network", "loss"],
)
def test_code_that_a_file_names_is_not_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    flag: str,
) -> None:
    agent = changes.get("agent", "random")
    a_run(tmp_path, **{k: v for k, v in changes.items() if RAN not in str(changes.get("agent"))})
    if RAN in agent:
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace('"agent": "random"', f'"agent": "{agent}"'))
    (tmp_path / f"{RAN}.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    for command in (
        ["resume", str(tmp_path)],
        ["train", "--logdir", str(tmp_path)],
        ["role", "logger", "--logdir", str(tmp_path)],
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "is imported only if you name it too: add" in said
        assert (flag in said) == (command[0] != "role")
        assert said.count("\n") == 1
    with pytest.raises(ConfigError, match="trust=True"):
        dreamfleet.resume(tmp_path)
    assert RAN not in sys.modules


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "{run}"],
        ["train", "--offline", "{run}", "--eval-episodes", "1", "--steps", "1"],
    ],
    ids=["eval", "offline"],
)
def test_a_downloaded_checkpoint_runs_no_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    """Its task could be any function of the standard library, and its options the arguments."""
    marker, run = tmp_path / "it ran", tmp_path / "run"
    options = {"cmd": f"touch '{marker}'"}
    a_run(run, step=1, task="subprocess:getoutput", env_options=options)
    (run / "replay").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main([word.format(run=run) for word in command]) == 2
    said = capsys.readouterr().err
    assert "is imported only if you name it too: add --task subprocess:getoutput" in said
    assert not marker.exists()


def test_a_checkpoint_names_nothing_of_the_program_that_evaluates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import __main__

    marker = tmp_path / "it ran"
    monkeypatch.setattr(__main__, "os", os, raising=False)
    options = {"command": f"touch '{marker}'"}
    a_run(tmp_path / "run", step=1, task="__main__:os.system", env_options=options)
    for arguments in ({}, {"trust": True}, {"env": "__main__:os.system"}):
        with pytest.raises(DreamfleetError, match="write --task module:NAME"):
            dreamfleet.evaluate(tmp_path / "run", 1, **arguments)
    for command in (["eval"], ["resume"], ["eval", "--trust"], ["resume", "--trust"]):
        assert main([command[0], str(tmp_path / "run"), *command[1:]]) == 2
        assert "write --task module:NAME" in capsys.readouterr().err
    assert not marker.exists()


def test_code_that_the_person_names_again_or_trusts_is_taken(tmp_path: Path) -> None:
    task = "my_envs:make"
    a_run(tmp_path, task=task)
    assert resumed(tmp_path, {"task": task}).task == task
    assert resumed(tmp_path, {}, trust=True).task == task
    here = ["--logdir", str(tmp_path)]
    assert config_of([*here, "--task", task]).task == config_of([*here, "--trust"]).task == task
    encoder = {"dreamer.model.encoder": "my_nets:Encoder"}
    a_run(tmp_path, agent="dreamer", **encoder)
    assert resumed(tmp_path, encoder) == resumed(tmp_path, {}, trust=True)
    both = {**encoder, "dreamer.model": "debug"}
    assert resumed(tmp_path, both).agent_config.model.encoder == "my_nets:Encoder"


def test_a_file_chooses_no_folder_from_which_programs_are_loaded(tmp_path: Path) -> None:
    """A downloaded run could bring the folder along."""
    cache, dump = "dreamer.execution.cache_dir", "dreamer.execution.dump_dir"
    kept = {"dreamer.execution.compute_dtype": "bfloat16", "dreamer.execution.prefetch": 3}
    folders = {cache: str(tmp_path / "cache"), dump: str(tmp_path)}
    before = a_run(tmp_path, agent="dreamer", **kept, **folders)
    here = ["--logdir", str(tmp_path)]
    for after in (
        config_of(here),
        configure({"logdir": tmp_path}),
        with_changes(before, {}, source=tmp_path, may_state=()),  # as a role has it
    ):
        assert differences(before, after) == [
            f"{cache} {tmp_path}/cache -> ~/.cache/dreamfleet/jax", f'{dump} {tmp_path} -> ""',
        ]  # fmt: skip
    assert config_of([*here, "--trust"]) == resumed(tmp_path, folders) == before
    execution = before.agent_config.execution
    assert resumed(tmp_path, {"dreamer.execution": execution}) == before
    assert resumed(tmp_path, {"agent_config": before.agent_config}) == before
    assert resumed(tmp_path, {cache: "/x"}).agent_config.execution.cache_dir == "/x"
    assert resumed(tmp_path, {cache: "/x"}).agent_config.execution.dump_dir == ""


def test_a_directory_that_was_moved_takes_its_key_along(tmp_path: Path) -> None:
    a_run(tmp_path, keys="/gone/keys", prefill=("gone",))
    assert (resumed(tmp_path, {}).keys, resumed(tmp_path, {}).prefill) == ("/gone/keys", ("gone",))
    (tmp_path / "keys").touch()
    assert resumed(tmp_path, {}).keys == ""
    # Steps that were copied need their source no longer.
    a_run(tmp_path, step=10, prefill=("gone", str(tmp_path)))
    assert resumed(tmp_path, {}).prefill == (str(tmp_path),)


def test_a_file_chooses_no_cluster_and_no_packages(tmp_path: Path) -> None:
    """Both decide which code runs, and where."""
    theirs = RunConfig(
        agent="random", logdir=tmp_path, ray_address="far:1", ray_runtime_env={"pip": ["evil"]}
    )
    (tmp_path / "config.json").write_text(theirs.to_json())
    found = resumed(tmp_path, {})
    assert (found.ray_address, found.ray_runtime_env) == ("", {})
    assert resumed(tmp_path, {"ray_address": "near:1"}).ray_address == "near:1"
    assert resumed(tmp_path, {}, trust=True).ray_address == "far:1"


def test_a_setting_that_this_version_does_not_have_is_named(tmp_path: Path) -> None:
    config = RunConfig(logdir=tmp_path, steps=100)
    values = json.loads(config.to_json())
    values["batch_sise"] = 8
    values["dreamer"]["loss"]["horizons"] = 50
    (tmp_path / "config.json").write_text(json.dumps(values))
    Checkpoint(tmp_path / "ckpt" / "agent").save({"run": {"updates": 1}}, step=100)
    said: list[str] = []
    assert _is_over(resumed(tmp_path, {}), said.append)
    words = "of config.json has no effect, because this version has no such setting: did you mean"
    assert sorted(said[1:]) == [
        f"batch_sise=8 {words} 'batch_size'?",
        f"dreamer.loss.horizons=50 {words} 'dreamer.loss.horizon'?",
    ]


def test_another_launcher_chooses_its_own_addresses(tmp_path: Path) -> None:
    config = RunConfig(agent="random", logdir=tmp_path, launcher="serial")
    run, _ = _prepared(config, find_launcher("serial")(tmp_path))
    assert run.actor_addr == "ipc://{auto}"
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "gym:Pendulum-v1"], "with task gym:CartPole-v1, not gym:Pendulum-v1"),
        (["--agent", "dreamer"], "with agent random, not dreamer"),
        (["--env-options", "obs=pixels", "size=[16,16]"], "'vector' was float32[4] and is missing"),
        (["--stesp", "4"], "Did you mean --steps?"),
    ],
)
def test_what_cannot_work_with_what_is_stored_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    a_run(tmp_path, step=100)
    before = sorted(tmp_path.rglob("*"))
    assert main(["resume", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_network_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    a_run(tmp_path, agent="dreamer")
    config = config_of(["--logdir", str(tmp_path), "--dreamer.model.deter", "64"])
    with pytest.raises(ConfigError, match=r"cannot be changed: dreamer\.model\.deter \d+ -> 64\."):
        preflight(config)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resume"], "Name the run: dreamfleet resume LOGDIR."),
        (["resume", "--steps", "5"], "Name the run"),
        (["resume", "nowhere"], "there is no nowhere/config.json. Name the directory of a run."),
    ],
)
def test_resume_needs_a_run(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


DAMAGED = {
    "cut off": b'{"task": "gym:CartPole',
    "empty": b"",
    "a list": b"[1, 2]",
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "wrong value": b'{"envs": "many"}',
    "wrong options": b'{"env_options": 3}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_configuration_is_called_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    logdir = str(tmp_path)
    for command in (
        ["train", "--logdir", logdir],
        ["resume", logdir],
        ["status", logdir],
        ["plot", logdir],
        ["role", "env", "--logdir", logdir],
        ["role", "env", "--config", str(path)],
    ):
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert f"{path} is not valid. " in said
        assert said.count("\n") == 1
    assert path.read_bytes() == content
