"""An evaluation: whole episodes with a trained policy, in environments that training never sees."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs import Wrapper, env_seed, make_env, make_visible_env, renderer
from dreamfleet.errors import ConfigError
from dreamfleet.metrics.frames import Mp4Writer, enlarged, labelled
from dreamfleet.policy import Policy
from dreamfleet.roles.evaluate import evaluate

_SEEDS_FROM = 1_000_000
_AT_ONCE = 8
_PROTOCOLS = {
    False: "actions sampled from the policy, as in training",
    True: "greedy actions, the mode of the policy",
}


@dataclass(frozen=True)
class Evaluation:
    """What came out, an entry for each episode."""

    task: str
    step: int
    protocol: str
    seed: int
    returns: list[float]
    lengths: list[int]

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def standard_error(self) -> float | None:
        """Of the mean; None for a single return, which says nothing about the spread."""
        if len(self.returns) < 2:
            return None
        return float(np.std(self.returns, ddof=1) / np.sqrt(len(self.returns)))

    def record(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "task": self.task,
            "step": self.step,
            "protocol": self.protocol,
            "seed": self.seed,
            "episodes": len(self.returns),
            "mean": self.mean,
            "standard_error": self.standard_error,
            "returns": self.returns,
            "lengths": self.lengths,
        }

    def summary(self) -> str:
        """The mean, in words."""
        error, count = self.standard_error, len(self.returns)
        spread = f" ± {error:.2g} (standard error, {count} episodes)" if error is not None else ""
        return f"{self.mean:.4g}{spread}"


def protocol(policy: Policy) -> str:
    return _PROTOCOLS[policy.greedy]


def play(
    policy: Policy,
    episodes: int,
    *,
    seed: int = 0,
    video: Path | None = None,
    fps: float = 20.0,
) -> Evaluation:
    """Play so many episodes, each in an environment with a seed of its own.

    Args:
        policy: Loaded from a checkpoint, which says what the task is.
        episodes: At least one.
        seed: Another seed plays other episodes.
        video: Write a video of the first episode to this file.
        fps: Frames a second of the video.
    """
    assert policy.blueprint is not None
    config = policy.blueprint.config
    with ExitStack() as stack:
        recorder = None
        if video:
            title = f"{config.task} step {policy.step:,}"
            writer = stack.enter_context(Mp4Writer(video, fps=fps, title=title))
            recorder = _Recorder(writer, title)

        def environment(start: int, number: int) -> Any:
            at = env_seed(config.seed + seed, _SEEDS_FROM + start + number)
            if recorder and start + number == 0:
                visible = make_visible_env(config.task, seed=at, **config.env_options)
                return _Recorded(visible, recorder, config.task)
            return make_env(config.task, seed=at, **config.env_options)

        played = []
        for start in range(0, episodes, _AT_ONCE):
            count = min(_AT_ONCE, episodes - start)
            played += evaluate(policy.agent, partial(environment, start), count, policy.mode)
    return Evaluation(
        config.task,
        policy.step,
        protocol(policy),
        seed,
        [episode.score for episode in played],
        [episode.length for episode in played],
    )


class _Recorder:
    """Frames with a line above them: the task, the step, and the return so far."""

    def __init__(self, writer: Mp4Writer, title: str) -> None:
        self._writer, self._title = writer, title

    def add(self, frame: NDArray[np.uint8], score: float) -> None:
        line = f"{self._title}  return {score:<8.5g}"
        self._writer.add(labelled(enlarged(frame), line))


class _Recorded(Wrapper):
    """Records the first episode."""

    def __init__(self, env: Wrapper, recorder: _Recorder, task: str) -> None:
        super().__init__(env)
        self._recorder, self._task = recorder, task
        self._frame_of = renderer(env)
        self._score = 0.0
        self._over = False

    def step(self, action: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        obs = self.env.step(action)
        if not self._over:
            frame = self._frame_of(obs)
            if frame is None:
                raise ConfigError(
                    f"{self._task} renders no frames, so there is no video: let its factory "
                    'make it with render_mode="rgb_array", or leave the video out.'
                )
            self._score += float(obs["reward"])
            self._recorder.add(frame, self._score)
        self._over = self._over or bool(obs["is_last"])
        return obs
