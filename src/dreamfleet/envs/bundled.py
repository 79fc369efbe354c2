"""Small environments without further packages, for first runs, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, Env, EpisodicEnv, Outcome
from dreamfleet.errors import ConfigError
from dreamfleet.spaces import Space

_BACKGROUND, _BALL, _PADDLE = (16, 20, 32), (255, 196, 61), (88, 196, 255)


class Catch(EpisodicEnv):
    """A pixel game on a small grid: left, stay, right; +1 for a ball caught, -1 for one missed.

    An episode drops `balls` balls, one after the other. Random play scores about -0.75 a ball,
    perfect play 1.
    """

    action_names = ("left", "stay", "right")

    def __init__(
        self, *, seed: int = 0, grid: int = 8, balls: int = 1, size: tuple[int, int] = (64, 64)
    ) -> None:
        super().__init__(
            {"image": Space(np.uint8, (*size, 3))}, {"action": Space(np.int32, (), 0, 3)}
        )
        self._rng, self._grid, self._balls = np.random.default_rng(seed), grid, balls
        # Where each cell of the grid starts in the image, the end included.
        self._rows = np.linspace(0, size[0], grid + 1).round().astype(int)
        self._columns = np.linspace(0, size[1], grid + 1).round().astype(int)
        self._empty = np.full((*size, 3), _BACKGROUND, np.uint8)
        self._ball, self._paddle, self._left = (0, 0), 0, 0

    def _begin(self) -> Arrays:
        self._left, self._paddle = self._balls, self._grid // 2
        self._drop()
        return {"image": self._draw()}

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self._paddle = min(max(self._paddle + int(action["action"]) - 1, 0), self._grid - 1)
        row, column = self._ball
        self._ball = (row + 1, column)
        reward = 0.0
        if row + 1 == self._grid - 1:
            reward = 1.0 if column == self._paddle else -1.0
            self._left -= 1
            if self._left:
                self._drop()
        over = self._left == 0
        return Outcome({"image": self._draw()}, reward, over, over)

    def _drop(self) -> None:
        self._ball = (0, int(self._rng.integers(self._grid)))

    def _draw(self) -> NDArray[np.uint8]:
        image = self._empty.copy()
        paddle = (self._grid - 1, self._paddle)
        for (row, column), color in ((paddle, _PADDLE), (self._ball, _BALL)):
            top, bottom = self._rows[row : row + 2]
            left, right = self._columns[column : column + 2]
            image[top:bottom, left:right] = color
        return image

    def render(self) -> NDArray[np.uint8]:
        return self._draw()


_PRIZES, _MISTAKE = (1.0, 2.0), -1.0


class Corridor(EpisodicEnv):
    """A test of memory, after the T-maze.

    The first observation shows a signal, left (-1) or right (1); after it the signal is 0. The
    agent walks `length` steps and then turns: -1 for the wrong side, and for the signalled one +1
    on the left and +2 on the right. The last observation is always the same, so a policy without
    memory scores at most 0.5 on average, by turning right, and one with memory 1.5.

    The two prizes differ on purpose: with equal ones neither the signal nor the turn alone would
    predict the reward, and there would be no gradient.
    """

    action_names = ("left", "right")

    def __init__(self, *, seed: int = 0, length: int = 10) -> None:
        signal, position = Space(np.float32, (), -1, 1), Space(np.float32, (), 0, 1)
        action = Space(np.int32, (), 0, 2)
        super().__init__({"signal": signal, "position": position}, {"action": action})
        self._rng, self._length = np.random.default_rng(seed), length
        self._side, self._position = 0, 0

    def _begin(self) -> Arrays:
        self._side, self._position = int(self._rng.integers(2)), 0
        return self._observe(signal=2 * self._side - 1)

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self._position += 1
        if self._position <= self._length:
            return Outcome(self._observe())
        found = int(action["action"]) == self._side
        reward = _PRIZES[self._side] if found else _MISTAKE
        return Outcome(self._observe(), reward, last=True, terminal=True)

    def _observe(self, signal: int = 0) -> Arrays:
        return {
            "signal": np.array(signal, np.float32),
            "position": np.array(min(self._position / self._length, 1), np.float32),
        }

    def render(self) -> NDArray[np.uint8]:
        cells = np.full((3, self._length + 1, 3), 32, np.uint8)
        cells[1] = 96
        cells[:, -1] = 96
        cells[2 if self._side else 0, -1] = (80, 200, 120)
        cells[1, min(self._position, self._length)] = (255, 196, 61)
        return cells.repeat(8, 0).repeat(8, 1)


_DRAG = 0.9
_PUSH = 0.02


class PointMass(EpisodicEnv):
    """Two continuous actions push a point towards a goal that is elsewhere in each episode.

    The reward of a step is 1 at the goal and falls off with the distance (a Gaussian of width
    0.25), so an episode scores at most `length`. Episodes end by the time limit, so they are last
    but not terminal.
    """

    _names = ("position", "velocity", "goal")

    def __init__(self, *, seed: int = 0, length: int = 100) -> None:
        space = Space(np.float32, (2,), -1, 1)
        super().__init__(dict.fromkeys(self._names, space), {"action": space})
        self._rng, self._length, self._taken = np.random.default_rng(seed), length, 0
        self._position = self._velocity = self._goal = np.zeros(2)

    def _begin(self) -> Arrays:
        self._taken = 0
        self._position, self._goal = self._rng.uniform(-0.8, 0.8, (2, 2))
        self._velocity = np.zeros(2)
        return self._observe()

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self._taken += 1
        push = np.clip(action["action"], -1, 1)
        velocity = _DRAG * self._velocity + _PUSH * push
        self._position = np.clip(self._position + velocity, -1, 1)
        # A wall takes the speed that pointed into it.
        self._velocity = np.where(np.abs(self._position) < 1, velocity, 0)
        distance = np.linalg.norm(self._position - self._goal)
        reward = float(np.exp(-0.5 * (distance / 0.25) ** 2))
        return Outcome(self._observe(), reward, last=self._taken >= self._length)

    def _observe(self) -> Arrays:
        values = (self._position, self._velocity, self._goal)
        return {k: value.astype(np.float32) for k, value in zip(self._names, values, strict=True)}

    def restore(self, obs: Mapping[str, Any]) -> bool:
        self._position, self._velocity, self._goal = (
            np.clip(np.asarray(obs[name], float), -1, 1) for name in self._names
        )
        return True

    def render(self) -> NDArray[np.uint8]:
        image = np.full((64, 64, 3), 24, np.uint8)
        for place, color in ((self._goal, (80, 200, 120)), (self._position, (255, 196, 61))):
            x, y = ((place + 1) / 2 * 59 + 2).round().astype(int)
            image[y - 2 : y + 3, x - 2 : x + 3] = color
        return image


_FRAMES = 8


class Dummy(EpisodicEnv):
    """Fixed noise frames and a vector that identifies the step.

    `vector` starts with the seed, the episode (from 0) and the step (from 0). With a seed for each
    environment, tests find steps that were lost, doubled or reordered. `count` holds the step as an
    integer. The reward is 1 on every tenth step. Frames are read-only views of a small pool:
    stepping copies nothing.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        size: tuple[int, int] = (64, 64),
        channels: int = 3,
        vector: int = 8,
        length: int = 100,
        actions: Literal["discrete", "continuous", "both"] = "discrete",
        terminal: bool = False,
    ) -> None:
        if vector < 3 or length < 1:
            raise ConfigError(
                f"The dummy needs vector >= 3 (seed, episode, step) and length >= 1, got vector="
                f"{vector} and length={length}."
            )
        act_space = {}
        if actions in ("discrete", "both"):
            act_space["action"] = Space(np.int32, (), 0, 5)
        if actions in ("continuous", "both"):
            act_space["force"] = Space(np.float32, (6,), -1, 1)
        super().__init__(
            {
                "image": Space(np.uint8, (*size, channels)),
                "vector": Space(np.float32, (vector,)),
                "count": Space(np.int32, (), 0, length + 1),
                "log/step": Space(np.float32),
            },
            act_space,
        )
        noise = np.random.default_rng(seed).integers(0, 256, (_FRAMES, *size, channels), np.uint8)
        noise.setflags(write=False)
        self._frames = list(noise)
        self._origin = np.zeros(vector, np.float32)
        self._origin[0] = seed
        self._length, self._terminal = length, terminal
        self._episode, self._step = -1, 0

    def _begin(self) -> Arrays:
        self._episode, self._step = self._episode + 1, 0
        return self._observe()

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        del action
        self._step += 1
        last = self._step >= self._length
        reward = 1.0 if self._step % 10 == 0 else 0.0
        return Outcome(self._observe(), reward, last, last and self._terminal)

    def _observe(self) -> Arrays:
        vector = self._origin.copy()
        vector[1], vector[2] = self._episode, self._step
        return {
            "image": self._frames[self._step % _FRAMES],
            "vector": vector,
            "count": np.array(self._step, np.int32),
            "log/step": vector[2:3].reshape(()),
        }

    def render(self) -> NDArray[np.uint8]:
        frame: NDArray[np.uint8] = self._frames[self._step % _FRAMES]
        return frame


def constructors() -> dict[str, Callable[..., Env]]:
    """What makes the tasks of this suite, by name."""
    return {"catch": Catch, "corridor": Corridor, "dummy": Dummy, "pointmass": PointMass}
