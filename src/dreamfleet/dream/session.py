"""A dream that a viewer plays, its branches, and the truth beside it, as plain values.

A page gets dicts of numbers, text and PNG bytes, so that its server does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays
from dreamfleet.dream.dream import Dream, Imagined
from dreamfleet.dream.reality import Reality, image_of
from dreamfleet.envs.masks import ACTION_MASK
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.metrics.frames import encode_png
from dreamfleet.replay.reading import StoredEpisode

MAX_STEPS = 2000
MAX_BRANCHES = 8
MAX_NUMBERS = 24
"""Numbers of an observation that are drawn."""
MAX_POINTS = 200
"""Moments in a curve."""
MAX_PREDICTED = 48
_MAX_EPISODES = 200
_MIN_CONTINUATION = 0.5
"""The predicted probability below which an episode is over."""

Who = Literal["you", "policy", "recorded"]
Plain = dict[str, Any]


@dataclass
class _Branch:
    """One line of a dream, and the truth by the number of the moment."""

    dream: Dream
    truth: dict[int, list[float]] = field(default_factory=dict)
    """Reward, error of the dream, and the numbers of the observation."""


class Session:
    """A dream that is played."""

    def __init__(self, dream: Dream, *, trust: bool = False) -> None:
        self._loaded = dream  # other viewers find it by a weak reference
        self._branches = [_Branch(dream.branch())]
        self._current = 0
        self._episodes: list[StoredEpisode] = []
        self._recorded: list[Arrays] = []  # steps of the stored episode, by number
        self._real: Reality | None = None
        self._note = ""
        """Why there is no real environment."""
        self._follows = False
        try:
            if dream.blueprint is not None:
                self._real = Reality(dream.blueprint, trust=trust)
        except DreamfleetError as error:
            short = "Its environment is not part of Dreamfleet, and is not trusted."
            self._note = str(error) if trust else short

    @property
    def dream(self) -> Dream:
        """The branch that is played."""
        return self._branches[self._current].dream

    def describe(self) -> Plain:
        """What can be chosen: episodes to start from, and actions."""
        dream = self.dream
        self._episodes = dream.episodes(_MAX_EPISODES)
        return {
            "task": dream.blueprint.config.task if dream.blueprint else "",
            "step": dream.trained_steps,
            "real": self._real is not None,
            "note": self._note,
            "actions": [
                {
                    "name": name,
                    "discrete": space.discrete,
                    "size": int(np.prod(space.shape)),
                    "shape": list(space.shape),
                    "choices": [int(n) for n in np.ravel(space.classes)] if space.discrete else [],
                    "low": np.ravel(space.low).tolist(),
                    "high": np.ravel(space.high).tolist(),
                }
                for name, space in dream.act_space.items()
            ],
            "episodes": [
                {"stream": str(each.stream)}
                | {name: getattr(each, name) for name in ("length", "score", "begins", "ends")}
                for each in self._episodes
            ],
        }

    def start(self, episode: int | None, observe: int, seed: int) -> Plain:
        """Start from an episode, named by its place in `describe`; None is a fresh one of the real
        environment."""
        dream = self.dream
        dream.seed = seed
        self._branches, self._current = [_Branch(dream)], 0
        self._follows, self._recorded = False, []
        if episode is None:
            if self._real is None:
                raise ConfigError(f"There is no environment for a fresh episode: {self._note}")
            self._real.fresh(seed)
            self._follows, self._note = True, ""
            dream.start(self._real.steps)
            return self.show()
        if not 0 <= episode < len(self._episodes):
            raise ConfigError(f"There is no episode {episode}: choose another one.")
        chosen = self._episodes[episode]
        dream.start(chosen, observe=observe)
        end = min(chosen.length, observe + MAX_STEPS)
        rows = chosen.read(observe - 1, end, {*dream.obs_space, *dream.act_space, "reward"})
        count = end - observe + 1
        self._recorded = [{key: value[n] for key, value in rows.items()} for n in range(count)]
        if self._real is not None:
            self._follows, self._note = True, ""
            self._try(partial(self._real.follow, chosen, observe))
        return self.show()

    def step(self, who: Who, action: Mapping[str, Any] | None = None) -> Plain:
        """Imagine a step. After going back, the same action goes forward again, and another one
        starts a new branch."""
        dream = self.dream
        number = dream.now.number
        if number >= MAX_STEPS:
            raise ConfigError(f"A dream has {MAX_STEPS:,} steps at most: go back, or reset it.")
        if _is_over(dream.now):
            raise ConfigError(
                "The dream is over: the world model predicts that the episode ends here. Go back, "
                "or start again."
            )
        if who == "recorded":
            chosen = self._recorded_action(number)
        elif who == "you":
            chosen = dream.checked_action(_arrays(dream, action or {}))
        else:
            chosen = dream.act()
        following = dream.following
        if following and _equal(following.action, chosen):
            dream.go(number + 1)
        else:
            if following:
                self._branch_off()
            self.dream.step(chosen)
        if self._real is not None and self._follows:
            self._try(partial(self._real.step, chosen))
        return self.show()

    def predict(self) -> Plain:
        """Imagine what the recorded actions lead to, at once."""
        for _ in range(MAX_PREDICTED):
            if not self._recorded_left(self.dream.now.number) or _is_over(self.dream.now):
                break
            self.step("recorded")
        return self.show()

    def go(self, number: int, branch: int | None = None) -> Plain:
        """Go to a moment of this or another branch."""
        if branch is not None:
            if not 0 <= branch < len(self._branches):
                raise ConfigError(f"There is no branch {branch}.")
            self._current = branch
        self.dream.go(min(number, self.dream.line[-1].number))
        if self._real is not None and self._follows:
            self._try(partial(self._real.repeat, self._actions()))
        return self.show()

    def _try(self, act: Callable[[], object]) -> None:
        """Let the environment act; it no longer follows if it fails."""
        try:
            act()
        except DreamfleetError as error:
            self._follows, self._note = False, str(error)

    def reset(self) -> Plain:
        """Back to the start, without branches."""
        self._branches, self._current = [_Branch(self.dream)], 0
        self.dream.reset()
        return self.go(0)

    def close(self) -> None:
        """Release the environments."""
        if self._real is not None:
            self._real.close()

    def show(self) -> Plain:
        """The moment, and the curves up to it."""
        dream, now = self.dream, self.dream.now
        truth = self._truth(now.number)
        return {
            "number": now.number,
            "length": dream.line[-1].number,
            "branch": self._current,
            "branches": len(self._branches),
            "reward": now.reward,
            "continuation": now.continuation,
            "over": _is_over(now),
            "value": now.value,
            "frame": _png(self._draw(now.obs)),
            "allowed": [] if now.allowed is None else np.ravel(now.allowed).tolist(),
            "recorded": self._recorded_left(now.number),
            "names": list(self._real.action_names) if self._real else [],
            "note": self._note if truth else self._why_unknown(),
            "truth": truth,
            "curves": self._curves(),
        }

    def _curves(self) -> Plain:
        """Numbers of the last moments by title: of the dream, and of reality where it is known."""
        dream, truth = self.dream, self._branches[self._current].truth
        end = dream.now.number
        line = [each for each in dream.line if end - MAX_POINTS < each.number <= end]
        titles = _titles(dream.now.obs)
        unknown = [np.nan] * (2 + len(titles))
        rows = [[each.reward, each.continuation, each.value, *_values(each.obs)] for each in line]
        imagined = np.array(rows, np.float32).T
        real = np.array([truth.get(each.number, unknown) for each in line], np.float32).T
        found = {
            title: {"dream": values}
            for title, values in zip(("Reward", "Continuation", "Value"), imagined, strict=False)
        }
        if known := bool(np.isfinite(real[1]).any()):
            found["Reward"]["reality"] = real[0]
            found["Error of the dream"] = {"error": real[1]}
        for title, values, true in zip(titles, imagined[3:], real[2:], strict=True):
            found[title] = {"dream": values} | ({"reality": true} if known else {})
        return {"at": np.array([each.number for each in line], np.float32), "lines": found}

    # --- truth -----------------------------------------------------------------------------------

    def _truth(self, number: int) -> Plain | None:
        """What really happens: in the environment until its episode ends, or in the recording while
        its actions are taken."""
        now = self.dream.now
        if self._real is not None and self._follows:
            real, source = self._real.now, "environment"
            if real.number < number:
                return None
            obs, reward, last, frame = real.obs, real.reward, real.last, real.frame
        elif self._as_recorded():
            obs, source = self._recorded[number], "recording"
            reward, last = float(obs["reward"]), number == len(self._recorded) - 1
            frame = self._draw(obs)
        else:
            return None
        difference = _difference(now.obs, obs)
        values = _values({key: obs[key] for key in now.obs})
        self._branches[self._current].truth[number] = [reward, difference, *values]
        return {
            "source": source,
            "frame": _png(frame),
            "reward": reward,
            "last": last,
            "difference": difference,
        }

    def _draw(self, obs: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8] | None:
        return self._real.draw(obs) if self._real else image_of(obs)

    def _why_unknown(self) -> str:
        """Why the truth is unknown."""
        if self._real is not None and self._follows:
            return f"The real episode ended at step {self._real.now.number}."
        return self._note or "The truth is unknown: these are not the recorded actions."

    def _recorded_left(self, number: int) -> int:
        """Actions of the recording that are left."""
        return max(len(self._recorded) - 1 - number, 0)

    def _recorded_action(self, number: int) -> Arrays:
        if not self._recorded_left(number):
            raise ConfigError("The recording is over: choose actions, or let the policy act.")
        step, dream = self._recorded[number], self.dream
        return dream.checked_action({key: step[key] for key in dream.act_space})

    def _as_recorded(self) -> bool:
        """Whether all actions so far are those of the recording."""
        actions = self._actions()
        if len(actions) >= len(self._recorded):
            return False
        return all(_equal(self._recorded_action(n), each) for n, each in enumerate(actions))

    def _actions(self) -> list[Arrays]:
        """All actions up to now."""
        line, now = self.dream.line, self.dream.now
        return [each.action for each in line if each.action and each.number <= now.number]

    def _branch_off(self) -> None:
        """Keep this branch, and continue in a new one."""
        before = self._branches[self._current]
        number = before.dream.now.number
        known = {n: each for n, each in before.truth.items() if n <= number}
        if len(self._branches) == MAX_BRANCHES:
            self._branches.remove(next(each for each in self._branches if each is not before))
        self._branches.append(_Branch(before.dream.branch(), known))
        self._current = len(self._branches) - 1


def _arrays(dream: Dream, action: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of numbers from a page, in the shapes of an action."""
    return {
        key: np.asarray(value, space.dtype).reshape(space.shape)
        for key, space in dream.act_space.items()
        if (value := action.get(key)) is not None
    }


