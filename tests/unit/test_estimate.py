"""What a run stores, and which settings a task is started with."""

from __future__ import annotations

import shlex

import numpy as np
import pytest

from dreamfleet import estimate
from dreamfleet.cli.train import config_of
from dreamfleet.config import RunConfig
from dreamfleet.estimate import notes, replay_bytes, step_bytes, suggest
from dreamfleet.presets import preset
from dreamfleet.replay.config import ReplayConfig
from dreamfleet.spaces import Space

FLAGS = {
    "reward": Space(np.float32),
    **{name: Space(bool) for name in ("is_first", "is_last", "is_terminal")},
}
ACTION = {"action": Space(np.int32, (), 0, 3), "reset": Space(bool)}
VECTOR = {**FLAGS, "vector": Space(np.float32, (4,))}


def image(height: int, width: int = 0) -> dict[str, Space]:
    return {**FLAGS, "image": Space(np.uint8, (height, width or height, 3))}


def test_a_step_is_its_columns_and_a_tick() -> None:
    config = RunConfig(agent="random")
    assert step_bytes(config, VECTOR, ACTION) == 8 + 4 + 3 + 16 + 4


def test_the_replay_is_what_is_collected_until_it_is_full() -> None:
    config = RunConfig(agent="random", envs=2, steps=1000, replay=ReplayConfig(5000, chunk=10))
    step = step_bytes(config, VECTOR, ACTION)
    assert replay_bytes(config, VECTOR, ACTION) == (1000 + 2 * 10) * step
    full = RunConfig(agent="random", envs=2, steps=0, replay=ReplayConfig(5000, chunk=10))
    assert replay_bytes(full, VECTOR, ACTION) == 5000 * step


@pytest.mark.parametrize(
    ("task", "obs", "name", "size"),
    [
        ("gym:CartPole-v1", VECTOR, "default", None),
        ("dmc:walker_walk", VECTOR, "dmc_cpu", None),
        ("my:Env", image(64), "pixels", None),
        ("my:Env", image(480, 640), "pixels", (64, 64)),
        ("my:Env", image(50), "pixels", (64, 64)),
    ],
)
def test_the_preset_follows_from_what_is_observed(task, obs, name, size) -> None:
    found = suggest(task, {}, obs, ACTION)
    assert found.preset == name
    assert found.changes.get("env_options", {}).get("size") == size


def test_the_suggested_command_gives_the_suggested_settings() -> None:
    found = suggest("my.module:Env", {"level": 3}, image(480, 640), ACTION)
    words = shlex.split(found.command())
    assert words[:2] == ["dreamfleet", "train"]
    assert config_of(words[2:]).env_options == {**found.config.env_options, "size": (64, 64)}
    assert config_of(words[2:]).experiment() == found.config.experiment()


def test_slow_environments_are_spread_over_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "cores", lambda: 4)
    base = preset("default")
    assert suggest("my:Env", {}, VECTOR, ACTION, steps_per_second=10).changes == {
        "envs_per_process": base.envs // 4
    }
    assert suggest("my:Env", {}, VECTOR, ACTION, single=True).changes == {"envs": 1}


def test_a_replay_that_the_disk_does_not_hold_is_cut() -> None:
    found = suggest("my:Env", {}, image(64), ACTION, disk=1e6)
    assert replay_bytes(found.config, image(64), ACTION) <= 1e6


def test_settings_for_vectors_with_images_are_warned_of() -> None:
    (_, warning) = notes(preset("default"), image(64), ACTION)
    assert "--preset pixels" in warning
    assert len(notes(preset("default"), VECTOR, ACTION)) == 1
