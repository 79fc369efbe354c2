"""Small agents and batches for the agent's tests."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from dreamfleet import Space
from dreamfleet.agents import (
    DreamerConfig,
    ExecutionConfig,
    LossConfig,
    OptimizerConfig,
    size_preset,
)

# Programs are found again by their content, so that agents of one kind compile once.
_CACHE = os.environ.get("DREAMFLEET_TESTS_CACHE", "")

FLAGS = {
    "reward": Space(np.float32),
    "is_first": Space(bool),
    "is_last": Space(bool),
    "is_terminal": Space(bool),
}
VECTOR = {"vector": Space(np.float32, (5,)), "token": Space(np.int32, (), 0, 4)} | FLAGS
IMAGE = {"image": Space(np.uint8, (16, 16, 3))} | FLAGS
MIXED = VECTOR | {"image": Space(np.uint8, (16, 16, 3)), "depth": Space(np.uint8, (16, 16, 1))}
ACTIONS = {
    "move": Space(np.float32, (2,), -1, 1),
    "button": Space(np.int32, (), 0, 3),
    "keys": Space(np.int32, (2,), 0, [2, 4]),
    "reset": Space(bool),
}


def config(**execution: Any) -> DreamerConfig:
    return DreamerConfig(
        model=size_preset("debug"),
        loss=LossConfig(imag_length=3),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=2),
        execution=replace(ExecutionConfig(cache_dir=_CACHE), **execution),
    )


def random_batch(
    obs: dict[str, Space],
    act: dict[str, Space],
    size: int = 4,
    length: int = 6,
    context: int = 1,
    seed: int = 0,
    model: str = "debug",
) -> dict[str, np.ndarray]:
    """What a replay would send: observations, actions, latents, ids."""
    rng = np.random.default_rng(seed)
    steps = (size, length + context)
    sizes = size_preset(model)
    spaces = {k: v for k, v in (obs | act).items() if k != "reset"}
    batch = {
        key: np.stack([space.sample(rng) for _ in range(size * steps[1])]).reshape(
            *steps, *space.shape
        )
        for key, space in spaces.items()
    }
    batch["is_first"] = rng.random(steps) < 0.2
    batch["is_last"] = rng.random(steps) < 0.2
    batch["is_terminal"] = batch["is_last"] & (rng.random(steps) < 0.5)
    index = rng.integers(sizes.classes, size=(*steps, sizes.stoch))
    batch["dyn/deter"] = np.tanh(rng.standard_normal((*steps, sizes.deter))).astype(np.float32)
    batch["dyn/stoch"] = np.eye(sizes.classes, dtype=np.float32)[index]
    batch["stepid"] = rng.integers(256, size=(*steps, 20)).astype(np.uint8)
    return batch


def observations(obs: dict[str, Space], rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    result = {key: np.stack([space.sample(rng) for _ in range(rows)]) for key, space in obs.items()}
    result["is_first"] = np.zeros(rows, bool)
    return result
