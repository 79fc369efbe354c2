"""Play an environment and report what is wrong with it.

A problem breaks the contract; a hint is allowed but probably a mistake. Both come with the fix.
"""

from __future__ import annotations

import os
import re
import statistics
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

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
from dreamfleet.masks import ACTION_MASK, ActionMask
from dreamfleet.spaces import FLAGS, Space, SpaceError, space_differences, without_logs

_FRAMES = 20
_COMPARED_STEPS = 200
_SLOW = 100.0
_BRIEF = 4096
_FORBIDS_ALL = "Allow at least one action while the episode continues, or end it there."
_HEADER = "Traceback (most recent call last):\n"
_OUR_FILE = f'  File "{Path(__file__).parents[1]}{os.sep}'

ONLY_ONE = (
    "If there can be only one at a time, use --envs 1, without --eval-envs and --eval-every; if "
    "one in each process, use --envs-per-process 1."
)

Call = Literal["constructor", "reset", "step", "render", "close", "check"]
Made = TypeVar("Made")
Tell = Callable[[Call, int, int], None]
"""Called before each call of the environment with the fields of a `CurrentCall`."""


class CurrentCall(NamedTuple):
    """The call of an environment that is under way, in words that fit into a sentence."""

    name: Call | None = None
    done: int = 0
    """Steps made so far; of the constructor: environments made so far."""
    steps: int = 0
    """How many there will be."""

    def __str__(self) -> str:
        match self.name:
            case None:
                return "the start of Python"
            case "constructor":
                return f"the constructor{' of a second environment' if self.done else ''}"
            case "step":
                return f"step {self.done + 1:,} of {self.steps:,}"
            case _:
                return f"{self.name}()"

    @property
    def title(self) -> str:
        """The same at the start of a sentence."""
        text = str(self)
        return text if text.endswith(")") else text[0].upper() + text[1:]


@dataclass(frozen=True)
class Finding:
    """A finding, the fix, and the traceback if there is one."""

    what: str
    fix: str
    trace: str = ""


@dataclass
class Diagnosis:
    """What was measured and found."""

    obs_space: Spaces = field(default_factory=dict)
    act_space: Spaces = field(default_factory=dict)
    single: bool = False
    """Whether only one can exist at a time."""
    steps: int = 0
    episodes: int = 0
    score: float = float("nan")
    length: float = float("nan")
    make_seconds: float = 0.0
    steps_per_second: float = 0.0
    slowest_reset: float = 0.0
    notes: list[str] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    hints: list[Finding] = field(default_factory=list)
    frames: list[NDArray[np.uint8]] = field(default_factory=list)


def diagnose(
    make: Callable[[int], Env],
    *,
    steps: int = 1000,
    seed: int = 0,
    make_visible: Callable[[int], Env | None] | None = None,
    tell: Tell = lambda *_: None,
) -> Diagnosis:
    """Play random actions.

    Args:
        make: Makes the environment for a seed, as `make_env` does.
        steps: How many to play; resets are not counted.
        seed: Of the environment and of the actions.
        make_visible: Makes one that renders; None if it never does.
        tell: Called before each call of the environment.

    Raises:
        ConfigError: The options are wrong.
        UnknownTaskError: There is no such task.
        MissingExtraError: Its package is not installed.
    """
    call, compared = CurrentCall(), min(steps, _COMPARED_STEPS)

    def told(*fields: Any) -> None:
        nonlocal call
        call = CurrentCall(*fields)
        tell(*fields)

    play = _Play(steps, seed, told)
    result = play.result
    try:
        start = time.perf_counter()
        env = play.made(make, seed)
        result.make_seconds = time.perf_counter() - start
        result.obs_space, result.act_space = env.obs_space, env.act_space
        result.notes = list(getattr(env, "notes", ()))
        play.run(env)
        missing = {  # what is logged and was never there
            key
            for key in result.obs_space.keys() - without_logs(result.obs_space).keys()
            if all(np.isneginf(obs[key]) for obs in play.trajectory)
        }
        result.obs_space = {k: s for k, s in result.obs_space.items() if k not in missing}
        try:
            second = play.made(make, seed + 1, 1)
            spaces = [(each.obs_space, each.act_space) for each in (env, second)]
            if different := different_spaces(*spaces):
                result.problems.append(Finding(different, ""))
        except (Exception, SystemExit) as error:
            result.single, second = True, None
            what = f"A second environment failed beside the first: {error!r}."
            result.hints.append(Finding(what, ONLY_ONE))
        play.close(env)
        result.problems += _flags(play.trajectory)
        other = play.difference(second or play.made(make, seed + 1, 1), compared)
        same = play.difference(play.made(make, seed, 1), compared)
        result.hints += _when(
            (same, f"The same seed gives different episodes: {same}.",
             "Take all randomness from the seed, if runs should be repeatable."),
            (not same and not other, "Another seed gives the same episodes.",
             "Use the seed, unless the environment is deterministic: otherwise all copies of it "
             "play the same episodes."),
        )  # fmt: skip
    except (ConfigError, UnknownTaskError, MissingExtraError):
        raise
    except (EnvError, SpaceError) as error:
        cause = own_traceback(error.__cause__) if error.__cause__ else ""
        result.problems.append(Finding(str(error), "", cause))
        return result
    except (Exception, SystemExit) as error:
        result.problems.append(_raised(error, call, result))
        return result
    result.hints += _values(result, play.trajectory)
    if make_visible and not result.frames:
        # The environment for training does not render.
        visible = _Play(compared, seed, told)
        try:
            if shown := visible.made(make_visible, seed, 1):
                try:
                    visible.run(shown)
                finally:
                    visible.close(shown)
        except (Exception, SystemExit) as error:
            what = f"It cannot be rendered: {str(error).rstrip('.')}."
            result.hints.append(Finding(what, "Training needs no frames."))
        result.frames = visible.result.frames
    return result


