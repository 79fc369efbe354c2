"""A trained world model that can be played.

    dream = Dream.load("runs/catch")
    dream.start()
    imagined = dream.step(dream.act())

A dream starts from stored steps, which the world model observes. From then on it imagines what the
actions lead to. All moments are kept, so it can go back. Random numbers depend only on the seed and
the number of the step: the same actions lead to the same dream.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays, Guess, WorldModel
from dreamfleet.agents.registry import AgentType
from dreamfleet.checkpoint import Which
from dreamfleet.errors import ConfigError
from dreamfleet.policy import Blueprint, Policy, run_of
from dreamfleet.replay.reading import StoredEpisode, replay_directories, stored_episodes
from dreamfleet.spaces import Space

_MAX_OBSERVED, _KEPT = 64, 2048
_CONTEXT = 1 << 32
"""Numbers of observed steps start here, so that they share no random numbers with imagined ones."""


@dataclass(frozen=True, eq=False)
class Imagined(Guess):
    """A moment of a dream: what the world model says about it, and how the dream came here."""

    number: int = 0
    """Actions since the dream began; 0 is the last observed moment."""
    action: Arrays | None = None
    """The last action; None at the start."""
    latent: Any = field(default=None, repr=False)
    """The state of the world model."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class Dream:
    """Imagines what actions lead to, one step at a time.

    It keeps the last 2,048 moments. Use it from one thread at a time. Branches share the networks.

    Args:
        model: A trained world model.
        obs_space: Observations of the agent.
        act_space: Its actions.
        step: Environment steps of its training.
        blueprint: The run, as its checkpoint describes it.
        replay: Directories of the run's replay.
        seed: The seed of all random numbers.
    """

    def __init__(
        self,
        model: WorldModel,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        *,
        step: int = 0,
        blueprint: Blueprint | None = None,
        replay: Collection[Path] = (),
        seed: int = 0,
    ) -> None:
        if seed < 0:
            raise ConfigError(f"seed={seed} must be at least 0.")
        self._model = model
        self.obs_space = dict(obs_space)
        self.act_space = dict(act_space)
        self.trained_steps = step
        self.blueprint = blueprint
        self.seed = seed
        self.replay = tuple(replay)
        """Directories with sequences to start from."""
        self._line: list[Imagined] = []
        self._at = 0
        self._start: Imagined | None = None
        self.observed: Arrays = {}
        """The steps that the dream started from, an array per key."""

    @classmethod
    def load(
        cls,
        path: Path | str,
        which: Which = "latest",
        *,
        agent: AgentType[Any] | str | None = None,
        trust: bool | Collection[str] = False,
        seed: int = 0,
    ) -> Dream:
        """The world model of a run, or of one of its checkpoints.

        The checkpoint is enough. The run's replay, if there is one, has sequences to start from; it
        is only read, so the run may be running.

        Args:
            path: A run's directory, a directory of checkpoints, or one checkpoint.
            which: The newest complete checkpoint, or the one with the best evaluation score.
            agent: As for `Policy.load`: a file cannot choose code to import.
            trust: As for `Policy.load`.
            seed: The seed of all random numbers.

        Raises:
            ConfigError: There is no checkpoint, or its agent has no world model.
            CheckpointError: It is damaged.
        """
        policy = Policy.load(path, which, agent=agent, trust=trust)
        give = getattr(policy.agent, "world_model", None)
        if give is None:
            kind = type(policy.agent).__name__
            raise ConfigError(
                f"{path} holds a {kind}, which has no world model to dream with: load a checkpoint "
                "of a Dreamer, or give your agent a method world_model()."
            )
        return cls(
            give(),
            policy.obs_space,
            policy.act_space,
            step=policy.step,
            blueprint=policy.blueprint,
            replay=replay_directories(run_of(Path(path))),
            seed=seed,
        )

    # --- starting --------------------------------------------------------------------------------

    def episodes(self, newest: int = 100) -> list[StoredEpisode]:
        """Episodes of the run's replay to start from, the newest first."""
        return stored_episodes(self.replay, newest)

    def start(
        self, steps: StoredEpisode | Mapping[str, Any] | None = None, *, observe: int = 5
    ) -> Imagined:
        """Observe stored steps; the dream begins after the last of them.

        Args:
            steps: An episode of the replay, or steps as arrays: observations, actions, and
                `is_first` if the first one begins no episode. None takes the newest episode that is
                long enough.
            observe: How many steps of an episode are observed, from its beginning. Only the last 64
                are read: earlier ones are replaced by the stored latent state.

        Raises:
            ConfigError: There is no such episode, or the steps do not fit.
        """
        if steps is None:
            steps = self._newest(observe)
        if isinstance(steps, StoredEpisode):
            if not 1 <= observe <= steps.length:
                raise ConfigError(
                    f"observe={observe} is not valid: the episode has {steps.length} steps."
                )
            steps = steps.read(max(0, observe - _MAX_OBSERVED), observe)
        arrays = self._checked(steps)
        latent, guess = None, None
        count = len(next(iter(arrays.values())))
        begin = 0
        if "is_first" in arrays and not arrays["is_first"][0] and count > 1:
            latent = self._model.stored({key: value[0] for key, value in arrays.items()})
            begin = int(latent is not None)
        for index in range(begin, count):
            if "is_first" in arrays and arrays["is_first"][index]:
                latent = None
            obs = {key: arrays[key][index] for key in self.obs_space}
            action = {key: arrays[key][max(index - 1, 0)] for key in self.act_space}
            latent, guess = self._model.observe(latent, obs, action, self.seed, _CONTEXT + index)
        assert guess is not None
        self.observed = arrays
        self._start = Imagined(**vars(guess), latent=latent)
        return self.reset()

    def _newest(self, observe: int) -> StoredEpisode:
        episodes = self.episodes()
        if not episodes:
            raise ConfigError(
                "There is no replay to start from: pass steps, such as the observations of an "
                "environment, or load a run whose directory holds its replay."
            )
        # Incomplete episodes only if there is no other.
        fit = [each for each in episodes if each.length >= observe and each.begins]
        found = next((each for each in fit if each.ends), None) or next(iter(fit), None)
        if found is None:
            raise ConfigError(f"No stored episode has {observe} steps: observe fewer.")
        return found

    def _checked(self, steps: Mapping[str, Any]) -> Arrays:
        count = 0
        arrays: Arrays = {}
        spaces = {**self.obs_space, **self.act_space}
        for key, space in spaces.items():
            if key not in steps and key in self.obs_space:
                raise ConfigError(f"The steps have no {key!r}: a start needs {', '.join(spaces)}.")
            count = count or len(np.asarray(steps[key]))
            # A single step has no action, and needs none.
            given = steps.get(key, np.zeros((count, *space.shape), space.dtype))
            value = np.asarray(given).astype(space.dtype, copy=False)
            if value.shape != (count, *space.shape) or not count:
                raise ConfigError(
                    f"{key!r} has shape {value.shape}: it must be (steps, *{space.shape})."
                )
            arrays[key] = value
        others = {key: np.asarray(value) for key, value in steps.items() if key not in spaces}
        return {**arrays, **others}

    # --- playing ---------------------------------------------------------------------------------

    @property
    def now(self) -> Imagined:
        """The current moment."""
        if not self._line:
            raise ConfigError("The dream has not started: call start() first.")
        return self._line[self._at]

    @property
    def line(self) -> list[Imagined]:
        """All kept moments, also those after `now`."""
        return list(self._line)

    @property
    def following(self) -> Imagined | None:
        """The moment after `now`, if the dream has gone back."""
        return next(iter(self._line[self._at + 1 : self._at + 2]), None)

    def act(self, *, greedy: bool = False) -> Arrays:
        """The action of the policy: a sample, or the mode."""
        chosen = self.now.mode if greedy else self.now.sample
        return {key: self._bounded(key, chosen[key]) for key in self.act_space}

    def step(self, action: Mapping[str, Any] | Any) -> Imagined:
        """Imagine one step. After going back, later moments are replaced.

        Args:
            action: A value for each key of `act_space`; the value alone if there is one key.
        """
        before = self.now
        taken = self.checked_action(action)
        number = before.number + 1
        latent, guess = self._model.imagine(before.latent, taken, self.seed, number)
        del self._line[self._at + 1 :]
        self._line.append(Imagined(**vars(guess), number=number, action=taken, latent=latent))
        del self._line[:-_KEPT]
        self._at = len(self._line) - 1
        return self.now

    def reset(self) -> Imagined:
        """Go back to the start, and forget the rest."""
        if self._start is None:
            raise ConfigError("The dream has not started: call start() first.")
        self._line, self._at = [self._start], 0
        return self.now

    def rewind(self, steps: int = 1) -> Imagined:
        """Go back, to the oldest kept moment at most."""
        return self.go(max(self.now.number - steps, self._line[0].number))

    def go(self, number: int) -> Imagined:
        """Go to a kept moment, back or forward."""
        first = self.now.number - self._at
        if not 0 <= number - first < len(self._line):
            raise ConfigError(
                f"Step {number} is not kept: {first} to {first + len(self._line) - 1} are kept."
            )
        self._at = number - first
        return self.now

    def branch(self) -> Dream:
        """Another dream at the same moment with the same past."""
        other = copy.copy(self)
        other._line = self._line[: self._at + 1]
        other._at = max(len(other._line) - 1, 0)
        return other

    def checked_action(self, action: Mapping[str, Any] | Any) -> Arrays:
        """A valid action for the world model; continuous ones are clipped."""
        if not isinstance(action, Mapping):
            if len(self.act_space) > 1:
                raise ConfigError(f"An action is a dict with the keys {', '.join(self.act_space)}.")
            action = {next(iter(self.act_space)): action}
        if missing := self.act_space.keys() - action.keys():
            raise ConfigError(f"The action lacks {', '.join(sorted(missing))}.")
        return {key: self._bounded(key, action[key]) for key in self.act_space}

    def _bounded(self, key: str, value: Any) -> NDArray[Any]:
        space, array = self.act_space[key], np.asarray(value)
        if array.shape != space.shape or array.dtype.kind not in "biuf":
            raise ConfigError(f"Action {key!r} has shape {array.shape}, and its space is {space}.")
        if space.discrete:
            if array.dtype.kind == "f" or np.any((array < space.low) | (array >= space.high)):
                raise ConfigError(f"Action {key!r} is {array}, outside of its space {space}.")
            return array.astype(space.dtype)
        if not np.isfinite(array).all():
            raise ConfigError(f"Action {key!r} holds NaN or infinity.")
        return np.asarray(np.clip(array, space.low, space.high), space.dtype)
