"""What a run's parts are made of."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.config import RunConfig
from dreamfleet.fleet.factories import logger


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