def try_out(env: Env, tell: Tell = lambda *_: None) -> None:
    """Reset an environment and take one step.

    Raises:
        EnvError: It breaks the contract.
        SpaceError: A space and a value disagree.
    """
    play = _Play(1, 0, tell)
    play.run(env, frames=0)
    if not play.trajectory[0]["is_first"]:
        raise EnvError("The observation after a reset is not is_first: set is_first there.")


def different_spaces(one: Sequence[Mapping[str, Space]], two: Sequence[Mapping[str, Space]]) -> str:
    """How the spaces of two environments of a run differ; empty if they do not."""
    for what, key, before, now in space_differences(one, two):
        return (
            f"Two environments have different spaces: {what} {key!r} is {before} in the first and "
            f"{now} in the second. Give all of them the same spaces, whatever their seed."
        )
    return ""


class _Play:
    """Random actions in one environment: so many steps, and the resets that they need. What is
    found is in `result`, even if a step raises."""

    def __init__(self, steps: int, seed: int, tell: Tell) -> None:
        self._steps, self._seed, self._tell = steps, seed, tell
        self.result, self.trajectory = Diagnosis(), list[Arrays]()

    def made(self, make: Callable[[int], Made], seed: int, before: int = 0) -> Made:
        self._tell("constructor", before, self._steps)
        return make(seed)

    def close(self, env: Env) -> None:
        if close := getattr(env, "close", None):
            self._tell("close", 0, 0)
            close()

    def run(self, env: Env, frames: int = _FRAMES) -> None:
        rng, result = np.random.default_rng(self._seed), self.result
        mask, frame_of = ActionMask.of(env.obs_space, env.act_space), renderer(env)
        times: list[float] = []
        previous: Arrays = {}
        copy: Arrays = {}
        try:
            while len(times) < self._steps:
                reset = not copy or bool(copy["is_last"])
                action = noop(env.act_space) if reset else sample_action(env.act_space, rng)
                if mask and not reset:
                    action[mask.name] = mask.sample(rng, copy[ACTION_MASK])
                self._tell("reset" if reset else "step", len(times), self._steps)
                start = time.perf_counter()
                obs = env.step(action)
                elapsed = time.perf_counter() - start
                if reset:
                    result.slowest_reset = max(result.slowest_reset, elapsed)
                else:
                    times.append(elapsed)
                if not result.problems:
                    result.problems += _overwritten(previous, copy)
                    if mask and mask.empty(obs[ACTION_MASK]) and not obs["is_last"]:
                        what = f"{ACTION_MASK!r} forbids every action at step {len(times)}."
                        result.problems += [Finding(what, _FORBIDS_ALL)]
                previous, copy = obs, {key: value.copy() for key, value in obs.items()}
                self.trajectory.append({key: _brief(value) for key, value in copy.items()})
                if reset and obs["is_last"]:
                    raise EnvError(
                        "An episode ended with its first observation: a reset must be followed "
                        "by at least one action."
                    )
                shown = not reset and len(times) % max(1, self._steps // _FRAMES) == 0
                if shown and len(result.frames) < frames:
                    self._tell("render", len(times), self._steps)
                    frame = frame_of(copy)
                    result.frames += [] if frame is None else [frame]
        finally:
            result.steps = len(times)
            # The median, because a step may have waited for a CPU.
            result.steps_per_second = 1 / max(statistics.median(times), 1e-9) if times else 0.0
            episodes, score, length = [], 0.0, 0
            for obs in self.trajectory:
                goes_on = not obs["is_first"]
                score, length = goes_on * (score + float(obs["reward"])), goes_on * (length + 1)
                episodes += [(score, length)] if obs["is_last"] else []
            result.episodes = len(episodes)
            if episodes:
                result.score, result.length = map(float, np.mean(episodes, 0))

    def difference(self, env: Env, steps: int) -> str:
        """Play another environment and close it; returns where it differs."""
        again = _Play(steps, self._seed, self._tell)
        again.run(env)
        again.close(env)
        # Lengths may differ by resets, but then the values differ earlier.
        for number, (one, two) in enumerate(zip(self.trajectory, again.trajectory, strict=False)):
            for key, value in one.items():
                if key not in two or not np.array_equal(value, two[key]):
                    return f"{key!r} differs at step {number}"
        return ""


def _brief(value: NDArray[Any]) -> NDArray[Any]:
    """The value, or the checksum of a large one, to compare it later with little memory."""
    return value if value.nbytes <= _BRIEF else np.array(zlib.crc32(value.tobytes()))


def _overwritten(then: Arrays, copy: Arrays) -> list[Finding]:
    fix = "Return a copy: observations are sent and stored while the next step runs."
    return [
        Finding(f"The array of {key!r} was overwritten by the next step.", fix)
        for key, value in then.items()
        if not np.array_equal(value, copy[key], equal_nan=value.dtype.kind == "f")
    ]


def _when(*rows: tuple[object, str, str]) -> list[Finding]:
    """The findings whose condition holds."""
    return [Finding(what, fix) for holds, what, fix in rows if holds]


def _flags(trajectory: list[Arrays]) -> list[Finding]:
    pairs = list(pairwise(trajectory))
    return _when(
        (not trajectory[0]["is_first"],
         "The observation after a reset is not is_first.", "Set is_first there."),
        (any(now["is_first"] and not before["is_last"] for before, now in pairs),
         "An episode started before the previous one had ended.",
         "Set is_last on the last observation of every episode."),
        (any(before["is_last"] and not now["is_first"] for before, now in pairs),
         "A reset did not start an episode.", "Start one whenever the action says reset."),
        (any(obs["is_terminal"] and not obs["is_last"] for obs in trajectory),
         "is_terminal without is_last.", "A terminal step is the last one: set both."),
        (any(obs["is_first"] and obs["reward"] != 0 for obs in trajectory),
         "The first observation of an episode has a reward.",
         "Return 0 there: no action has earned anything yet."),
    )  # fmt: skip


def _values(result: Diagnosis, trajectory: list[Arrays]) -> list[Finding]:
    speed, first = result.steps_per_second, trajectory[0]
    keys = without_logs(result.obs_space).keys() - {*FLAGS}
    still = [k for k in keys if all(np.array_equal(first[k], obs[k]) for obs in trajectory)]
    return _when(
        (not result.episodes, f"No episode ended within {result.steps} steps.",
         "Set time_limit if episodes never end, or check longer with --steps."),
        (all(obs["reward"] == 0 for obs in trajectory), "Random actions earned no reward.",
         "Nothing to do if rewards are rare; otherwise check how they are computed."),
        *((True, f"Observation {key!r} never changed.", "Leave it out if it holds no information.")
          for key in still),
        (speed < _SLOW, f"It makes {speed:.0f} steps a second.",
         "Use several environments, in as many processes as there are cores."),
    )  # fmt: skip


def _raised(error: BaseException, call: CurrentCall, result: Diagnosis) -> Finding:
    """An exception of the environment."""
    what = f"{call.title} raised {type(error).__name__}: {error}".rstrip(".") + "."
    fix = "Fix it."
    # A run gives up on an environment if no episode ends between two failures.
    if isinstance(error, Exception) and call.name in ("reset", "step") and result.episodes:
        count = f"{result.episodes} episode{'s' if result.episodes > 1 else ''} ended before"
        fix += f" {count}, so a run would cut this one short and rebuild the environment."
    return Finding(what, fix, own_traceback(error))


def own_traceback(error: BaseException) -> str:
    """The traceback without the frames of this package that called user code."""
    return trim_traceback("".join(traceback.format_exception(error)).rstrip())


def trim_traceback(text: str) -> str:
    """The tracebacks in a text, without the frames of this package that are above the user's."""
    before, *blocks = text.split(_HEADER)
    return _HEADER.join(["" if blocks else before, *map(_from_the_first_foreign, blocks)])


def _from_the_first_foreign(frames: str) -> str:
    """The frames of one exception, and what follows them."""
    each = re.split(r'^(?=  File ")', frames, flags=re.MULTILINE)
    foreign = (at for at in range(1, len(each)) if not each[at].startswith(_OUR_FILE))
    return "".join([each[0], *each[next(foreign, 1) :]])
