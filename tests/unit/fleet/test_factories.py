"""What a run's parts are made of."""

from __future__ import annotations

import re
import sys
import types
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import fixed_address

from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env, noop
from dreamfleet.fleet.factories import logger, replay, stream
from dreamfleet.replay import Fractions, Mixture, NotEnoughDataError, ReplayConfig, Uniform
from dreamfleet.spaces import FLAGS


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


def test_a_run_with_a_port_serves_its_metrics(tmp_path: Path) -> None:
    port = int(fixed_address().rpartition(":")[2])
    outputs = logger(RunConfig(logdir=tmp_path / "mine", outputs=(), metrics_port=port))
    try:
        outputs.write(3, {"train/loss": 0.5})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert b'dreamfleet_train_loss{run="mine"} 0.5' in answer.read()
    finally:
        outputs.close()


def test_the_training_replay_samples_as_the_settings_say(tmp_path: Path) -> None:
    settings = ReplayConfig(100, 16, 10**6, online=False, fractions=Fractions(0.5, 0.3, 0.2))
    config = RunConfig(logdir=tmp_path, replay=settings)
    with replay(config, "replay") as train, replay(config, "eval_replay") as evaluation:
        assert isinstance(train._selector, Mixture)
        assert train._selector.fractions.tolist() == [0.5, 0.3, 0.2]
        assert (train.capacity, train.chunk, train.max_bytes) == (100, 16, 10**6)
        assert not train.online
        assert isinstance(evaluation._selector, Uniform)


def test_evaluation_data_is_for_reports(tmp_path: Path) -> None:
    """A tenth of the capacity, and sequences as long as those of a report."""
    config = RunConfig(
        logdir=tmp_path, replay=ReplayConfig(95), batch_length=64, report_length=32, eval_envs=2
    )
    with replay(config, "replay") as train, replay(config, "eval_replay") as evaluation:
        assert (train.length, train.capacity) == (65, 95)
        assert (evaluation.length, evaluation.capacity) == (33, 10)
        batches = stream(config, train, "report")
        with pytest.raises(NotEnoughDataError):
            next(batches)
        for number in range(70):
            train.add({"tag": np.int64(number), "is_first": np.bool_(number % 9 == 0)})
        found = next(batches)  # it goes on after an error
        assert found["tag"].shape == (config.host_batch, 33), "the first part of a sequence"
        assert found["is_first"][:, 0].all(), "in the context"
        assert all(array.flags.c_contiguous for array in found.values())
        assert next(stream(config, train, "train"))["tag"].shape == (config.host_batch, 65)


def test_the_guide_to_agents_names_every_key_of_a_batch(tmp_path: Path) -> None:
    config = RunConfig(
        logdir=tmp_path, task="bundled:dummy", env_options={"size": (8, 8)}, agent="random",
        batch_size=2, batch_length=4,
    )  # fmt: skip
    env = make_env(config.task, **config.env_options)
    stored = {"hidden": np.zeros((1, 3), np.float32)}
    with replay(config, "replay") as buffer:
        for _ in range(20):
            obs = env.step(noop(env.act_space))
            row = {key: np.asarray(value)[None] for key, value in obs.items()}
            row["action"] = np.zeros(1, np.int32)
            buffer.add_batch({**row, **stored}, np.array([0]))
        batch = next(stream(config, buffer, "train"))
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    table = page.split("A batch is a dict")[1].split("\n\n")[1]
    told = dict(re.findall(r"^\| `(\w+)` \| (\w+)", table, re.MULTILINE))
    spaces = {*env.obs_space, "action", *stored} - set(FLAGS)
    assert {key: batch[key].dtype.name for key in batch.keys() - spaces} == told