def _png(image: NDArray[np.uint8] | None) -> bytes:
    return b"" if image is None else encode_png(image)


def _is_over(now: Imagined) -> bool:
    return now.continuation < _MIN_CONTINUATION


def _equal(left: Arrays | None, right: Arrays) -> bool:
    return left is not None and all(np.array_equal(left[key], right[key]) for key in right)


def _shown(obs: Mapping[str, NDArray[Any]]) -> list[tuple[str, NDArray[Any]]]:
    """Keys that are drawn as curves: all but images."""
    return [(key, obs[key]) for key in sorted(obs) if obs[key].ndim < 3 and key != ACTION_MASK]


def _titles(obs: Mapping[str, NDArray[Any]]) -> list[str]:
    """Titles of the numbers that are drawn."""
    parts = ([f"{k} {n}" for n in range(v.size)] if v.ndim else [k] for k, v in _shown(obs))
    return list(chain.from_iterable(parts))[:MAX_NUMBERS]


def _values(obs: Mapping[str, NDArray[Any]]) -> list[float]:
    """The numbers that are drawn."""
    values = [float(each) for _, value in _shown(obs) for each in np.ravel(value)[:MAX_NUMBERS]]
    return values[:MAX_NUMBERS]


def _difference(imagined: Mapping[str, NDArray[Any]], true: Mapping[str, NDArray[Any]]) -> float:
    """Error of an imagined observation: the mean absolute error of images, from 0 to 1, or else the
    root mean square error of numbers."""
    images: list[NDArray[np.float64]] = []
    numbers: list[NDArray[np.float64]] = []
    for key in imagined.keys() & true.keys():
        error = imagined[key].astype(np.float64) - true[key]
        (images if imagined[key].ndim == 3 else numbers).append(np.ravel(error))
    if images:
        return float(np.mean(np.abs(np.concatenate(images))) / 255)
    return float(np.sqrt(np.mean(np.square(np.concatenate(numbers))))) if numbers else 0.0
