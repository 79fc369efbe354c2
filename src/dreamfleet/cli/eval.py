"""`dreamfleet eval LOGDIR`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from dreamfleet.cli.console import say
from dreamfleet.config import RunConfig
from dreamfleet.envs import Wrapper, env_seed, make_env
from dreamfleet.envs.diagnose import camera
from dreamfleet.errors import ConfigError
from dreamfleet.metrics.video import Mp4Writer
from dreamfleet.policy import Policy
from dreamfleet.roles.evaluate import evaluate

_SEEDS_FROM = 1_000_000
_AT_ONCE = 8
_PROTOCOL = "actions sampled from the policy, as in training"


def eval(  # noqa: A001 - the command's name
    logdir: Annotated[Path, tyro.conf.Positional],
    /,
    episodes: int = 10,
    video: Path | None = None,
    json_path: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    seed: int = 0,
    fps: float = 20.0,
) -> None:
    """Play whole episodes with a trained agent and say what it scores.

    The environments are fresh ones with seeds that training never uses. Actions are sampled from
    the policy, as in training and in the publication. The newest checkpoint is used; the run may
    go on meanwhile.

    Args:
        logdir: A run's directory, or one checkpoint.
        episodes: How many episodes to play, each in an environment of its own.
        video: Film the first episode to this file, such as play.mp4.
        json_path: Also write every return to this file.
        seed: Another seed plays other episodes.
        fps: Frames a second of the video.
    """
    if episodes < 1:
        raise ConfigError(f"--episodes has to be at least 1, got {episodes}.")
    policy = Policy.load(logdir)
    assert policy.blueprint is not None
    config = policy.blueprint.config
    say(f"{config.task} after {policy.step:,} steps; {_PROTOCOL}")
    with ExitStack() as stack:
        film = stack.enter_context(_writer(video, fps, config, policy.step)) if video else None

        def environment(start: int, number: int) -> Any:
            at = env_seed(config.seed + seed, _SEEDS_FROM + start + number)
            if film and start + number == 0:
                return _Filmed(_visible(config, at), film, config.task)
            return make_env(config.task, seed=at, **config.env_options)

        played = []
        for start in range(0, episodes, _AT_ONCE):
            count = min(_AT_ONCE, episodes - start)
            played += evaluate(policy.agent, partial(environment, start), count)
    returns = [episode.score for episode in played]
    result = {
        "task": config.task,
        "step": policy.step,
        "protocol": _PROTOCOL,
        "seed": seed,
        "episodes": episodes,
        "mean": float(np.mean(returns)),
        "standard_error": standard_error(returns),
        "returns": returns,
        "lengths": [episode.length for episode in played],
    }
    if json_path:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    say(f"returns        {'  '.join(f'{value:.4g}' for value in returns)}")
    error = result["standard_error"]
    say(
        f"mean return    {result['mean']:.4g}"
        + (f" ± {error:.2g} (standard error, {episodes} episodes)" if error is not None else "")
    )
    if video:
        say(f"video          {video}")


def standard_error(returns: list[float]) -> float | None:
    """Of the mean; None for a single return, which says nothing about the spread."""
    if len(returns) < 2:
        return None
    return float(np.std(returns, ddof=1) / np.sqrt(len(returns)))


def _writer(path: Path, fps: float, config: RunConfig, step: int) -> Mp4Writer:
    if path.suffix != ".mp4":
        raise ConfigError(f"--video={path} has to end in .mp4.")
    return Mp4Writer(path, fps=fps, title=f"{config.task} at step {step}")


def _visible(config: RunConfig, seed: int) -> Wrapper:
    """The environment, made such that it shows frames."""
    try:
        return make_env(config.task, seed=seed, **{**config.env_options, "render": True})
    except ConfigError:  # it has no such option, because it always can
        return make_env(config.task, seed=seed, **config.env_options)


class _Filmed(Wrapper):
    """Films the first episode."""

    def __init__(self, env: Wrapper, writer: Mp4Writer, task: str) -> None:
        super().__init__(env)
        self._writer, self._task = writer, task
        self._look = camera(env)
        self._over = False

    def step(self, action: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        obs = self.env.step(action)
        if not self._over:
            frame = self._look(obs)
            if frame is None:
                raise ConfigError(
                    f"{self._task} shows no frames, so there is nothing to film: let its factory "
                    'make it with render_mode="rgb_array", or leave --video out.'
                )
            self._writer.add(frame)
        self._over = self._over or bool(obs["is_last"])
        return obs
