"""A dream that a viewer plays, its branches, and the truth beside it, as plain values.

A page gets dicts of numbers, text and PNG bytes, so that its server does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays
from dreamfleet.dream.dream import Dream, Imagined
from dreamfleet.dream.reality import Real, Reality, image_of
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.masks import ACTION_MASK
from dreamfleet.metrics.frames import encode_png
from dreamfleet.replay.reading import StoredEpisode

MAX_STEPS = 2000
MAX_BRANCHES = 8
MAX_NUMBERS = 24
"""Numbers of an observation that are drawn."""
MAX_POINTS = 200
"""Moments in a curve."""
MAX_PREDICTED = 48
FRESH = -1
"""The start from a fresh episode of the environment."""
_MAX_EPISODES = 200
_MIN_CONTINUATION = 0.5
"""The predicted probability below which an episode is over."""
_ERROR = "Error of the dream"

Who = Literal["you", "policy", "recorded"]
Plain = dict[str, Any]


class Session:
    """A dream that is played."""

    def __init__(self, dream: Dream, *, trust: bool = False) -> None:
        self._loaded = dream  # other viewers find it by a weak reference
        self._branches = [dream.branch()]
        self._current = 0
        self._truth: dict[Imagined, dict[str, float]] = {}
        """True numbers by title."""
        self._episodes: list[StoredEpisode] = []
        self._recorded: list[Arrays] = []  # steps of the stored episode, by number
        self._real: Reality | None = None
        self._follows = False
        self._note = ""
        """Why the real environment does not follow."""
        try:
            if dream.blueprint is not None:
                self._real = Reality(dream.blueprint, trust=trust)
        except DreamfleetError as error:
            short = "Its environment is not part of Dreamfleet, and is not trusted."
            self._note = str(error) if trust else short

    @property
    def dream(self) -> Dream:
        """The branch that is played."""
        return self._branches[self._current]

    def describe(self) -> Plain:
        """What can be chosen: episodes to start from, and actions."""
        dream = self.dream
        self._episodes = dream.episodes(_MAX_EPISODES)
        return {
            "task": dream.blueprint.config.task if dream.blueprint else "",
            "step": dream.trained_steps,
            "note": self._note,
            "starts": self._starts(),
            # A number of an action each: choices, or a range.
            "controls": [
                {"name": f"{key} {n}" if space.shape else key, "low": low, "high": high}
                | {"choices": int(np.ravel(space.classes)[n]) if space.discrete else 0}
                for key, space in dream.act_space.items()
                for n, (low, high) in enumerate(
                    zip(np.ravel(space.low).tolist(), np.ravel(space.high).tolist(), strict=True)
                )
            ],
        }

    def _starts(self) -> list[Any]:
        """What `start` takes, a title, and the steps to observe: a fresh episode first, if there is
        an environment, then whole episodes, the newest first."""
        found = []
        for number, each in enumerate(self._episodes):
            part = "" if each.begins and each.ends else ", a part" if each.ends else ", not over"
            text = f"{each.length:,} steps, score {each.score:.4g}{part}"
            # Enough to see what moves, with most of the episode left to play.
            observe = max(1, min(5, each.length // 4))
            found.append((bool(part), number, f"{text} · environment {each.stream}", observe))
        fresh = [(FRESH, "a fresh episode", 1)] if self._real is not None else []
        return fresh + [each for _, *each in sorted(found)]

    def start(self, episode: int, observe: int, seed: int) -> Plain:
        """Start from an episode of `describe`, or from a fresh one of the real environment."""
        dream, real = self.dream, self._real
        dream.seed = seed
        self._branches, self._current, self._truth = [dream], 0, {}
        self._follows, self._recorded = False, []
        if episode == FRESH:
            if real is None:
                raise ConfigError(f"There is no environment for a fresh episode: {self._note}")
            real.fresh(seed)
            self._follows, self._note = True, ""
            dream.start(real.steps)
            return self.show()
        if not 0 <= episode < len(self._episodes):
            raise ConfigError(f"There is no episode {episode}: choose another one.")
        chosen = self._episodes[episode]
        observe = min(max(observe, 1), chosen.length)
        dream.start(chosen, observe=observe)
        end = min(chosen.length, observe + MAX_STEPS)
        rows = chosen.read(observe - 1, end, {*dream.obs_space, *dream.act_space, "reward"})
        count = end - observe + 1
        self._recorded = [{key: value[n] for key, value in rows.items()} for n in range(count)]
        if real is not None:
            self._follows, self._note = True, ""
            self._let_follow(lambda: real.follow(chosen, observe))
        return self.show()

    def step(self, who: Who, numbers: Sequence[float] = ()) -> Plain:
        """Imagine a step; `numbers` is your action. After going back, the same action goes forward
        again, and another one starts a new branch."""
        self._advance(who, numbers)
        return self.show()

    def _advance(self, who: Who, numbers: Sequence[float] = ()) -> None:
        dream = self.dream
        number, following = dream.now.number, dream.following
        if number >= MAX_STEPS:
            raise ConfigError(f"A dream has {MAX_STEPS:,} steps at most: go back, or start again.")
        if _is_over(dream.now):
            raise ConfigError(
                "The dream is over: the world model predicts that the episode ends here. Go back, "
                "or start again."
            )
        if who == "recorded":
            chosen = self._recorded_action(number)
        elif who == "you":
            chosen = dream.checked_action(_arrays(dream, numbers))
        else:
            chosen = dream.act()
        if following and _equal(following.action, chosen):
            dream.go(number + 1)
            return
        if following:  # the old branch is kept
            if len(self._branches) == MAX_BRANCHES:
                self._branches.remove(next(each for each in self._branches if each is not dream))
            self._branches.append(dream.branch())
            self._current = len(self._branches) - 1
        self.dream.step(chosen)

    def predict(self) -> Plain:
        """Imagine what the recorded actions lead to, at once."""
        for _ in range(MAX_PREDICTED):
            if not self._recorded_left or _is_over(self.dream.now):
                break
            self._advance("recorded")
            self._compare()
        return self.show()

    def go(self, number: int, branch: int | None = None) -> Plain:
        """Go to a moment of this or another branch."""
        if branch is not None:
            if not 0 <= branch < len(self._branches):
                raise ConfigError(f"There is no branch {branch}.")
            self._current = branch
        self.dream.go(min(number, self.dream.line[-1].number))
        return self.show()

    def _let_follow(self, act: Callable[[], object]) -> None:
        """Let the environment act; it no longer follows if it fails."""
        try:
            act()
        except DreamfleetError as error:
            self._follows, self._note = False, str(error)

    def close(self) -> None:
        """Release the environments."""
        if self._real is not None:
            self._real.close()

    def show(self) -> Plain:
        """The moment, and the curves up to it."""
        dream, now, real = self.dream, self.dream.now, self._compare()
        truth: Plain | None = None
        if real is not None:
            source = "environment" if self._follows else "recording"
            truth = {"source": source, "frame": _png(real.frame), "last": real.last}
            truth |= {"reward": real.reward, "difference": self._truth[now][_ERROR]}
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
            "recorded": self._recorded_left,
            "names": list(self._real.action_names) if self._real else [],
            "note": self._note if truth else self._why_unknown(),
            "truth": truth,
            "curves": self._curves(),
        }

    def _curves(self) -> Plain:
        """Numbers of the last moments by title: of the dream, and of reality where it is known."""
        end = self.dream.now.number
        line = [each for each in self.dream.line if end - MAX_POINTS < each.number <= end]
        real = [self._truth.get(each, {}) for each in line]
        rows = [
            {"Reward": each.reward, "Continuation": each.continuation, "Value": each.value}
            | {_ERROR: np.nan, **_numbers(each.obs)}
            for each in line
        ]
        found: dict[str, Plain] = {}
        for title in rows[-1]:
            imagined, true = (_column(each, title) for each in (rows, real))
            lines = {"error": true} if title == _ERROR else {"dream": imagined, "reality": true}
            lines = {name: values for name, values in lines.items() if np.isfinite(values).any()}
            found |= {title: lines} if lines else {}
        return {"at": np.array([each.number for each in line], np.float32), "lines": found}

    # --- truth -----------------------------------------------------------------------------------

    def _compare(self) -> Real | None:
        """What really happens: in the environment until its episode ends, or in the recording while
        its actions are taken; None if it is unknown."""
        now, real = self.dream.now, self._real
        if real is not None and self._follows:
            self._let_follow(lambda: real.go(self._actions()))
        if real is not None and self._follows:
            found = real.now
        elif self._as_recorded():
            obs, last = self._recorded[now.number], not self._recorded_left
            found = Real(now.number, obs, float(obs["reward"]), last, self._draw(obs))
        else:
            return None
        if found.number < now.number:
            return None
        numbers = _numbers({key: found.obs[key] for key in now.obs})
        error = _difference(now.obs, found.obs)
        self._truth[now] = {"Reward": found.reward, _ERROR: error, **numbers}
        return found

    def _draw(self, obs: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8] | None:
        return self._real.draw(obs) if self._real else image_of(obs)

    def _why_unknown(self) -> str:
        """Why the truth is unknown."""
        if self._real is not None and self._follows:
            return f"The real episode ended at step {self._real.now.number}."
        return self._note or "The truth is unknown: these are not the recorded actions."

    @property
    def _recorded_left(self) -> int:
        """Actions of the recording that are left."""
        return max(len(self._recorded) - 1 - self.dream.now.number, 0)

    def _recorded_action(self, number: int) -> Arrays:
        if number >= len(self._recorded) - 1:
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


def _arrays(dream: Dream, numbers: Sequence[float]) -> dict[str, Any]:
    """The numbers of all controls as an action."""
    spaces = dream.act_space.values()
    ends = np.cumsum([np.prod(space.shape, dtype=int) for space in spaces])
    parts = np.split(np.asarray(numbers, np.float64), ends[:-1])
    shaped = (p.astype(s.dtype).reshape(s.shape) for p, s in zip(parts, spaces, strict=True))
    return dict(zip(dream.act_space, shaped, strict=True))


def _png(image: NDArray[np.uint8] | None) -> bytes:
    return b"" if image is None else encode_png(image)


def _is_over(now: Imagined) -> bool:
    return now.continuation < _MIN_CONTINUATION


def _equal(left: Arrays | None, right: Arrays) -> bool:
    return left is not None and all(np.array_equal(left[key], right[key]) for key in right)


def _numbers(obs: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Numbers of an observation that are drawn as curves, by title: all but images."""
    found = (
        (f"{key} {number}" if obs[key].ndim else key, float(value))
        for key in sorted(obs)
        if obs[key].ndim < 3 and key != ACTION_MASK
        for number, value in enumerate(np.ravel(obs[key])[:MAX_NUMBERS].tolist())
    )
    return dict(islice(found, MAX_NUMBERS))


def _column(rows: list[dict[str, float]], title: str) -> NDArray[np.float32]:
    return np.array([row.get(title, np.nan) for row in rows], np.float32)


def _difference(imagined: Mapping[str, NDArray[Any]], true: Mapping[str, NDArray[Any]]) -> float:
    """Error of an imagined observation: the mean absolute error of images, from 0 to 1, or else the
    root mean square error of numbers."""
    errors = {
        key: np.ravel(imagined[key].astype(np.float64) - true[key])
        for key in imagined.keys() & true.keys()
    }
    if images := [each for key, each in errors.items() if imagined[key].ndim == 3]:
        return float(np.mean(np.abs(np.concatenate(images))) / 255)
    return float(np.sqrt(np.mean(np.square(np.concatenate([*errors.values()])))) if errors else 0.0)
