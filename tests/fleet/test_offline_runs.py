"""Learning from what other runs have collected, with and without environments."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import left_behind, parts, rows, small_run, stored_streams
from offline_parts import Pretrained, Watching, no_environment

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.factories import agent as make_agent
from dreamfleet.fleet.factories import factories
from dreamfleet.fleet.factories import replay as make_replay
from dreamfleet.fleet.preflight import preflight
from dreamfleet.fleet.workers import fleet_workers
from dreamfleet.offline import check_sources, copy_steps, find_source
from dreamfleet.parallel import combined
from dreamfleet.policy import BLUEPRINT, read_blueprint
from dreamfleet.roles.replay import ReplayService, limiter_for


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the random agent that has collected 600 steps."""
    logdir = tmp_path_factory.mktemp("collected")
    config = small_run(logdir, launcher="serial")
    combined(**parts(config), args=config)
    return logdir


def test_a_run_learns_without_environments(collected: Path, tmp_path: Path) -> None:
    """Steps count updates, so the run ends after as many and its metrics have an axis."""
    config = small_run(tmp_path, offline=(str(collected),), steps=40)
    preflight(config, no_environment)
    blueprint = read_blueprint(collected)
    agent = partial(Watching, blueprint.obs_space, blueprint.act_space)
    fleet = parts(config, make_agent=agent, make_env_train=no_environment)
    combined(**fleet, args=config)
    assert left_behind() == []
    assert not any("env" in path.name for path in (tmp_path / "logs").iterdir())
    logged = [row for row in rows(tmp_path / "metrics.jsonl") if "train/seen" in row]
    assert logged
    assert logged[-1]["step"] >= 40
    assert logged[-1]["train/seen"] == config.batch_size * config.window
    ours, theirs = (read(path / "replay") for path in (tmp_path, collected))
    assert ours == theirs
    config = replace(config, steps=60, launcher="serial")
    combined(**parts(config, make_agent=agent, make_env_train=no_environment), args=config)
    assert read(tmp_path / "replay") == theirs  # nothing was taken twice


def read(directory: Path) -> dict[int, bytes]:
    """Rewards of every stream, to compare."""
    return {key: s["reward"].tobytes() for key, s in stored_streams(directory).items()}


def test_a_new_run_begins_with_the_steps_of_another(collected: Path, tmp_path: Path) -> None:
    config = small_run(tmp_path, prefill=(str(collected / "replay"),), steps=200, launcher="serial")
    preflight(config)
    combined(**parts(config), args=config)
    before = sum(len(s["reward"]) for s in stored_streams(collected / "replay").values())
    after = sum(len(s["reward"]) for s in stored_streams(tmp_path / "replay").values())
    assert after >= before + 200


@pytest.mark.parametrize("launcher", ["local", "serial"])
def test_a_run_is_trained_before_it_acts(collected: Path, tmp_path: Path, launcher: str) -> None:
    """Once: a resumed run makes the updates that its steps ask for, and no others."""
    config = small_run(
        tmp_path, prefill=(str(collected),), pretrain=20, steps=80, launcher=launcher
    )
    preflight(config)
    blueprint = read_blueprint(collected)
    agent = partial(Pretrained, blueprint.obs_space, blueprint.act_space)
    for steps, where in ((80, launcher), (160, "serial")):
        config = replace(config, steps=steps, launcher=where)
        combined(**parts(config, make_agent=agent), args=config)
        run = Checkpoint(tmp_path / "ckpt" / "agent").load()
        made = int(run.parts["run"]["updates"])
        # Acting ends at once, and learning a little later.
        assert 20 + steps // 8 <= made <= 20 + steps // 8 + 16
        assert made == int(run.parts["agent"]["counters/updates"])


def test_a_share_of_each_batch_is_drawn_from_the_first_steps(
    collected: Path, tmp_path: Path
) -> None:
    config = small_run(
        tmp_path, prefill=(str(collected),), offline_fraction=0.5, steps=200, train_ratio=0.0
    )

    def opened(args: RunConfig = config) -> ReplayService:
        make, limiter = factories(args), limiter_for(args)
        train, evaluation = make.make_replay_train(), make.make_replay_eval()  # type: ignore[operator]
        service = ReplayService(
            *(train, evaluation, make.make_stream, limiter, args, threading.Event())  # type: ignore[arg-type]
        )
        service.attach({})
        return service

    service = opened()
    first = service.sample("train")
    step = {key: value[:1, -1] for key, value in first.items() if key != "stepid"}
    step |= {"reward": np.full(1, 77, np.float32), "is_first": np.zeros(1, bool)}
    for number in range(2):
        if number:  # also if there is more in the meantime
            service.close()
            service = opened()
        for seq in range(8):
            service.add_batch(step, np.zeros(1, np.int64), False, f"actor-{number}", seq)
        for _ in range(4):
            rewards = service.sample("train")["reward"]
            assert (rewards == 77).any(1).sum() == 1, "one of two sequences"
    service.close()
    small = replace(config, replay=replace(config.replay, capacity=300), logdir=tmp_path / "small")
    with pytest.raises(ConfigError, match=r"replay.capacity=300 holds fewer than \d+: raise it"):
        opened(small)


