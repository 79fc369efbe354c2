"""What a checkpoint holds besides numbers, so that an agent can be built from it alone.

A configuration and the spaces, as JSON text in the checkpoint's manifest. With it a checkpoint that
was copied somewhere needs neither the run's directory nor the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.agents.api import Agent
from dreamfleet.agents.random import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.spaces import Space

BLUEPRINT = "blueprint"
"""The name of the checkpoint's part."""

Spaces = Mapping[str, Space]


@dataclass(frozen=True)
class Blueprint:
    """A run's configuration and the spaces of its environment."""

    config: RunConfig
    obs_space: Spaces
    act_space: Spaces

    @classmethod
    def of(cls, agent: Agent, config: RunConfig) -> Blueprint:
        """That of an agent that exists. One that does not tell its spaces has none here."""
        spaces = [getattr(agent, name, {}) for name in ("obs_space", "act_space")]
        return cls(config, *spaces)

    def save(self) -> dict[str, str]:
        return {
            "config": self.config.to_json(),
            "obs_space": spaces_to_json(self.obs_space),
            "act_space": spaces_to_json(self.act_space),
        }

    @classmethod
    def load(cls, state: Mapping[str, str]) -> Blueprint:
        return cls(
            RunConfig.from_json(state["config"]),
            spaces_from_json(state["obs_space"]),
            spaces_from_json(state["act_space"]),
        )

    def build(self, *, anywhere: bool = False) -> Agent:
        """A fresh agent.

        Args:
            anywhere: Leave the choice of devices to JAX, because this machine may have others than
                the one that trained.
        """
        if not self.act_space:
            raise ConfigError(
                "The checkpoint does not tell the agent's spaces, because its own agent class has "
                "no obs_space and act_space: build that agent yourself and pass it as agent=."
            )
        if self.config.agent == "random":
            return RandomAgent(self.obs_space, self.act_space, seed=self.config.seed)
        from dreamfleet.agents import Dreamer

        dreamer = self.config.dreamer
        if anywhere:
            here = replace(
                dreamer.execution, train_platform="", policy_platform="", shard_parameters=False
            )
            dreamer = replace(dreamer, execution=here)
        return Dreamer(self.obs_space, self.act_space, dreamer, seed=self.config.seed)


def read_config(logdir: Path) -> RunConfig:
    """The configuration beside a run."""
    path = logdir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{logdir} holds no run: there is no {path}.")
    return replace(RunConfig.from_json(path.read_text()), logdir=logdir)


def read_blueprint(logdir: Path) -> Blueprint | None:
    """What the newest checkpoint of a run says about its agent; None if there is none."""
    snapshot = Checkpoint(logdir / "ckpt" / "agent").load(parts=[BLUEPRINT])
    return Blueprint.load(snapshot.parts[BLUEPRINT]) if snapshot else None


def spaces_to_json(spaces: Spaces) -> str:
    return json.dumps({key: _space_to_plain(space) for key, space in spaces.items()})


def spaces_from_json(text: str) -> dict[str, Space]:
    return {key: _space_from_plain(plain) for key, plain in json.loads(text).items()}


def _space_to_plain(space: Space) -> dict[str, Any]:
    bounds = {"low": _bound(space.low), "high": _bound(space.high)}
    return {"dtype": space.dtype.name, "shape": list(space.shape), **bounds}


def _bound(bound: np.ndarray[Any, Any]) -> Any:
    """One number where all are the same, which keeps images short; text, because of infinity."""
    same = np.all(bound == bound.flat[0])
    return str(bound.flat[0]) if same else [str(value) for value in bound.flat]


def _space_from_plain(plain: Mapping[str, Any]) -> Space:
    shape = tuple(plain["shape"])
    number = float if np.dtype(plain["dtype"]).kind == "f" else int

    def bound(value: Any) -> Any:
        if isinstance(value, list):
            return np.array([number(each) for each in value]).reshape(shape)
        return number(value)

    return Space(plain["dtype"], shape, bound(plain["low"]), bound(plain["high"]))
