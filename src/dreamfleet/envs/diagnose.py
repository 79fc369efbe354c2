"""Play an environment and report what is wrong with it.

What breaks the contract is a problem. What is allowed but probably a mistake is a hint. Both come
with the fix.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import (
    Arrays,
    Env,
    EnvError,
    Spaces,
    UnknownTaskError,
    noop,
    renderer,
    sample_action,
)
from dreamfleet.errors import ConfigError, MissingExtraError
from dreamfleet.spaces import FLAGS, RESET, SpaceError, without_logs

_FRAMES = 20
_COMPARED_STEPS = 200
_SLOW = 100.0
_BRIEF = 4096


@dataclass(frozen=True)
class Finding:
    """A finding, and the fix."""

    what: str
    fix: str


@dataclass
class Diagnosis:
    """The findings about an environment."""

    obs_space: Spaces = field(default_factory=dict)
    act_space: Spaces = field(default_factory=dict)
    steps: int = 0
    episodes: int = 0
    score: float = float("nan")
    length: float = float("nan")
    make_seconds: float = 0.0
    steps_per_second: float = 0.0
    slowest_reset: float = 0.0
    problems: list[Finding] = field(default_factory=list)
    hints: list[Finding] = field(default_factory=list)
    frames: list[NDArray[np.uint8]] = field(default_factory=list)


def diagnose(
    make: Callable[[int], Env],
    *,
    steps: int = 1000,
    seed: int = 0,
    make_visible: Callable[[int], Env] | None = None,
) -> Diagnosis:
    """Play random actions.

    Args:
        make: The environment for a seed, as `make_env` gives it.
        steps: How many to play.
        seed: Of the environment and of the actions.
        make_visible: The same environment, made so that it renders.

    Raises:
        ConfigError: The options are wrong, which is no problem of the environment.
        UnknownTaskError: There is no such task.
        MissingExtraError: Its package is not installed.
    """
    result = Diagnosis()
    try:
        start = time.perf_counter()
        env = make(seed)
        result.make_seconds = time.perf_counter() - start
        result.obs_space, result.act_space = env.obs_space, env.act_space
        trajectory = _play(env, steps, seed, result)
        _close(env)
        _count_episodes(result, trajectory)
        result.problems += _flags(trajectory)
        compared = min(steps, _COMPARED_STEPS)
        result.hints += _seeds(make, trajectory[: compared + 1], seed)
    except (ConfigError, UnknownTaskError, MissingExtraError):
        raise
    except (EnvError, SpaceError) as error:
        result.problems.append(Finding(str(error), ""))
        return result
    except Exception as error:
        result.problems.append(
            Finding(
                f"It raised {type(error).__name__}: {error}.",
                "Fix it, or let it be rebuilt with the option restarts.",
            )
        )
        return result
    result.hints += [*_values(result, trajectory), *_speed(result)]
    if make_visible and not result.frames:
        result.hints += _render(make_visible, compared, seed, result)
    return result


def _play(env: Env, steps: int, seed: int, result: Diagnosis) -> list[Arrays]:
    """A trajectory of steps + 1 observations. Times, frames and problems go to the result."""
    rng = np.random.default_rng(seed)
    frame_of = renderer(env)
    every = max(1, steps // _FRAMES)
    times: list[float] = []
    previous: Arrays = {}
    copy: Arrays = {}
    trajectory: list[Arrays] = []
    for number in range(steps + 1):
        action = sample_action(env.act_space, rng)
        if number == 0 or trajectory[-1]["is_last"]:
            action = noop(env.act_space)
        start = time.perf_counter()
        obs = env.step(action)
        elapsed = time.perf_counter() - start
        if action[RESET]:
            result.slowest_reset = max(result.slowest_reset, elapsed)
        else:
            times.append(elapsed)
        if not result.problems:
            result.problems += _overwritten(previous, copy)
        previous, copy = obs, {key: value.copy() for key, value in obs.items()}
        trajectory.append({key: _brief(value) for key, value in copy.items()})
        if (
            number % every == 0
            and len(result.frames) < _FRAMES
            and (frame := frame_of(copy)) is not None
        ):
            result.frames.append(frame)
    result.steps = len(times)
    # The median: a step that had to wait for a processor says nothing about the environment.
    result.steps_per_second = 1 / max(statistics.median(times), 1e-9) if times else 0.0
    return trajectory


def _brief(value: NDArray[Any]) -> NDArray[Any]:
    """The value, or the checksum of a large one: enough to compare, and little memory."""
    return value if value.nbytes <= _BRIEF else np.array(zlib.crc32(value.tobytes()))


def _count_episodes(result: Diagnosis, trajectory: list[Arrays]) -> None:
    scores, lengths, score, length = [], [], 0.0, 0
    for obs in trajectory:
        score, length = (0.0, 0) if obs["is_first"] else (score + float(obs["reward"]), length + 1)
        if obs["is_last"]:
            scores.append(score)
            lengths.append(length)
    result.episodes = len(scores)
    if scores:
        result.score, result.length = float(np.mean(scores)), float(np.mean(lengths))


def _overwritten(then: Arrays, copy: Arrays) -> Iterator[Finding]:
    for key, value in then.items():
        if not np.array_equal(value, copy[key], equal_nan=value.dtype.kind == "f"):
            yield Finding(
                f"The array of {key!r} was overwritten by the next step.",
                "Return a copy: observations are sent and stored while the next step runs.",
            )


def _flags(trajectory: list[Arrays]) -> Iterator[Finding]:
    if not trajectory[0]["is_first"]:
        yield Finding("The observation after a reset is not is_first.", "Set is_first there.")
    for before, after in pairwise(trajectory):
        if after["is_first"] and not before["is_last"]:
            yield Finding(
                "An episode started although the one before had not ended.",
                "Set is_last on the last observation of every episode.",
            )
            break
        if before["is_last"] and not after["is_first"]:
            yield Finding(
                "A reset did not start an episode.", "Start one whenever the action says reset."
            )
            break
    if any(obs["is_terminal"] and not obs["is_last"] for obs in trajectory):
        yield Finding("is_terminal without is_last.", "A terminal step is the last one: set both.")
    if any(obs["is_first"] and obs["reward"] != 0 for obs in trajectory):
        yield Finding(
            "The first observation of an episode has a reward.",
            "Return 0 there: no action has earned anything yet.",
        )


def _seeds(make: Callable[[int], Env], trajectory: list[Arrays], seed: int) -> Iterator[Finding]:
    difference = _difference(make, trajectory, seed, seed)
    if difference:
        yield Finding(
            f"The same seed gives another run: {difference}.",
            "Take all randomness from the seed, if runs should be repeatable.",
        )
    elif not _difference(make, trajectory, seed, seed + 1):
        yield Finding(
            "Another seed gives the same run.",
            "Use the seed, unless the environment is deterministic: otherwise all copies of it "
            "play the same episodes.",
        )


def _difference(
    make: Callable[[int], Env], trajectory: list[Arrays], action_seed: int, env_seed: int
) -> str:
    env = make(env_seed)
    # As many actions as the trajectory was played with, so that they are the same ones.
    again = _play(env, len(trajectory) - 1, action_seed, Diagnosis())
    _close(env)
    for number, (one, two) in enumerate(zip(trajectory, again, strict=True)):
        for key, value in one.items():
            if not np.array_equal(value, two[key]):
                return f"{key!r} differs at step {number}"
    return ""


def _values(result: Diagnosis, trajectory: list[Arrays]) -> Iterator[Finding]:
    if not result.episodes:
        yield Finding(
            f"No episode ended within {result.steps} steps.",
            "Set time_limit if they have no end, or check longer with --steps.",
        )
    if all(obs["reward"] == 0 for obs in trajectory):
        yield Finding(
            "Random actions earned no reward.",
            "Nothing to do if rewards are rare; otherwise check how they are computed.",
        )
    for key in without_logs(result.obs_space).keys() - {*FLAGS}:
        first = trajectory[0][key]
        if all(np.array_equal(first, obs[key]) for obs in trajectory):
            yield Finding(
                f"Observation {key!r} never changed.", "Leave it out if it holds no information."
            )


def _render(
    make: Callable[[int], Env], steps: int, seed: int, result: Diagnosis
) -> Iterator[Finding]:
    """Take the frames from a second environment: the one for training does not render."""
    visible = Diagnosis()
    try:
        env = make(seed)
        try:
            _play(env, steps, seed, visible)
        finally:
            _close(env)
    except Exception as error:
        yield Finding(
            f"It cannot be rendered: {str(error).rstrip('.')}.", "Training needs no frames."
        )
    result.frames = visible.frames


def _speed(result: Diagnosis) -> Iterator[Finding]:
    if result.steps_per_second < _SLOW:
        yield Finding(
            f"It makes {result.steps_per_second:.0f} steps a second.",
            "Use several environments, and processes as long as there are cores.",
        )


def _close(env: Env) -> None:
    close = getattr(env, "close", None)
    if close:
        close()
