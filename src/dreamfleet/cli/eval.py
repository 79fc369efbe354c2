"""`dreamfleet eval LOGDIR`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from dreamfleet.cli.console import say
from dreamfleet.cli.evaluation import play, protocol
from dreamfleet.cli.files import write
from dreamfleet.errors import ConfigError
from dreamfleet.policy import Policy


def eval(  # noqa: A001 - the command's name
    logdir: Annotated[Path, tyro.conf.Positional],
    /,
    episodes: int = 10,
    greedy: bool = False,
    video: Path | None = None,
    json_path: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    seed: int = 0,
    fps: float = 20.0,
) -> None:
    """Play whole episodes with a trained agent and say what it scores.

    The environments are fresh ones with seeds that training never uses. Actions are sampled from
    the policy, as in training and in the paper, unless you ask for greedy ones. The newest
    checkpoint is used; the run may go on meanwhile.

    Args:
        logdir: A run's directory, or one checkpoint.
        episodes: How many episodes to play, each in an environment of its own.
        greedy: Take the mode of the policy instead of a sample.
        video: Write a video of the first episode to this file, such as play.mp4.
        json_path: Also write every return to this file.
        seed: Another seed plays other episodes.
        fps: Frames a second of the video.
    """
    if episodes < 1:
        raise ConfigError(f"--episodes has to be at least 1, got {episodes}.")
    if video and video.suffix != ".mp4":
        raise ConfigError(f"--video={video} has to end in .mp4.")
    policy = Policy.load(logdir, greedy=greedy)
    assert policy.blueprint is not None
    say(f"{policy.blueprint.config.task} after {policy.step:,} steps; {protocol(policy)}")
    result = play(policy, episodes, seed=seed, video=video, fps=fps)
    say(f"returns        {'  '.join(f'{value:.4g}' for value in result.returns)}")
    say(f"mean return    {result.summary()}")
    if video:
        say(f"video          {video}")
    # Last: a file that cannot be written must not take the returns with it.
    if json_path:
        write(json_path, json.dumps(result.record(), indent=2) + "\n")
