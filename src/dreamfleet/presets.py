"""Presets: whole configurations with a name.

Those of the reference implementation of DreamerV3 have its names and its settings: `published` is
what it calls `defaults`, and all that follow it differ from `published` in what they name. The
others (`default`, `pixels`, `dmc_cpu`) are made for a few CPU cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dreamfleet.agents.dreamer.config import PUBLISHED_SIZES, DreamerConfig
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError, did_you_mean


def _preset(model: str, base: RunConfig | None = None, /, **changes: Any) -> RunConfig:
    """Settings by their name, those of Dreamer without its name and with two underscores for a
    dot. Without a base they change the defaults of the classes."""
    own = RunConfig.__dataclass_fields__
    paths = {name.replace("__", "."): value for name, value in changes.items()}
    given = {p if p.split(".")[0] in own else f"dreamer.{p}": v for p, v in paths.items()}
    base = base or RunConfig(agent_config=DreamerConfig())
    return base.changed({"dreamer.model": model, **given})


_PUBLISHED = _preset(
    "200m", envs=16, envs_per_process=1, actor_batch=0, batch_length=64, train_ratio=32.0, steps=0,
    log_every=120.0, report_every=300.0, save_every=900.0, replay__capacity=5_000_000,
    execution__compute_dtype="bfloat16",
)  # fmt: skip
_SIZES = {f"size{size}": _preset(size, _PUBLISHED) for size in PUBLISHED_SIZES}

PRESETS: Mapping[str, RunConfig] = {
    "default": RunConfig(),
    "pixels": _preset(
        "cpu-tiny", task="bundled:catch", env_options={"size": (32, 32)}, steps=12_000,
        batch_length=16, report_length=16, train_ratio=64.0,
        # One reward an episode is rare: at 3e-3 the entropy collapsed before it was found.
        loss__imag_last=8, loss__horizon=100.0, loss__entropy_scale=2e-2,
        optimizer__learning_rate=1e-3, optimizer__warmup=100,
    ),
    "dmc_cpu": _preset(
        "1m", task="dmc:cartpole_swingup", env_options={"repeat": 2}, steps=25_000,
        envs=4, envs_per_process=4, actor_batch=4, batch_size=16, batch_length=32, report_length=32,
        # The published runs have 512, 12 times the parameters, and imagine from all states; this
        # takes a core half an hour.
        train_ratio=256.0, loss__imag_last=8,
        optimizer__learning_rate=3e-4, optimizer__warmup=200,
    ),
    "published": _PUBLISHED,
    **_SIZES,
    "atari": _preset("200m", _PUBLISHED, task="atari:pong", steps=51_000_000),
    "atari100k": _preset(
        "200m", _PUBLISHED, task="atari100k:pong", envs=1, train_ratio=256.0, steps=110_000
    ),
    "crafter": _preset(
        "200m", _PUBLISHED, task="crafter:reward", envs=1, train_ratio=512.0, steps=1_100_000
    ),
    "dmc_proprio": _preset(
        "1m", _PUBLISHED, task="dmc:walker_walk", train_ratio=1024.0, steps=1_100_000
    ),
    "dmc_vision": _preset(
        "200m", _PUBLISHED, task="dmc:walker_walk", env_options={"obs": "pixels"},
        train_ratio=256.0, steps=1_100_000,
    ),
    "debug": _preset(
        "200m", _PUBLISHED, envs=4, actor_batch=4, batch_size=8, batch_length=10, report_length=5,
        train_ratio=8.0, replay__capacity=10_000,
        # Not the reference's: it ends soon, shows something soon, and runs on a CPU.
        steps=1000, log_every=2.0, envs_per_process=2, execution__compute_dtype="float32",
        model={
            "bins": 5, "units": 8, "stoch": 2, "classes": 4, "deter": 8, "hidden": 3, "blocks": 4,
            "depth": 2, "encoder_layers": 1, "decoder_layers": 1, "reward_layers": 1,
            "continue_layers": 1, "mask_layers": 1, "actor_layers": 1, "critic_layers": 1,
        },
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
        config = config.changed({"dreamer.model": PRESETS[size].agent_config.model})
    return config
