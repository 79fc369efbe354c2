"""`dreamfleet eval LOGDIR`."""

from __future__ import annotations

from json import dumps
from pathlib import Path

from dreamfleet.cli.console import note, say
from dreamfleet.errors import ConfigError
from dreamfleet.evaluation import Evaluation, EvaluationInterrupted, evaluate
from dreamfleet.policy import Policy
from dreamfleet.settings import AboveZero, Count, CountOrZero


def eval(  # noqa: A001 - the command's name
    logdir: Path,
    /,
    episodes: Count = 10,
    greedy: bool = False,
    video: Path | None = None,
    json: bool = False,
    keep: bool = True,
    seed: CountOrZero = 0,
    fps: AboveZero = 20.0,
    agent: str | None = None,
    best: bool = False,
    envs: CountOrZero = 0,
    max_steps: CountOrZero = 0,
    task: str | None = None,
    trust: bool = False,
) -> None:
    """Play complete episodes with a trained agent and print their scores.

    The environments are new ones with seeds that training never uses. Actions are sampled from the
    policy, as in training and in the paper, unless you ask for greedy ones. The newest checkpoint
    is used; the run may be under way.

    Args:
        logdir: A run's directory, or one checkpoint.
        episodes: How many episodes to play.
        greedy: Take the mode of the policy instead of a sample.
        video: Record the first episode to this file, such as play.mp4.
        json: Print one JSON object in a line, with every return; all other lines go to standard
            error.
        keep: Add the result to the run's evaluations.jsonl, which pages and plots show.
        seed: Another seed plays other episodes.
        fps: Frames a second of the video.
        agent: Your own agent, as package.module:name.
        best: Take the checkpoint with the best evaluation score instead of the newest.
        envs: Environments that play at the same time; 0 for the run's eval_envs, or envs.
        max_steps: Steps after which an episode is cut short; 0 for the run's eval_max_steps.
        task: Another environment, or the module:name of one that a script defined.
        trust: Import your own environment, agent or networks that the run names.
    """
    tell = note if json else say
    policy = Policy.load(
        logdir, "best" if best else "latest", agent=agent, greedy=greedy, trust=trust
    )
    assert policy.blueprint is not None
    tell(f"{task or policy.blueprint.config.task} after {policy.step:,} steps; {policy.protocol}")
    try:
        result = evaluate(
            policy,
            env=task,
            episodes=episodes,
            envs=envs,
            max_steps=max_steps,
            seed=seed,
            video=video,
            fps=fps,
            trust=trust,
            logdir=logdir,
            kind="asked" if keep else "",
            say=tell,
        )
    except EvaluationInterrupted as interrupt:
        found = interrupt.result
        tell(f"Interrupted after {len(found.returns) if found else 0} of {episodes} episodes")
        if found:
            _show(found, json)
        raise
    _show(result, json)
    if video and not result.video_error:
        tell(f"video          {video}")
    if result.video_error:
        raise ConfigError(f"No video was recorded: {result.video_error}")


def _show(result: Evaluation, as_json: bool) -> None:
    if as_json:
        say(dumps(result.record()))
        return
    say(f"returns        {'  '.join(f'{value:.4g}' for value in result.returns)}")
    say(f"mean return    {result.summary()}")
    for line in result.notes():
        say(line)
