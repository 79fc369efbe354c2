"""What a run is said to cost: the arithmetic, and that it follows the networks and measurements."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from dreamfleet import estimate as estimating
from dreamfleet.agents import DreamerConfig, find_agent, size_preset
from dreamfleet.agents.dreamer.config import LossConfig
from dreamfleet.cli.train import config_of
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.estimate import (
    Layer,
    Machine,
    Parts,
    cost,
    estimate,
    fleet_speed,
    forecast,
    memory_warnings,
    parts_of,
    step_bytes,
    suggest,
    this_machine,
    update_cost,
    warnings,
    weights,
)
from dreamfleet.presets import preset
from dreamfleet.replay.config import ReplayConfig
from dreamfleet.spaces import Space

FLAGS = {
    "reward": Space(np.float32),
    **{name: Space(bool) for name in ("is_first", "is_last", "is_terminal")},
}
ACTION = {"action": Space(np.int32, (), 0, 3), "reset": Space(bool)}
TWO_CORES = Machine(core_speed=1024**3 / 0.0292, cores=2, memory=8e9)
"""Where the measurements were made: a product takes 14.6 ms on both cores."""


def vector(width: int) -> dict[str, Space]:
    return {**FLAGS, "vector": Space(np.float32, (width,))}


def image(height: int, width: int = 0) -> dict[str, Space]:
    return {**FLAGS, "image": Space(np.uint8, (height, width or height, 3))}


@pytest.fixture(autouse=True)
def on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_a_layer_costs_its_product_and_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "_OUTPUT", 10.0)
    assert cost([Layer(2, 3), Layer(5, 1, times=4)]) == 3 * (2 + 10) + 4 * (5 + 10)
    assert weights([Layer(2, 3), Layer(5, 7)]) == 6 + 35


def test_an_update_is_replayed_and_imagined_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "_OUTPUT", 0.0)
    one = [Layer(1, 1)]
    settings = DreamerConfig(loss=LossConfig(imag_last=0, imag_length=15))
    config = RunConfig(batch_size=2, batch_length=3, agent_config=settings)
    # 6 replayed steps of four parts with gradients; 90 imagined steps of dynamics and policy; heads
    # on 96 states: predictions, policy with gradients, critic with gradients and its average.
    needed = 3 * 6 * 4 + 90 * 2 + 96 * (1 + 3 + 4)
    assert update_cost(config, Parts(one, one, one, one, one)) == needed


@pytest.mark.parametrize("size", ["debug", "cpu-tiny"])
def test_the_layers_are_those_of_the_networks(size: str) -> None:
    settings = DreamerConfig(size_preset(size))
    obs = vector(5)
    agent: Any = find_agent("dreamer").make(obs, ACTION, settings, seed=0)
    names = ("encoder", "dynamics", "decoder", "reward", "cont", "actor", "critic")
    saved: Mapping[str, Any] = agent.save()
    kernels = [
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(saved)
        if "kernel" in (text := jax.tree_util.keystr(path))
        and any(f"nets/{name}" in text for name in names)
    ]
    parts = parts_of(settings.model, obs, ACTION)
    every = [*parts.world, *parts.core, *parts.predictions, *parts.actor, *parts.critic]
    assert weights(every) == sum(kernels)


@pytest.mark.parametrize(
    ("obs", "size", "batch", "last", "cores", "measured"),
    [
        (vector(24), "1m", (16, 64), 0, 2, 0.450),
        (image(64), "1m", (16, 64), 0, 2, 2.278),
        (vector(4), "cpu-tiny", (16, 32), 8, 1, 0.071),
        (vector(4), "cpu-tiny", (16, 32), 8, 2, 0.071),
        (image(32), "cpu-tiny", (16, 16), 8, 1, 0.190),
    ],
)
def test_the_estimate_is_near_what_was_measured(
    obs: dict[str, Space],
    size: str,
    batch: tuple[int, int],
    last: int,
    cores: int,
    measured: float,
) -> None:
    settings = DreamerConfig(size_preset(size), loss=LossConfig(imag_last=last))
    config = RunConfig(batch_size=batch[0], batch_length=batch[1], agent_config=settings)
    found = estimate(config, obs, ACTION, replace(TWO_CORES, cores=cores))
    assert found.updates is not None
    assert 1 / 1.5 < found.updates * measured < 1.5


def test_rates_follow_from_the_train_ratio_and_the_environments() -> None:
    config = preset("default")  # 512 replayed steps an update, 64 for each step: 8 steps an update
    found = estimate(config, vector(4), ACTION, TWO_CORES)
    assert found.updates is not None
    assert found.steps == pytest.approx(8 * found.updates)
    assert found.seconds(config) == pytest.approx(30_000 / found.steps)
    assert found.seconds(config, collected=10) == pytest.approx(3000)
    assert estimate(replace(config, train_ratio=0.0), vector(4), ACTION, TWO_CORES).steps is None
    two = replace(config, envs_per_process=4)
    assert fleet_speed(config, 100, TWO_CORES) == 100
    assert fleet_speed(two, 100, TWO_CORES) == 200
    assert fleet_speed(replace(two, envs_per_process=1), 100, TWO_CORES) == 200


def test_disk_is_what_the_replay_stores() -> None:
    config = replace(
        preset("default"), agent="random", agent_config=None, steps=0, envs=2,
        replay=ReplayConfig(capacity=1000, chunk=10),
    )  # fmt: skip
    # A tick, the reward, three flags, five floats, an action.
    assert step_bytes(config, vector(5), ACTION) == 8 + 4 + 3 + 20 + 4
    assert estimate(config, vector(5), ACTION, TWO_CORES).disk == 1000 * 39, "the capacity"
    short = replace(config, steps=100)
    assert estimate(short, vector(5), ACTION, TWO_CORES).disk == 120 * 39
    dreamer = preset("default")
    latent = 4 * (128 + 8 * 8)
    assert step_bytes(dreamer, vector(5), ACTION) == 39 + latent


def test_rounds_of_evaluation_load_a_second_agent_and_store_nothing() -> None:
    config = replace(preset("default"), eval_envs=2)
    continuous = estimate(config, vector(5), ACTION, TWO_CORES)
    rounds = estimate(replace(config, eval_every=1000), vector(5), ACTION, TWO_CORES)
    assert 1e9 < rounds.memory - continuous.memory < 2e9
    alone = estimate(replace(config, eval_envs=0), vector(5), ACTION, TWO_CORES)
    assert alone.disk == rounds.disk < continuous.disk
    other = replace(config, agent="random", agent_config=None)
    there = estimate(replace(other, eval_every=1000), vector(5), ACTION, TWO_CORES).memory
    assert there > estimate(other, vector(5), ACTION, TWO_CORES).memory


def test_a_gray_image_taken_for_integers_is_seen_to_need_gigabytes() -> None:
    integers = {**FLAGS, "image": Space(np.int32, (84, 84), 0, 256)}
    found = estimate(preset("default"), integers, ACTION, TWO_CORES)
    assert 4e9 < found.memory < 20e9
    (memory, speed) = warnings(preset("default"), integers, ACTION, replace(TWO_CORES, memory=9e9))
    assert "GB of memory are expected (an estimate), and this machine has 9.0 GB" in memory
    assert "updates/s are expected" in speed


def test_an_accelerator_and_other_agents_are_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(preset("default"), agent="random", agent_config=None)
    assert estimate(other, vector(4), ACTION, TWO_CORES).updates is None
    assert warnings(other, image(512), ACTION) == []
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert estimate(preset("default"), image(512), ACTION, TWO_CORES).updates is None
    assert warnings(preset("default"), image(512), ACTION, TWO_CORES) == []


def test_this_machine_is_measured() -> None:
    machine = this_machine()
    assert machine.core_speed > 1e8
    assert machine.cores >= 1
    assert machine.memory > 1e8


SUGGESTED = {
    "vector": (vector(4), {}, 1e5, "default", ""),
    "slow": (vector(4), {}, 20.0, "default", "--envs-per-process 4 --train-ratio 128"),
    "very slow": (vector(4), {}, 0.5, "default", "--envs-per-process 4 --train-ratio 512"),
    "large image": (image(96), {}, 1e5, "pixels", "--env-options 'size=[64,64]'"),
    "odd image": (image(20), {}, 1e5, "pixels", ""),
    "option": (
        image(80), {"size": (80, 80), "level": "a b"}, 1e5, "pixels",
        "--env-options 'size=[80,80]' 'level=a b'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUGGESTED)
def test_a_suggestion_can_be_pasted(name: str) -> None:
    obs, options, rate, preset_name, flags = SUGGESTED[name]
    found = suggest("my:env", options, obs, ACTION, TWO_CORES, steps_per_second=rate)
    assert found.preset == preset_name
    assert found.flags().removeprefix("--preset pixels").strip() == flags
    command = shlex.split(found.command())
    assert command[:2] == ["dreamfleet", "train"]
    typed = config_of(command[2:])
    assert typed == replace(found.config, logdir=typed.logdir), "it is what was estimated"


def test_a_suggestion_fits_the_disk_and_the_suite() -> None:
    found = suggest("dmc:walker_walk", {}, vector(24), ACTION, TWO_CORES, disk=1e7)
    assert found.preset == "dmc_cpu"
    assert found.estimate.disk > 0
    assert found.config.replay.capacity * step_bytes(found.config, vector(24), ACTION) <= 8e6


def test_an_image_task_with_settings_for_vectors_is_warned_of() -> None:
    assert warnings(preset("default"), vector(4), ACTION, TWO_CORES) == []
    (words,) = warnings(preset("default"), image(128), ACTION, TWO_CORES)
    assert words.startswith("Warning: about 0.")
    assert "updates/s are expected on this machine" in words
    assert "with the preset for vectors" in words
    assert "--preset pixels --env-options" in words
    assert "\n" not in words
    (small,) = warnings(preset("default"), image(32), ACTION, TWO_CORES)
    assert "an estimate: --preset pixels is for images" in small
    assert warnings(preset("pixels"), image(32), ACTION, TWO_CORES) == []
    (large,) = warnings(preset("pixels"), image(256), ACTION, TWO_CORES)
    assert "--preset pixels --env-options 'size=[64,64]' makes about" in large


def test_a_run_of_weeks_is_warned_of() -> None:
    config = replace(preset("dmc_cpu"), steps=100_000_000)
    (words,) = warnings(config, vector(4), ACTION, TWO_CORES)
    assert " d " in words
    assert "for all steps" in words


def test_an_agent_larger_than_the_memory_is_refused() -> None:
    config = replace(preset("default"), agent_config=DreamerConfig(size_preset("400m")))
    with pytest.raises(ConfigError, match=r"take .* GB, and this machine has 2.0 GB of memory"):
        warnings(config, vector(4), ACTION, replace(TWO_CORES, memory=2e9))


def test_a_batch_whose_activations_cannot_fit_is_refused_and_one_that_may_is_warned_of() -> None:
    config = replace(preset("default"), agent_config=DreamerConfig(size_preset("400m")))
    large = replace(TWO_CORES, memory=24e9)
    words = r"activations of more than .* together .* and this machine has 24.0 GB .* --batch-size"
    with pytest.raises(ConfigError, match=words):
        warnings(replace(config, batch_size=64, batch_length=64), image(64), ACTION, large)
    # Each of several hosts has a part of the batch.
    shared = replace(config, batch_size=64, batch_length=64, hosts=4)
    for fitting in (shared, replace(config, batch_size=16, batch_length=64)):
        (memory,) = memory_warnings(fitting, image(64), ACTION, large)
        assert "are expected (an estimate), and this machine has 24.0 GB" in memory


def test_the_forecast_names_what_needs_memory_and_what_there_is() -> None:
    settings = DreamerConfig(size_preset("12m"))
    config = replace(preset("default"), agent_config=settings, eval_every=9)
    words = forecast(config, vector(24), ACTION, 50e6, TWO_CORES)
    needs = estimate(config, vector(24), ACTION, TWO_CORES, 50e6).needs
    parts = parts_of(settings.model, vector(24), ACTION)
    every = [*parts.world, *parts.core, *parts.predictions, *parts.actor, *parts.critic]
    count = weights(every)
    assert needs["parameters"] == 4 * count
    assert needs["optimizer"] == 8 * count
    for name, size in needs.items():
        assert f"{name} {size / 1e6:.0f} MB" in words or f"{name} {size / 1e9:.1f} GB" in words
    assert f"about {sum(needs.values()) / 1e9:.1f} GB of 8.0 GB" in words
    assert "of disk, of which memory holds what there is room for" in words
    other = replace(config, agent="random", agent_config=None, remote_envs=True, bind="0.0.0.0")
    assert "environments 0 MB" in forecast(other, vector(24), ACTION, 0, TWO_CORES)


def test_only_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of one's own may be smaller, split parameters lie on several machines, and an
    accelerator has its own memory."""
    large = DreamerConfig(size_preset("400m"))
    little = replace(TWO_CORES, memory=2e9)

    def tried(settings: DreamerConfig) -> list[str]:
        config = replace(preset("default"), agent_config=settings)
        return memory_warnings(config, vector(4), ACTION, little)

    with pytest.raises(ConfigError, match=r"optimizer .* together .* GB, and this machine has 2.0"):
        tried(large)
    own = replace(large.model, encoder="somebody:Encoder")
    assert "expected (an estimate)" in tried(replace(large, model=own))[0]
    split = replace(large.execution, shard_parameters=True)
    assert "expected (an estimate)" in tried(replace(large, execution=split))[0]
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert tried(large) == []
