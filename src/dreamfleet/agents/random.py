"""An agent that acts at random and learns nothing: for filling a replay, and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import AgentBase, Arrays, Carry, Flat, Mode
from dreamfleet.agents.errors import StateMismatchError
from dreamfleet.agents.registry import AgentType
from dreamfleet.masks import ACTION_MASK, ActionMask, EmptyMasks
from dreamfleet.spaces import Space


@dataclass(frozen=True)
class RandomConfig:
    """A random agent has no settings."""


class RandomAgent(AgentBase):
    """Uniform actions among those that are allowed, without JAX and without parameters."""

    def __init__(
        self, obs_space: Mapping[str, Space], act_space: Mapping[str, Space], *, seed: int = 0
    ) -> None:
        super().__init__(obs_space, act_space)
        self.config = RandomConfig()
        self._mask = ActionMask.of(self.obs_space, self.act_space)
        self._empty = EmptyMasks(self._mask) if self._mask else None
        self._seed = seed
        self._actions = 0
        self._updates = 0

    def policy(
        self,
        carry: Carry,
        obs: Mapping[str, NDArray[Any]],
        mode: Mode = "train",  # noqa: ARG002 - the protocol's
    ) -> tuple[Carry, Arrays, Arrays]:
        batch = len(obs["is_first"])
        # The counter makes every call's numbers independent of all others; far quicker than
        # seeding a generator.
        rng = np.random.Generator(
            np.random.Philox(key=self._seed, counter=[0, 0, 0, self._actions])
        )
        self._actions += 1
        if self._mask and self._empty:
            self._empty.check(obs)
            return carry, {self._mask.name: self._mask.sample(rng, obs[ACTION_MASK])}, {}
        actions = {name: space.sample(rng, batch) for name, space in self.act_space.items()}
        return carry, actions, {}

    def metrics(self) -> dict[str, float]:
        return self._empty.metrics() if self._empty else {}

    def train(
        self,
        carry: Carry,
        batch: Mapping[str, Any],  # noqa: ARG002 - the protocol's
    ) -> tuple[Carry, Any, Any]:
        self._updates += 1
        return carry, {}, {"opt/updates": self._updates}

    def policy_state(self) -> Flat:
        """Nothing: actors draw numbers of their own."""
        return {}

    def load_policy(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""

    def save(self) -> Flat:
        return {"counters/actions": self._actions, "counters/updates": self._updates}

    def load(self, state: Mapping[str, Any], regex: str | None = None) -> None:
        if regex is None and set(state) != set(self.save()):
            raise StateMismatchError(
                f"A random agent's state holds {sorted(self.save())}, not {sorted(state)}: "
                "this checkpoint belongs to another agent."
            )
        self._actions = int(state.get("counters/actions", self._actions))
        self._updates = int(state.get("counters/updates", self._updates))


class RandomType(AgentType[RandomConfig]):
    """The random agent in the registry."""

    name = "random"
    config = RandomConfig
    many_hosts = True  # it learns nothing, together or alone

    def make(
        self,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        config: RandomConfig,  # noqa: ARG002 - the protocol's
        *,
        seed: int,
    ) -> RandomAgent:
        return RandomAgent(obs_space, act_space, seed=seed)

    def check(
        self,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        config: RandomConfig,  # noqa: ARG002 - the type's
    ) -> None:
        ActionMask.of(obs_space, act_space)


RANDOM = RandomType()
