"""Presets: whole configurations with a name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace

from dreamfleet.agents.dreamer.config import DreamerConfig, LossConfig, OptimizerConfig, size_preset
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.replay.config import ReplayConfig

PRESETS: Mapping[str, RunConfig] = {
    "default": RunConfig(),
    "debug": replace(
        RunConfig(),
        envs=2,
        envs_per_process=1,
        actor_batch=2,
        batch_size=4,
        batch_length=8,
        report_length=8,
        steps=1000,
        log_every=2.0,
        agent_config=DreamerConfig(model=size_preset("debug")),
    ),
    "pixels": replace(
        RunConfig(),
        task="bundled:catch",
        env_options={"size": (32, 32)},
        batch_length=16,
        report_length=16,
        train_ratio=64.0,
        steps=12_000,
        agent_config=DreamerConfig(
            model=size_preset("cpu-tiny"),
            # A reward that comes once an episode is found by trying: at 3e-3 the policy had made up
            # its mind, for the worse, before the model saw the ball.
            loss=LossConfig(imag_last=8, horizon=100.0, entropy_scale=2e-2),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup=100),
        ),
    ),
    "dmc_proprio": RunConfig(
        task="dmc:cartpole_swingup",
        env_options={"repeat": 2},
        envs=4,
        envs_per_process=4,
        actor_batch=4,
        batch_size=16,
        batch_length=32,
        report_length=32,
        # The published run trains on 512 replayed steps a step, with 12 times the parameters and an
        # imagination from all states; this is what a core holds for half an hour.
        train_ratio=256.0,
        steps=25_000,
        agent_config=DreamerConfig(
            model=size_preset("1m"),
            loss=LossConfig(imag_last=8),
            optimizer=OptimizerConfig(learning_rate=3e-4, warmup=200),
        ),
    ),
    "published": RunConfig(
        envs=16,
        envs_per_process=1,
        actor_batch=0,
        batch_length=64,
        train_ratio=32.0,
        steps=0,
        replay=ReplayConfig(capacity=5_000_000),
        agent_config=DreamerConfig(model=size_preset("200m")),
    ),
}
"""default: gym:CartPole-v1 on two processor cores, and other tasks with few numbers. pixels: small
images on two cores. dmc_proprio: dm_control from its own state, half an hour on a core. debug: as
small as it gets. published: the sizes of the paper, for an accelerator."""


def preset(name: str) -> RunConfig:
    """The configuration of this name."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(PRESETS)}."
        raise ConfigError(f"There is no preset {name!r}: {hint}")
    return PRESETS[name]
