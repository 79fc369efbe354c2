"""`dreamfleet check-env TASK`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

import cloudpickle
import numpy as np
from msgspec import Meta
from rich.table import Table

from dreamfleet.agents import SpaceError
from dreamfleet.cli.console import out, say, write
from dreamfleet.config import RunConfig
from dreamfleet.envs import EnvError, make_env, make_visible_env
from dreamfleet.envs.diagnose import Diagnosis, Finding, diagnose
from dreamfleet.envs.images import resize
from dreamfleet.envs.registry import rendering_options
from dreamfleet.estimate import size_name, suggest
from dreamfleet.fleet.watched import Person, run_watched
from dreamfleet.metrics.frames import contact_sheet, encode_png

_LARGEST_FRAME = 160


def check_env(
    task: str,
    /,
    options: dict[str, Any] | None = None,
    steps: Annotated[int, Meta(ge=1)] = 1000,
    seed: Annotated[int, Meta(ge=0)] = 0,
    timeout: Annotated[float, Meta(ge=0)] = RunConfig.env_timeout,
    sheet: Path | None = Path("check-env.png"),
) -> None:
    """Play an environment and say what is wrong with it, and how to fix it.

    Args:
        task: Such as gym:CartPole-v1, dmc:walker_walk or my_package.my_module:my_factory.
        options: Of the environment, such as obs=pixels size=[64,64] time_limit=500.
        steps: How many random steps to play; resets are not counted.
        seed: Of the environment and of the actions.
        timeout: Seconds that the constructor, a reset or a step may take before it counts as hung,
            as env_timeout in a run; 0 for no timeout.
        sheet: Where to put a picture of frames, if there are any; None for nowhere.
    """
    request = {
        "task": task,
        "options": options or {},
        "steps": steps,
        "seed": seed,
        "sheet": str(sheet) if sheet else None,
    }
    result = run_watched(
        cloudpickle.dumps(partial(check, request=request)),
        timeout=timeout,
        setting="--timeout",
        say=say,
        console=out,
        show_output=True,
    )
    say(result.value)


def check(person: Person, request: dict[str, Any]) -> str:
    """What `check_env` does, in a process of its own."""
    say, task = person.say, request["task"]
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in request["options"].items()
    }

    def visible(seed: int) -> Any:
        # What renders without being asked is not made once more: it may be slow to make.
        wanted = rendering_options(task)
        return make_visible_env(task, seed=seed, **options) if wanted else None

    result = diagnose(
        lambda seed: make_env(task, seed=seed, **options),
        steps=request["steps"],
        seed=request["seed"],
        make_visible=visible,
        tell=person.tell,
    )
    if result.obs_space:
        result.problems += _agent(result)
        say(_spaces(result))
    for note in result.notes:
        say(f"note    {note}")
    if result.steps:
        say(_summary(result))
    if request["sheet"] and result.frames:
        sheet = Path(request["sheet"])
        write(sheet, encode_png(contact_sheet([_small(f) for f in result.frames])))
        say(f"frames         {len(result.frames)} in {sheet}")
    for title, findings in (("problem", result.problems), ("hint", result.hints)):
        for finding in findings:
            say(f"{title:<8}{finding.what} {finding.fix}".rstrip())
            if finding.trace:
                say(indent(finding.trace, "        "))
    if result.problems:
        count = len(result.problems)
        raise EnvError(f"{task} has {count} problem{'s' if count > 1 else ''}, see above.")
    _suggest(say, task, options, result)
    return f"{task} is fine." if not result.hints else f"{task} can be used."


def _agent(result: Diagnosis) -> Iterator[Finding]:
    """Why the default agent cannot be made for it."""
    config = RunConfig()
    try:
        config.agent_type.check(result.obs_space, result.act_space, config.agent_config)
    except SpaceError as error:
        yield Finding(str(error), "")


def _spaces(result: Diagnosis) -> Table:
    table = Table("", "key", "dtype", "shape", "range", box=None, pad_edge=False)
    for role, spaces in (("observation", result.obs_space), ("action", result.act_space)):
        for key, space in spaces.items():
            table.add_row(role, key, space.dtype.name, str(space.shape), space.range)
    return table


def _summary(result: Diagnosis) -> str:
    episodes = f"{result.episodes} in {result.steps:,} random steps"
    if result.episodes:
        episodes += f", mean score {result.score:.4g}, mean length {result.length:.4g}"
    return (
        f"\nepisodes       {episodes}\n"
        f"speed          {result.steps_per_second:,.0f} steps/s, slowest reset "
        f"{1000 * result.slowest_reset:.1f} ms, made in {result.make_seconds:.2f} s"
    )


def _suggest(
    say: Callable[..., None], task: str, options: dict[str, Any], result: Diagnosis
) -> None:
    """Settings to start with."""
    free = shutil.disk_usage(Path.cwd()).free
    found = suggest(
        task,
        options,
        result.obs_space,
        result.act_space,
        steps_per_second=result.steps_per_second,
        disk=free,
        single=result.single,
    )
    config = found.config
    processes = -(-config.envs // config.envs_per_process)
    model = size_name(config.agent_config.model)
    say(
        f"\nSuggestion: preset {found.preset}, model {model}, train ratio {config.train_ratio:g}, "
        f"{config.envs} environments in {processes} process{'es' if processes > 1 else ''}\n"
    )
    say(f"{found.command()}\n")


def _small(frame: Any) -> Any:
    frame = np.ascontiguousarray(frame)
    height, width = frame.shape[:2]
    shrink = max(height, width) / _LARGEST_FRAME
    if shrink <= 1:
        return frame
    return resize(frame, (max(1, round(height / shrink)), max(1, round(width / shrink))))
