"""What a run's parts are made of."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.config import RunConfig
from dreamfleet.fleet.factories import logger, replay
from dreamfleet.replay import Fractions, Mixture, ReplayConfig, Uniform


def test_weights_and_biases_is_told_the_configuration_and_where_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    package = types.ModuleType("wandb")
    package.init = lambda **options: told.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    config = RunConfig(logdir=tmp_path, outputs=("wandb",), seed=3)
    for each in (config, replace(config, steps=7), replace(config, logdir=tmp_path / "other")):
        logger(each)
    first, again, other = told
    assert first["config"]["seed"] == 3
    assert first["config"]["dreamer"]["loss"]["horizon"] == config.agent_config.loss.horizon
    assert (again["config"]["steps"], again["allow_val_change"]) == (7, True)
    assert first["id"] == again["id"] != other["id"]


def test_the_training_replay_samples_as_the_settings_say(tmp_path: Path) -> None:
    settings = ReplayConfig(100, 16, 10**6, online=False, fractions=Fractions(0.5, 0.3, 0.2))
    config = RunConfig(logdir=tmp_path, replay=settings)
    with replay(config, "replay") as train, replay(config, "eval_replay") as evaluation:
        assert isinstance(train._selector, Mixture)
        assert train._selector.fractions.tolist() == [0.5, 0.3, 0.2]
        assert (train.capacity, train.chunk, train.max_bytes) == (100, 16, 10**6)
        assert not train.online
        assert isinstance(evaluation._selector, Uniform)
