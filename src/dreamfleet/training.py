"""Training from Python: what `dreamfleet train` does.

    from dreamfleet import train
    result = train(env=MyEnv, steps=10_000, dreamer__model="1m")

`configure` gives the configuration that the command line would make of some settings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.display import live, print_line
from dreamfleet.envs.naming import PROGRAM, Task, maker_of, name_of
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.evaluation import Evaluation, play
from dreamfleet.fleet.factories import environment, factories
from dreamfleet.fleet.preflight import preflight
from dreamfleet.fleet.record import claim_directory
from dreamfleet.formatting import clock
from dreamfleet.metrics.evaluations import append_evaluation
from dreamfleet.metrics.frames import find_encoder
from dreamfleet.offline import find_source
from dreamfleet.parallel import combined
from dreamfleet.policy import Policy
from dreamfleet.presets import preset as find_preset

log = logging.getLogger(__name__)

Say = Callable[[str], None]


def configure(changes: Mapping[str, Any], preset: str = "default") -> RunConfig:
    """The configuration of a preset with some settings changed, as the command makes it: the
    directory is named after the task, and an offline run takes its task from the first source.

    Args:
        changes: Values by path, such as `{"envs": 4, "dreamer.model": "1m"}`. `env_options` are
            added to those of the preset.
        preset: Its name.

    Raises:
        ConfigError: There is no such preset or setting, or a value does not fit.
    """
    base = find_preset(preset)
    given = dict(changes)
    options = given.get("env_options", {})
    if "offline" in given and given["offline"] and not given.get("prefill"):
        first = given["offline"][0]
        source = find_source(first).blueprint.config
        given = {"task": source.task, "logdir": Path(f"{first}-offline"), **given}
        given.setdefault("eval_episodes", 0)
        given["env_options"] = {**source.env_options, **options}
    elif options:
        given["env_options"] = {**base.env_options, **options}
    return base.changed(given)


def train(
    config: RunConfig | None = None,
    *,
    env: Task | None = None,
    preset: str | None = None,
    say: Say = print_line,
    display: Callable[[Path], AbstractContextManager[Say]] | None = live,
    **settings: Any,
) -> Evaluation | None:
    """Train an agent with a fleet of processes until the run ends, then evaluate it.

    The same directory again resumes the run. A script needs no guard around this call: processes do
    not import the program that started them.

    Args:
        config: The run; None for the preset with the settings that follow.
        env: The environment: a task (`gym:CartPole-v1`, `module:factory`), a class, or a function
            that returns an environment, also one of a script or a notebook; None for the task of
            the configuration.
        preset: The settings to start from; None for the default ones.
        say: Takes lines for the person.
        display: Shows the run in this directory while it trains, and gives what takes the lines
            about progress; None lets `say` take them.
        settings: By their name, such as `steps=10_000`; two underscores stand for a dot:
            `dreamer__loss__horizon=100`.

    Returns:
        The evaluation at the end; None if `eval_episodes` is 0.

    Raises:
        ConfigError: The run cannot work; nothing was started.
        FleetError: A process failed, and the run ended because of it.
        KeyboardInterrupt: The person ended the run; everything is saved.
    """
    config = _config_of(config, env, preset, settings)
    maker = _maker(config, env)
    notes = preflight(config, partial(environment, config, maker))
    say(f"Training {config.agent} on {config.task}; everything goes to {config.logdir}")
    for note in notes:
        say(note)
    start = time.monotonic()
    shown = display(config.logdir) if display else nullcontext(say)
    with claim_directory(config.logdir), shown as progress:
        combined(**factories(config, maker), args=config, say=say, progress=progress)
    result = final_evaluation(config, start, say, maker) if config.eval_episodes else None
    say(f"Took {clock(time.monotonic() - start)}. Results: {config.logdir}")
    return result


def _config_of(
    config: RunConfig | None, env: Task | None, preset: str | None, settings: Mapping[str, Any]
) -> RunConfig:
    """The configuration that the arguments of `train` stand for."""
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    if env is not None:
        if "task" in changes:
            raise ConfigError("env and task are the same thing: give one of them.")
        changes["task"] = name_of(env)
    if config is None:
        return configure(changes, preset or "default")
    if preset is not None:
        raise ConfigError("A configuration has its settings already: leave the preset out.")
    return config.changed(changes) if changes else config


def _maker(config: RunConfig, env: Task | None) -> Task:
    """What makes the environments of a run, in whichever process."""
    if config.offline:
        return config.task
    only_here = callable(env) and config.task.startswith(PROGRAM)
    maker = env if env and only_here else maker_of(config.task)
    if config.remote_envs and not isinstance(maker, str):
        raise ConfigError(
            f"remote_envs are started by other programs, which do not have {config.task}: put it "
            "into a module, and name it as module:name."
        )
    return maker


def final_evaluation(
    config: RunConfig, start: float, say: Say = log.info, env: Task | None = None
) -> Evaluation:
    """Evaluate the saved policy; keep the result and a video of the first episode."""
    policy = Policy.load(config.logdir, agent=config.agent)
    path = config.logdir / "media" / "evaluation" / f"{policy.step:012d}.mp4"
    video: Path | None = path if "media" in config.outputs else None
    no_encoder = ""
    if video:
        try:
            find_encoder()
        except DreamfleetError as error:
            video, no_encoder = None, str(error)
    result, _ = play(
        policy, config.eval_episodes, env=env, video=video, logdir=config.logdir, say=say
    )
    append_evaluation(config.logdir, result, seconds=round(time.monotonic() - start, 1))
    low, high = min(result.returns), max(result.returns)
    say(f"Evaluation: mean score {result.summary()}, lowest {low:.4g}, highest {high:.4g}")
    for note in result.notes():
        say(note)
    if problem := no_encoder or result.video_error:
        say(f"There is no video of it: {problem}")
    elif video:
        say(f"Video of its first episode: {path}")
    return result
