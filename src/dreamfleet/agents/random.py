"""An agent that acts at random and learns nothing: for filling a replay, and for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays, Carry, Flat, Mode
from dreamfleet.agents.errors import StateMismatchError
from dreamfleet.spaces import Space


class RandomAgent:
    """Uniform actions, without JAX and without parameters."""

    def __init__(
        self, obs_space: Mapping[str, Space], act_space: Mapping[str, Space], *, seed: int = 0
    ) -> None:
        self.obs_space = dict(obs_space)
        self.act_space = {name: space for name, space in act_space.items() if name != "reset"}
        self._seed = seed
        self._actions = 0
        self._updates = 0

    def init_policy(self, n: int) -> Carry:  # noqa: ARG002 - the protocol's
        return {}

    def init_train(self, n: int) -> Carry:  # noqa: ARG002 - the protocol's
        return {}

    def init_report(self, n: int) -> Carry:  # noqa: ARG002 - the protocol's
        return {}

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
        actions = {name: space.sample(rng, batch) for name, space in self.act_space.items()}
        return carry, actions, {}

    def train(
        self,
        carry: Carry,
        batch: Mapping[str, Any],  # noqa: ARG002 - the protocol's
    ) -> tuple[Carry, Any, Any]:
        self._updates += 1
        return carry, {}, {"opt/updates": self._updates}

    def report(
        self,
        carry: Carry,
        batch: Mapping[str, Any],  # noqa: ARG002 - the protocol's
    ) -> tuple[Carry, dict[str, Any]]:
        return carry, {}

    def stream(self, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Iterator[Mapping[str, Any]]:
        return iter(batches)

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
