"""Atari: `atari:pong` after the published protocol, `atari100k:pong` for 100,000 steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, Env, EnvError, EpisodicEnv, Outcome
from dreamfleet.envs.images import resize, to_gray
from dreamfleet.errors import import_extra
from dreamfleet.spaces import Space

_NOOP = 0
_STICKINESS = 0.25


class Atari(EpisodicEnv):
    """One game of the Arcade Learning Environment.

    The defaults are the published protocol: the console repeats the previous action in a quarter
    of the frames (`sticky`), an action lasts four frames, the image is the maximum of the last
    two (sprites flicker), grey and resized to 96x96, all 18 buttons, up to 30 idle frames at
    the start, lost lives are ignored, at most 108,000 frames, idle ones not counted. `is_terminal`
    equals `is_last`, also at the time limit.

    `lives` may also be "episode" (a lost life ends the episode, and the game continues in the next
    one) or "reset" (a lost life ends the episode and the game).
    """

    def __init__(
        self,
        game: str,
        *,
        seed: int = 0,
        repeat: int = 4,
        size: tuple[int, int] = (96, 96),
        gray: bool = True,
        noops: int = 30,
        lives: Literal["unused", "episode", "reset"] = "unused",
        sticky: bool = True,
        actions: Literal["all", "needed"] = "all",
        pooling: int = 2,
        frames: int = 108_000,
        clip_reward: bool = False,
    ) -> None:
        ale_py = import_extra("ale_py", "Tasks of atari:", "atari")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        ale = ale_py.ALEInterface()
        ale.setInt("random_seed", seed & 0x7FFFFFFF)
        ale.setFloat("repeat_action_probability", _STICKINESS if sticky else 0.0)
        path = _roms().get_rom_path(game)
        if path is None:
            raise EnvError(f"ale-py does not include the game {game!r}: reinstall ale-py.")
        ale.loadROM(path)
        self._ale = ale
        self._actions = ale.getLegalActionSet() if actions == "all" else ale.getMinimalActionSet()
        self.action_names = tuple(each.name.lower() for each in self._actions)
        self._rng, self._repeat, self._noops = np.random.default_rng(seed), repeat, noops
        self._size, self._gray, self._clip = size, gray, clip_reward
        self._lives_mode, self._lives = lives, 0
        self._limit, self._frames = frames, 0
        height, width = ale.getScreenDims()
        self._screens = np.zeros((max(pooling, 1), height, width, 3), np.uint8)
        super().__init__(
            {"image": Space(np.uint8, (*size, 1 if gray else 3))},
            {"action": Space(np.int32, (), 0, len(self._actions))},
        )

    def _begin(self) -> Arrays:
        fresh = self._lives_mode != "episode" or self._ale.game_over() or self._frames == 0
        if fresh or self._frames >= self._limit:
            self._restart()
        self._lives = self._ale.lives()
        self._screens[:] = 0
        self._ale.getScreenRGB(self._screens[0])
        return {"image": self._image()}

    def _restart(self) -> None:
        self._ale.reset_game()
        self._frames = 0
        for _ in range(int(self._rng.integers(self._noops + 1)) if self._noops else 0):
            self._ale.act(_NOOP)
            if self._ale.game_over():
                self._ale.reset_game()

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        button = self._actions[int(action["action"])]
        reward, over = 0.0, False
        for frame in range(self._repeat):
            reward += self._ale.act(button)
            self._frames += 1
            left = self._repeat - frame - 1
            over = self._ale.game_over() or self._frames >= self._limit
            if left < len(self._screens) or over:
                self._ale.getScreenRGB(self._screens[left % len(self._screens)])
            if over:
                break
        lives = self._ale.lives()
        # Some games show 0 lives for a moment while the last one is still being played.
        if self._lives_mode != "unused" and 0 < lives < self._lives:
            over = True
        self._lives = lives
        reward = float(np.sign(reward)) if self._clip else reward
        return Outcome({"image": self._image()}, reward, over, over)

    def _image(self) -> NDArray[np.uint8]:
        image = functools.reduce(np.maximum, self._screens)
        # Grey first: one channel is resized in half the time of three.
        image = to_gray(image) if self._gray else image
        # Not a view of the screens, which the next step overwrites.
        return image.copy() if image.shape[:2] == self._size else resize(image, self._size)

    def render(self) -> NDArray[np.uint8]:
        return np.asarray(self._ale.getScreenRGB())


def constructors() -> dict[str, Callable[..., Env]]:
    """What makes the tasks of `atari:`, by name."""
    return {game: functools.partial(Atari, game) for game in _roms().get_all_rom_ids()}


def constructors_100k() -> dict[str, Callable[..., Env]]:
    """Those of the 100,000-step benchmark: colour, no sticky actions, needed buttons."""
    protocol = {"size": (64, 64), "gray": False, "sticky": False, "actions": "needed"}
    return {name: functools.partial(make, **protocol) for name, make in constructors().items()}


def _roms() -> Any:
    return import_extra("ale_py.roms", "Tasks of atari:", "atari")
