"""Parts of small fleets for tests: agents whose actions can be predicted, faulty environments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.fleet.factories import factories
from dreamfleet.replay import Replay
from dreamfleet.roles.common import stop_event

EVERY_STEP = {"length": 25, "size": (8, 8)}


def until_stopped() -> None:
    """A role that does nothing until it is asked to end."""
    stop_event().wait()


def left_behind() -> list[str]:
    """Commands of the processes that this one has started and that still run, but for the helper
    that Python's multiprocessing keeps."""
    children = psutil.Process().children(recursive=True)
    commands = [" ".join(child.cmdline()) for child in children if child.is_running()]
    return [text for text in commands if text and "resource_tracker" not in text]


def small_run(logdir: Path, **changes: Any) -> RunConfig:
    """A run of the dummy environment that is over in seconds."""
    settings: dict[str, Any] = {
        "task": "bundled:dummy",
        "env_options": EVERY_STEP,
        "logdir": logdir,
        "agent": "random",
        "envs": 4,
        "envs_per_process": 2,
        "steps": 600,
        "batch_size": 2,
        "batch_length": 4,
        "report_length": 4,
        "train_ratio": 1.0,
        "replay_chunk": 64,
        "log_every": 0.5,
        "on_failure": "stop",
    }
    return RunConfig(**{**settings, **changes})


def parts(config: RunConfig, **changes: Any) -> dict[str, Any]:
    return {**factories(config), **changes}


def dummy_with_its_id(envid: int) -> Any:
    """A dummy whose observations begin with its id, so that every step can be told apart."""
    return make_env("bundled:dummy", seed=envid, **EVERY_STEP)


class Raising:
    """An environment that raises after some steps."""

    def __init__(self, envid: int, after: int = 30) -> None:
        self._env = dummy_with_its_id(envid)
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space
        self._left = after

    def step(self, action: Mapping[str, Any]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the pole is broken")
        return self._env.step(action)


class CountingAgent:
    """Acts by how many steps it has seen of the environment's episode, and counts in its carry.

    The action is `count % 5`, so stored actions tell whether carries were kept for each
    environment and reset with each episode.
    """

    def __init__(self, raise_in: str = "") -> None:
        self._raise_in = raise_in
        self._updates = 0

    def init_policy(self, n: int) -> Any:
        return {"nested": {"count": np.zeros(n, np.int64)}}

    def init_train(self, n: int) -> Any:
        return n

    init_report = init_train

    def policy(self, carry: Any, obs: Mapping[str, Any], mode: str = "train") -> Any:
        if self._raise_in == "policy":
            raise RuntimeError("the policy is broken")
        count = carry["nested"]["count"]
        actions = {"action": (count % 5).astype(np.int32)}
        outs = {"updates": np.full(len(count), self._updates, np.int32)}
        return {"nested": {"count": count + 1}}, actions, outs

    def train(self, carry: Any, batch: Mapping[str, Any]) -> Any:
        if self._raise_in == "train":
            raise RuntimeError("the training is broken")
        self._updates += 1
        return carry, {"replay": {"stepid": batch["stepid"]}}, {"loss": 1.0}

    def report(self, carry: Any, batch: Mapping[str, Any]) -> Any:
        return carry, {"size": float(len(batch["is_first"]))}

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        return iter(batches)

    def save(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load(self, state: Mapping[str, Any], regex: str | None = None) -> None:
        self._updates = int(state["updates"])


def stored_streams(directory: Path) -> dict[int, dict[str, Any]]:
    """Every stored step, by environment and in order, read back from the replay's files."""
    with Replay(1, 10**6, directory) as replay:
        count = len(replay)
        assert replay._table is not None
        numbers = np.arange(replay._table.items.low, replay._table.items.high)
        slots, indices = replay._table.items.starts(numbers)
        store = replay._table.store
        steps = store.gather(store.pieces(slots, indices, 1), count, 1)
    flat = {key: np.asarray(value)[:, 0] for key, value in steps.items()}
    found = {}
    for envid in np.unique(flat["vector"][:, 0]).astype(int):
        rows = flat["vector"][:, 0] == envid
        found[int(envid)] = {key: value[rows] for key, value in flat.items()}
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
