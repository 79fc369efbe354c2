"""Presets: whole configurations with a name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace

from dreamfleet.agent.config import DreamerConfig, LossConfig, OptimizerConfig, size_preset
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError

_DEFAULT = RunConfig(
    envs=8,
    envs_per_process=8,
    actor_batch=8,
    batch_size=16,
    batch_length=32,
    report_length=32,
    train_ratio=256.0,  # an update for every second step: on two cores, data is what is scarce
    steps=9_000,
    dreamer=DreamerConfig(
        model=size_preset("cpu-tiny"),
        # Imagining from the last steps only makes an update several times cheaper. With the
        # published horizon of 333 steps, values are near 300 and differ by little between a good
        # and a bad place on the track: a policy that had held 500 drifted off it again.
        loss=LossConfig(imag_last=8, horizon=100.0, entropy_scale=3e-3),
        # A rate that fast finds a policy in 2,500 updates and then walks past it; falling to a
        # tenth by the last update, it stays there.
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=100, decay=4_500),
    ),
)

PRESETS: Mapping[str, RunConfig] = {
    "default": _DEFAULT,
    "debug": replace(
        _DEFAULT,
        envs=2,
        envs_per_process=1,
        actor_batch=2,
        batch_size=4,
        batch_length=8,
        report_length=8,
        steps=1000,
        log_every=2.0,
        dreamer=DreamerConfig(model=size_preset("debug")),
    ),
    "pixels": replace(
        _DEFAULT,
        task="bundled:catch",
        env_options={"size": (32, 32)},
        batch_length=16,
        report_length=16,
        train_ratio=64.0,
        steps=20_000,
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
        train_ratio=256.0,
        steps=25_000,
        dreamer=DreamerConfig(
            model=size_preset("1m"),
            loss=LossConfig(imag_last=8),
            optimizer=OptimizerConfig(learning_rate=3e-4, warmup=200),
        ),
    ),
    "published": RunConfig(
        envs=16,
        eval_envs=0,
        train_ratio=32.0,
        replay_capacity=5_000_000,
        dreamer=DreamerConfig(model=size_preset("200m")),
    ),
}
"""default: gym:CartPole-v1 on two processor cores. debug: as small as it gets. published: the sizes
of the publication, for an accelerator."""


def preset(name: str) -> RunConfig:
    """The configuration of this name."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(PRESETS)}."
        raise ConfigError(f"There is no preset {name!r}: {hint}")
    return PRESETS[name]
