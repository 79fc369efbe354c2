"""MiniGrid: `minigrid:DoorKey-5x5-v0`, as pixels or as symbols."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, Env, EpisodicEnv, Outcome
from dreamfleet.envs.images import resize
from dreamfleet.errors import import_extra
from dreamfleet.spaces import Space

_PREFIX = "MiniGrid-"
# Objects, colours and states are coded below this.
_SYMBOLS = 11
_TILE = 8
# A mission is drawn from the product of a few short lists. No registered environment has as many.
_MOST_MISSIONS = 100_000


class MiniGrid(EpisodicEnv):
    """A grid world, observed from the agent's position.

    `obs="pixels"` renders the 7x7 view, "symbols" gives object, colour and state of each cell as
    integers. The mission is given as word numbers (0 for no word) where it differs between
    episodes.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        obs: Literal["pixels", "symbols"] = "pixels",
        size: tuple[int, int] = (64, 64),
    ) -> None:
        env: Any = gymnasium.make(f"{_PREFIX}{name}", disable_env_checker=True)
        self._env, self._size, self._pixels = env, size, obs == "pixels"
        self._seed: int | None = seed
        self._cells = int(np.prod(env.observation_space["image"].shape))
        self._words, self._longest = vocabulary(env.observation_space["mission"])
        self.action_names = tuple(each.name for each in env.unwrapped.actions)
        space = {"direction": Space(np.int32, (), 0, 4)}
        if self._pixels:
            space["image"] = Space(np.uint8, (*size, 3))
        else:
            space["symbols"] = Space(np.int32, (self._cells,), 0, _SYMBOLS)
        if self._words:
            space["mission"] = Space(np.int32, (self._longest,), 0, len(self._words) + 1)
        super().__init__(space, {"action": Space(np.int32, (), 0, int(env.action_space.n))})

    def _begin(self) -> Arrays:
        observation, _ = self._env.reset(seed=self._seed)
        self._seed = None
        return self._observe(observation)

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        observation, reward, terminated, truncated, _ = self._env.step(int(action["action"]))
        last = bool(terminated or truncated)
        return Outcome(self._observe(observation), float(reward), last, bool(terminated))

    def _observe(self, observation: Mapping[str, Any]) -> Arrays:
        result: Arrays = {"direction": np.array(observation["direction"], np.int32)}
        if self._pixels:
            frame = self._env.unwrapped.get_frame(tile_size=_TILE, agent_pov=True)
            result["image"] = resize(np.asarray(frame, np.uint8), self._size)
        else:
            result["symbols"] = observation["image"].reshape(-1).astype(np.int32)
        if self._words:
            mission = np.zeros(self._longest, np.int32)
            words = observation["mission"].split()
            mission[: len(words)] = [self._words[word] for word in words]
            result["mission"] = mission
        return result

    def render(self) -> NDArray[np.uint8]:
        frame = self._env.unwrapped.get_frame(tile_size=16, highlight=True)
        return np.asarray(frame, np.uint8)

    def close(self) -> None:
        self._env.close()


def vocabulary(space: Any) -> tuple[dict[str, int], int]:
    """Number the words of all missions from 1, and the length of the longest mission.

    No words if all episodes have the same mission.
    """
    choices = space.ordered_placeholders or []
    combinations = itertools.islice(itertools.product(*choices), _MOST_MISSIONS)
    missions = {space.mission_func(*choice) for choice in combinations}
    if len(missions) < 2:
        return {}, 0
    words = sorted({word for mission in missions for word in mission.split()})
    return {word: n for n, word in enumerate(words, 1)}, max(len(m.split()) for m in missions)


def constructors() -> dict[str, Callable[..., Env]]:
    """What makes the tasks of this suite, by name."""
    import_extra("minigrid", "Tasks of minigrid:", "minigrid")  # which registers its environments
    names = [name.removeprefix(_PREFIX) for name in gymnasium.registry if name.startswith(_PREFIX)]
    return {name: functools.partial(MiniGrid, name) for name in names}
