"""A serial run follows from its seed, and a run that was stopped from where it was."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.audit import audit
from chaos.env import TASK
from fleet_parts import rows, small_run, stored_steps
from serial_parts import differences, play

from dreamfleet.agents.api import AgentBase
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.envs import make_env
from dreamfleet.replay import ReplayConfig
from dreamfleet.replay.config import Fractions
from dreamfleet.spaces import Space


class Fingerprint(AgentBase):
    """An agent that is changed by every bit that it is trained on, and acts by what it has become.

    It keeps something of each episode in its carry and in the replay, and writes it back.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env.obs_space, env.act_space)
        self.stored_space = {"memory": Space(np.float32)}
        self._sum, self._actions = 1, 0

    def init_policy(self, n: int) -> Any:
        return {"memory": np.zeros(n, np.float32)}

    def policy(self, carry: Any, obs: Mapping[str, Any], mode: Any = "train") -> Any:
        self._actions += 1
        seen = obs["image"].reshape(len(obs["image"]), -1).astype(np.float32).std(1)
        memory = carry["memory"] * 0.9 + seen
        actions = (self._sum + self._actions + (memory * 10).astype(np.int64)) % 3
        return {"memory": memory}, {"action": actions.astype(np.int32)}, {"memory": memory}

    def train(self, carry: Any, batch: Mapping[str, Any]) -> Any:
        for key in sorted(batch.keys() - {"stepid"}):
            self._sum = zlib.crc32(np.ascontiguousarray(batch[key]).tobytes(), self._sum)
        states = {"stepid": batch["stepid"], "memory": batch["memory"] + self._sum % 7}
        return carry, {"replay": states}, {"loss": float(self._sum % 1000)}

    def save(self) -> Any:
        return {"sum": self._sum, "actions": self._actions}

    def load(self, state: Mapping[str, Any], regex: str | None = None) -> None:
        self._sum, self._actions = int(state["sum"]), int(state["actions"])


CATCH: dict[str, Any] = {
    "launcher": "serial",
    "task": "bundled:catch",
    "env_options": {"size": (8, 8), "balls": 3},
    "eval_envs": 1,
    "seed": 5,
    "steps": 600,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"train_ratio": 3.3, "actor_batch": 3, "envs": 5},  # a limiter that counts in fractions
        {"replay": ReplayConfig(capacity=150, chunk=16, fractions=Fractions(0.5, 0, 0.5))},
        {"train_ratio": 0.0, "replay": ReplayConfig(chunk=64, online=False)},  # no limiter
    ],
    ids=["limited", "evicting", "unlimited"],
)
def test_the_same_seed_makes_the_same_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = small_run(tmp_path / "one", **{**CATCH, **changes})

    def make_agent() -> Fingerprint:
        return Fingerprint(make_env("bundled:catch", **CATCH["env_options"]))

    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        play(replace(config, logdir=tmp_path / name, seed=seed), make_agent=make_agent)
    assert list(differences(tmp_path / "one", tmp_path / "two")) == []
    found = " ".join(differences(tmp_path / "one", tmp_path / "other"))
    assert all(name in found for name in ("replay: image", "agent: sum", "scores", "metrics"))


class Fragile:
    """An environment that raises at its thirtieth step; the one that is built after it does not."""

    def __init__(self, envid: int, attempt: int = 0) -> None:
        self._env = make_env("bundled:catch", seed=10 * envid + attempt, **CATCH["env_options"])
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        self._left = 30 if not attempt else 10**9

    def step(self, action: Mapping[str, Any]) -> Any:
        self._left -= 1
        if not self._left:
            raise RuntimeError("the ball is lost")
        return self._env.step(action)


def test_environments_that_fail_do_so_again(tmp_path: Path) -> None:
    config = small_run(tmp_path / "one", **{**CATCH, "steps": 300, "on_failure": "restart"})
    for name in ("one", "two"):
        play(replace(config, logdir=tmp_path / name), make_env_train=Fragile)
    assert list(differences(tmp_path / "one", tmp_path / "two")) == []
    counted = [row.get("episodes/abandoned", 0) for row in rows(tmp_path / "two" / "metrics.jsonl")]
    assert max(counted) == config.envs


def test_a_run_that_is_resumed_begins_new_episodes(tmp_path: Path) -> None:
    config = small_run(tmp_path, **{**CATCH, "task": TASK, "env_options": {}})
    saved = play(config, [30])
    assert 0 < saved[0] < 600 <= saved[1]
    found = audit([tmp_path / "replay"])
    assert found.faults == {}
    assert found.rows == 600
    assert found.lives == 2 * config.envs


@pytest.mark.parametrize("removed", [("replay",), ("ckpt/replay",), ("replay", "ckpt/replay")])
def test_a_replay_that_was_removed_is_filled_again(
    tmp_path: Path, removed: tuple[str, ...]
) -> None:
    config = small_run(tmp_path, **CATCH, batch_length=8, train_ratio=8.0)
    play(replace(config, steps=300))
    for name in removed:
        shutil.rmtree(tmp_path / name)
    play(config)
    assert len(stored_steps(tmp_path / "replay")["is_first"]) == 300 * (
        1 + ("replay" not in removed)
    )
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot.step == snapshot.parts["replay"]["steps"] == 600
    log = (tmp_path / "logs" / "serial.log").read_text()
    assert ("steps less than the run has made" in log) == (removed == ("replay",))
