"""Crafter: `crafter:reward` and `crafter:noreward`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, Env, EpisodicEnv, Outcome
from dreamfleet.errors import import_extra
from dreamfleet.spaces import Space


class Crafter(EpisodicEnv):
    """Survival in a small open world, 22 achievements.

    Each achievement is counted under `log/achievement_NAME`; its maximum over an episode is how
    often it was reached there. The episode is terminal when the player dies, not at the limit.
    """

    def __init__(
        self,
        *,
        rewarded: bool = True,
        seed: int = 0,
        size: tuple[int, int] = (64, 64),
        length: int = 10_000,
        area: tuple[int, int] = (64, 64),
    ) -> None:
        crafter = import_extra("crafter", "Tasks of crafter:", "crafter")
        self._env = crafter.Env(
            area=area, size=size[::-1], reward=rewarded, length=length, seed=seed
        )
        constants = import_extra("crafter.constants", "Tasks of crafter:", "crafter")
        self._logs = {f"log/achievement_{name}": name for name in sorted(constants.achievements)}
        self.action_names = tuple(constants.actions)
        super().__init__(
            {"image": Space(np.uint8, (*size, 3)), **dict.fromkeys(self._logs, Space(np.int32))},
            {"action": Space(np.int32, (), 0, self._env.action_space.n)},
        )

    def _begin(self) -> Arrays:
        return self._observe(self._env.reset(), {})

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        image, reward, done, info = self._env.step(int(action["action"]))
        obs = self._observe(image, info["achievements"])
        return Outcome(obs, float(reward), bool(done), bool(done) and info["discount"] == 0)

    def _observe(self, image: NDArray[np.uint8], achieved: Mapping[str, int]) -> Arrays:
        counts = {
            key: np.array(achieved.get(name, 0), np.int32) for key, name in self._logs.items()
        }
        return {"image": np.asarray(image, np.uint8), **counts}

    def render(self) -> NDArray[np.uint8]:
        return np.asarray(self._env.render(), np.uint8)


def constructors() -> dict[str, Callable[..., Env]]:
    """What makes the tasks of this suite, by name."""
    return {"reward": Crafter, "noreward": functools.partial(Crafter, rewarded=False)}
