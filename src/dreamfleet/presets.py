"""Presets: whole configurations with a name.

Those of the reference implementation of DreamerV3 have its names and its settings: `published` is
what it calls `defaults`, and all that follow it differ from `published` in what they name. The
others (`default`, `pixels`, `dmc_cpu`) are made for a few CPU cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dreamfleet.agents.dreamer.config import (
    PUBLISHED_SIZES,
    DreamerConfig,
    ExecutionConfig,
    LossConfig,
    OptimizerConfig,
    size_preset,
)
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError, did_you_mean
from dreamfleet.replay.config import ReplayConfig

_PUBLISHED = RunConfig(
    envs=16,
    envs_per_process=1,
    actor_batch=0,
    batch_length=64,
    train_ratio=32.0,
    steps=0,
    log_every=120.0,
    report_every=300.0,
    save_every=900.0,
    replay=ReplayConfig(capacity=5_000_000),
    agent_config=DreamerConfig(
        model=size_preset("200m"), execution=ExecutionConfig(compute_dtype="bfloat16")
    ),
)


def _published(size: str = "200m", **changes: Any) -> RunConfig:
    """The published settings with another model and other settings."""
    return _PUBLISHED.changed({"dreamer.model": size, **changes})


_SIZES = {f"size{size}": _published(size) for size in PUBLISHED_SIZES}

PRESETS: Mapping[str, RunConfig] = {
    "default": RunConfig(),
    "pixels": RunConfig(
        task="bundled:catch",
        env_options={"size": (32, 32)},
        batch_length=16,
        report_length=16,
        train_ratio=64.0,
        steps=12_000,
        agent_config=DreamerConfig(
            model=size_preset("cpu-tiny"),
            # One reward an episode is rare: at 3e-3 the entropy collapsed before it was found.
            loss=LossConfig(imag_last=8, horizon=100.0, entropy_scale=2e-2),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup=100),
        ),
    ),
    "dmc_cpu": RunConfig(
        task="dmc:cartpole_swingup",
        env_options={"repeat": 2},
        envs=4,
        envs_per_process=4,
        actor_batch=4,
        batch_size=16,
        batch_length=32,
        report_length=32,
        # The published runs have 512, 12 times the parameters, and imagine from all states; this
        # takes a core half an hour.
        train_ratio=256.0,
        steps=25_000,
        agent_config=DreamerConfig(
            model=size_preset("1m"),
            loss=LossConfig(imag_last=8),
            optimizer=OptimizerConfig(learning_rate=3e-4, warmup=200),
        ),
    ),
    "published": _PUBLISHED,
    **_SIZES,
    "atari": _published(task="atari:pong", steps=51_000_000),
    "atari100k": _published(task="atari100k:pong", envs=1, train_ratio=256.0, steps=110_000),
    "crafter": _published(task="crafter:reward", envs=1, train_ratio=512.0, steps=1_100_000),
    "dmc_proprio": _published("1m", task="dmc:walker_walk", train_ratio=1024.0, steps=1_100_000),
    "dmc_vision": _published(
        task="dmc:walker_walk", env_options={"obs": "pixels"}, train_ratio=256.0, steps=1_100_000
    ),
    "debug": replace(
        _PUBLISHED,
        envs=4,
        actor_batch=4,
        batch_size=8,
        batch_length=10,
        report_length=5,
        train_ratio=8.0,
        replay=ReplayConfig(capacity=10_000),
        # Not the reference's: it ends soon, shows something soon, and runs on a CPU.
        steps=1000,
        log_every=2.0,
        envs_per_process=2,
        agent_config=DreamerConfig(
            model=replace(
                size_preset("200m"), bins=5, units=8, stoch=2, classes=4, deter=8, hidden=3,
                blocks=4, depth=2, encoder_layers=1, decoder_layers=1, reward_layers=1,
                continue_layers=1, mask_layers=1, actor_layers=1, critic_layers=1,
            ),
        ),
    ),
}  # fmt: skip


def preset(name: str) -> RunConfig:
    """The configuration of this name, such as `atari`; a size may follow: `atari,size50m`."""
    first, *sizes = name.split(",")
    for each in (first, *sizes):
        if each not in PRESETS:
            hint = did_you_mean(each, PRESETS, f"choose from {', '.join(PRESETS)}.")
            raise ConfigError(f"There is no preset {each!r}: {hint}")
    config = PRESETS[first]
    for size in sizes:
        if size not in _SIZES:
            raise ConfigError(
                f"{name!r} names two whole presets: after the first one only a size may follow, "
                f"{', '.join(_SIZES)}."
            )
        agent = replace(config.agent_config, model=PRESETS[size].agent_config.model)
        config = replace(config, agent_config=agent)
    return config