def test_what_mixes_needs_sources(tmp_path: Path) -> None:
    for changes in ({"pretrain": 10}, {"offline_fraction": 0.5}):
        with pytest.raises(ConfigError, match="use the steps of prefill"):
            check_sources(small_run(tmp_path, **changes))


def test_states_of_another_agent_are_replaced(collected: Path, tmp_path: Path) -> None:
    """The random agent stored no states; a Dreamer is given zeros of its own shapes."""
    config = small_run(tmp_path, offline=(str(collected),))
    config = config.changed({"agent": "dreamer", "dreamer.model": "debug"})
    replay = make_replay(config, "replay")
    try:
        copy_steps(replay, config)
        window = replay.sample(3, "train")
        assert window["dyn/deter"].shape == (3, config.window, 16)
        assert window["dyn/stoch"].shape == (3, config.window, 4, 4)
        assert not window["dyn/deter"].any()
        states = {"stepid": window["stepid"], "dyn/deter": window["dyn/deter"] + 1}
        assert replay.update(states) == 3 * config.window
    finally:
        replay.close()
    agent = make_agent(config.changed({"agent": "random"}))
    assert agent.obs_space["vector"].shape == np.shape(window["vector"])[2:]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agent": "dreamer"}, "collected with another agent"),
        ({"task": "bundled:catch"}, "collected with another task"),
        ({"prefill": ("nowhere",)}, "nowhere holds no replay"),
    ],
)
def test_steps_that_do_not_fit_are_refused(
    collected: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = small_run(tmp_path, prefill=(str(collected),))
    with pytest.raises(ConfigError, match=words):
        preflight(config.changed(changes), no_environment)
    with pytest.raises(ConfigError, match="own directory"):
        preflight(replace(config, logdir=collected), no_environment)
    offline = replace(config, batch_length=5000, offline=config.prefill, prefill=())
    replay = make_replay(offline, "replay")
    try:
        with pytest.raises(ConfigError, match="no sequence of 5000 steps"):
            copy_steps(replay, offline)
    finally:
        replay.close()
    with pytest.raises(ConfigError, match="name all directories after offline"):
        RunConfig(offline=("a",), prefill=("b",))


def test_runs_that_are_learned_from_together_have_to_fit_each_other(
    collected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(collected, copy)
    config = small_run(tmp_path, offline=(str(collected), str(copy)))
    preflight(config, no_environment)
    for theirs in ({"task": "bundled:catch"}, {"agent": "dreamer"}):
        shutil.copytree(collected, other, dirs_exist_ok=True)
        blueprint = read_blueprint(collected)
        changed = replace(blueprint, config=blueprint.config.changed(theirs))
        parts = {"agent": {}, BLUEPRINT: changed.save()}
        Checkpoint(other / "ckpt" / "agent").save(parts, step=10**9)
        with pytest.raises(ConfigError, match=r"other were collected with another.*with those"):
            preflight(replace(config, offline=(str(collected), str(other))), no_environment)
    arguments = ["train", "--offline", str(collected), str(copy), "--task", "bundled:catch"]
    assert main(arguments) == 2
    assert "bundled:dummy: leave it out." in capsys.readouterr().err


def test_a_replay_without_a_checkpoint_is_said(tmp_path: Path) -> None:
    (tmp_path / "replay").mkdir()
    with pytest.raises(ConfigError, match="has no checkpoint"):
        find_source(tmp_path)


def test_the_command_trains_offline(
    collected: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--agent", "random", "--steps", "30", "--log-every", "0.5"]
    short = ["--batch-size", "2", "--batch-length", "4"]
    logdir = ["--logdir", str(tmp_path / "run")]
    shutil.copytree(collected, tmp_path / "copy")
    both = ["--offline", str(collected), str(tmp_path / "copy")]
    assert main(["train", *both, *arguments, *short, *logdir, "--eval-episodes", "2"]) == 0
    said = capfd.readouterr().out
    assert "Training random on bundled:dummy" in said
    assert "2 episodes" in said
    blueprint = read_blueprint(tmp_path / "run")
    assert blueprint.config.offline == (str(collected), str(tmp_path / "copy"))
    assert blueprint.config.env_options == {"length": 25, "size": (8, 8)}
    workers = fleet_workers(factories(blueprint.config), blueprint.config)
    assert [worker.name for worker in workers] == ["agent", "replay", "logger"]
