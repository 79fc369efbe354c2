"""Training from Python: what `dreamfleet train` does.

    from dreamfleet import preset, train
    result = train(preset("default").changed({"steps": 10_000, "logdir": "runs/short"}))

`configure` gives the configuration that the command line would make of some settings.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.errors import DreamfleetError
from dreamfleet.evaluation import Evaluation, evaluate
from dreamfleet.fleet.factories import factories
from dreamfleet.fleet.preflight import preflight
from dreamfleet.fleet.record import claim_directory
from dreamfleet.formatting import clock
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
    if "logdir" not in given:
        name = str(given.get("task", base.task)).replace(":", "-").replace("/", "-")
        given["logdir"] = Path("runs") / name
    return base.changed(given)


def train(
    config: RunConfig,
    *,
    say: Say = log.info,
    display: Callable[[Path], AbstractContextManager[Say]] | None = None,
) -> Evaluation | None:
    """Train an agent with a fleet of processes until the run ends, then evaluate it.

    The same directory again resumes the run.

    Args:
        config: The run.
        say: Takes lines for the person.
        display: Shows the run in this directory while it trains, and gives what takes the lines
            about progress; None lets `say` take them.

    Returns:
        The evaluation at the end; None if `eval_episodes` is 0.

    Raises:
        ConfigError: The run cannot work; nothing was started.
        FleetError: A process failed, and the run ended because of it.
        KeyboardInterrupt: The person ended the run; everything is saved.
    """
    notes = preflight(config)
    say(f"Training {config.agent} on {config.task}; everything goes to {config.logdir}")
    for note in notes:
        say(note)
    start = time.monotonic()
    shown = display(config.logdir) if display else nullcontext(say)
    with claim_directory(config.logdir), shown as progress:
        combined(**factories(config), args=config, say=say, progress=progress)
    result = final_evaluation(config, start, say) if config.eval_episodes else None
    say(f"Took {clock(time.monotonic() - start)}. Results: {config.logdir}")
    return result


def final_evaluation(config: RunConfig, start: float, say: Say = log.info) -> Evaluation:
    """Evaluate the saved policy; keep the result and a video of the first episode."""
    policy = Policy.load(config.logdir, agent=config.agent)
    path = config.logdir / "media" / "evaluation" / f"{policy.step:012d}.mp4"
    note = ""
    try:
        wanted = "media" in config.outputs
        result = evaluate(policy, config.eval_episodes, video=path if wanted else None)
        if wanted:
            note = f"Video of its first episode: {path}"
    except Exception as error:
        # Whatever the video failed for, the scores that the training was for are not lost. An
        # error that has another cause is raised again.
        result = evaluate(policy, config.eval_episodes)
        reason = error if isinstance(error, DreamfleetError) else repr(error)
        note = f"There is no video of it: {reason}"
    with (config.logdir / "evaluations.jsonl").open("a") as file:
        seconds = round(time.monotonic() - start, 1)
        file.write(json.dumps({**result.record(), "seconds": seconds}) + "\n")
    low, high = min(result.returns), max(result.returns)
    say(f"Evaluation: mean score {result.summary()}, lowest {low:.4g}, highest {high:.4g}")
    if note:
        say(note)
    return result
