"""The real environment beside a dream: the same start and the same actions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays
from dreamfleet.dream.classic_control import action_names, restore
from dreamfleet.envs import Wrapper, env_seed, make_visible_env, noop
from dreamfleet.envs.images import side_by_side
from dreamfleet.envs.registry import Task
from dreamfleet.errors import ConfigError, DreamfleetError, MissingExtraError
from dreamfleet.policy import Blueprint, maker_of_task
from dreamfleet.replay.reading import StoredEpisode
from dreamfleet.spaces import FLAGS, RESET, is_image, without_logs

_SEEDS_FROM = 1 << 21
"""Fresh episodes have seeds from here on, which training and evaluation do not use."""
_MAX_HISTORY = 10_000
_MAX_SECONDS = 20.0
_BLOCK = 256
_MAX_SEEN = 10_000


class RealityError(DreamfleetError):
    """The real environment cannot follow the dream."""


@dataclass(frozen=True)
class Real:
    """A moment of the real environment."""

    number: int
    """Actions since the dream began, without those after the end of the episode."""
    obs: Arrays
    reward: float
    last: bool
    """The episode is over, and further actions change nothing."""
    frame: NDArray[np.uint8] | None
    """A picture, if there is one."""


class Reality:
    """The environment that a checkpoint was trained on.

    It starts a fresh episode, or goes to the step of a stored one where a dream has started. Use it
    from one thread at a time.

    Args:
        blueprint: What the checkpoint says about the run.
        env: The environment, if it is not part of this package: its task, a class or a function.
        trust: Import the task that the checkpoint names.

    Raises:
        ConfigError: The task is not part of this package, and is neither named nor trusted.
    """

    def __init__(
        self, blueprint: Blueprint, *, env: Task | None = None, trust: bool = False
    ) -> None:
        self._config = blueprint.config
        self._maker = maker_of_task(blueprint.config, env, trust=trust)
        self._keys = [key for key in without_logs(blueprint.obs_space) if key not in FLAGS]
        self._env: Wrapper | None = None
        self._painter: Wrapper | None = None
        self._paints = True
        self._begin: Callable[[], Arrays] | None = None
        self._now: Real | None = None
        self._taken: list[bytes] = []  # the actions so far
        self._seen: dict[int, int] = {}  # hashes of observations by hashes of all actions before

    def fresh(self, seed: int = 0) -> Real:
        """Start a new episode; a dream can start from its first observation (`steps`)."""

        def begin() -> Arrays:
            env = self._make(env_seed(self._config.seed + seed, _SEEDS_FROM))
            return env.step(noop(env.act_space))

        return self._start(begin)

    def follow(self, episode: StoredEpisode, observe: int) -> Real:
        """Go to the last of the observed steps of a stored episode.

        Some environments can be set to the state that an observation shows (`restore`). Others
        repeat all actions from the same seed, and must return every stored observation.

        Raises:
            RealityError: The environment cannot be brought there.
        """
        here = {key: value[0] for key, value in episode.read(observe - 1, observe).items()}

        def restored() -> Arrays:
            env = self._make(0)
            first = env.step(noop(env.act_space))
            if not restore(env, here):
                return {}
            return {**first, **{key: here[key] for key in (*self._keys, *FLAGS)}}

        can = bool(self._attempt(restored))
        return self._start(restored if can else lambda: self._relive(episode, observe))

    @property
    def now(self) -> Real:
        """The current moment."""
        if self._now is None:
            raise RealityError("The environment has not started: call fresh() or follow() first.")
        return self._now

    @property
    def action_names(self) -> tuple[str, ...]:
        """Names of the choices of a discrete action, if the environment has them."""
        return action_names(self._env) if self._env else ()

    @property
    def steps(self) -> Arrays:
        """The current moment as steps to start a dream from."""
        return {key: value[None] for key, value in without_logs(self.now.obs).items()}

    def step(self, action: Mapping[str, Any]) -> Real:
        """Take an action. After the end of the episode nothing happens.

        Raises:
            RealityError: The environment failed.
        """
        return self._take(action, draw=True)

    def go(self, actions: Sequence[Mapping[str, Any]]) -> Real:
        """Go to the moment after these actions since the start: onward, or from the start again.

        Raises:
            RealityError: The environment failed, or does not repeat itself.
        """
        taken = self._taken
        if [_bytes(action) for action in actions[: len(taken)]] != taken:
            self._restart()
        for number in range(len(self._taken), len(actions)):
            self._take(actions[number], draw=number == len(actions) - 1)
        return self.now

    def _take(self, action: Mapping[str, Any], *, draw: bool) -> Real:
        before, env = self.now, self._env
        if before.last or env is None:
            return before
        taken = {key: np.asarray(value) for key, value in action.items()}
        obs = self._attempt(lambda: env.step({**taken, RESET: np.array(False)}))
        self._taken = [*self._taken, _bytes(action)]
        return self._arrive(obs, draw=draw or bool(obs["is_last"]))

    def draw(self, obs: Mapping[str, Any]) -> NDArray[np.uint8] | None:
        """A picture of an imagined observation: its image, or what the environment renders in that
        state; None if it has neither."""
        if (image := image_of(obs)) is not None or not self._paints:
            return image
        with suppress(Exception):  # an environment's code, in a state it may never reach
            if self._painter is None:
                self._painter = make_visible_env(self._maker, **self._config.env_options)
                self._painter.step(noop(self._painter.act_space))
            image = self._painter.render() if restore(self._painter, obs) else None
        self._paints = image is not None
        return image

    def close(self) -> None:
        """Release the environments."""
        for env in (self._env, self._painter):
            if env is not None:
                env.close()
        self._env = self._painter = self._now = None

    def _make(self, seed: int) -> Wrapper:
        if self._env is not None:
            self._env.close()
        self._env = make_visible_env(self._maker, seed=seed, **self._config.env_options)
        return self._env

    def _start(self, begin: Callable[[], Arrays]) -> Real:
        self._begin, self._seen = begin, {}
        return self._restart()

    def _restart(self) -> Real:
        if self._begin is None:
            return self.now
        obs = self._attempt(self._begin)
        self._taken = []
        return self._arrive(obs)

    def _arrive(self, obs: Arrays, *, draw: bool = True) -> Real:
        """Arrive at a moment, which must be the same as after the same actions before."""
        path, number = hash(tuple(self._taken)), len(self._taken)
        seen = hash(tuple(np.asarray(obs[key]).tobytes() for key in self._keys))
        if self._seen.setdefault(path, seen) != seen:
            raise RealityError(
                "The environment cannot go back: the same seed and actions gave other observations."
            )
        if len(self._seen) > _MAX_SEEN:
            self._seen.clear()
        frame = image_of({key: obs[key] for key in self._keys}) if draw else None
        if draw and frame is None and self._env is not None:
            with suppress(Exception):  # continue without a picture
                frame = self._env.render()
        self._now = Real(number, obs, float(obs["reward"]), bool(obs["is_last"]), frame)
        return self._now

    def _attempt(self, call: Callable[[], Arrays]) -> Arrays:
        try:
            return call()
        except (MissingExtraError, ConfigError, RealityError):
            raise
        except Exception as error:  # the environment's code
            what = f"{type(error).__name__}: {error}"
            raise RealityError(f"The environment failed: {what}") from error

    def _relive(self, episode: StoredEpisode, observe: int) -> Arrays:
        """Repeat all actions of an environment up to a step of an episode."""
        if not episode.complete or not isinstance(episode.stream, int):
            raise _unreachable("the replay no longer holds all of its steps")
        if episode.history > _MAX_HISTORY:
            raise _unreachable(f"{episode.history:,} steps would have to be repeated")
        env = self._make(env_seed(self._config.seed, episode.stream))
        started = time.monotonic()
        action, obs = noop(env.act_space), None
        for start in range(-episode.history, observe, _BLOCK):
            rows = episode.read(start, min(start + _BLOCK, observe))
            for index in range(len(rows["is_first"])):
                first = bool(rows["is_first"][index])
                obs = env.step({**action, RESET: np.array(first)})
                if not all(_same(obs[key], rows[key][index]) for key in self._keys):
                    raise _unreachable("the same seed and actions give other observations")
                action |= {key: rows[key][index] for key in action.keys() & rows.keys()}
            if time.monotonic() - started > _MAX_SECONDS:
                raise _unreachable(f"repeating {episode.history:,} steps takes too long")
        assert obs is not None
        return obs


def _bytes(action: Mapping[str, Any]) -> bytes:
    return b"".join(np.asarray(action[key]).tobytes() for key in sorted(action))


def _same(found: NDArray[Any], stored: NDArray[Any]) -> bool:
    if stored.dtype.kind != "f":
        return np.array_equal(found, stored)
    return np.allclose(found, stored, rtol=1e-5, atol=1e-6)


def image_of(obs: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8] | None:
    """The images of an observation, side by side; the last one of stacked frames."""
    images = [obs[key] for key in sorted(obs) if is_image(obs[key].dtype, obs[key].shape)]
    return side_by_side(images) if images else None


def _unreachable(why: str) -> RealityError:
    return RealityError(
        f"The environment cannot be set to this state, because {why}: start from a fresh "
        "episode to see both."
    )
