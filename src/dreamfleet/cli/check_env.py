"""`dreamfleet check-env TASK`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np

from dreamfleet.agents import SpaceError
from dreamfleet.agents.dreamer.features import observed
from dreamfleet.cli.console import out, say, write
from dreamfleet.config import RunConfig
from dreamfleet.envs import EnvError, make_env, make_visible_env
from dreamfleet.envs.diagnose import Diagnosis, Finding, diagnose
from dreamfleet.envs.images import resize
from dreamfleet.envs.registry import rendering_options
from dreamfleet.fleet.isolated import Reporter, run_isolated
from dreamfleet.metrics.frames import contact_sheet, encode_png
from dreamfleet.presets import PRESETS
from dreamfleet.settings import Count, CountOrZero, ZeroOrMore

_LARGEST_FRAME = 160
_STEPS_PER_SECOND = 1000.0
"""What all environments of one process should reach together."""
_IMAGE_MULTIPLE = 16
"""Both sides of an image have to be a multiple of it, for encoders of four stages."""


def check_env(
    task: str,
    /,
    options: dict[str, Any] | None = None,
    steps: Count = 1000,
    seed: CountOrZero = 0,
    timeout: ZeroOrMore = RunConfig.env_timeout,
    sheet: Path | None = Path("check-env.png"),
) -> str:
    """Test an environment with random actions and report each problem with its fix.

    Args:
        task: The environment: gym:CartPole-v1, dmc:walker_walk, my_package.my_module:my_factory.
        options: Options of the environment, such as obs=pixels size=[64,64] time_limit=500.
        steps: How many random steps to play; resets are not counted.
        seed: Seed of the environment and of the actions.
        timeout: Seconds that the constructor, a reset or a step may take before it counts as hung,
            as env_timeout in a run; 0 for no timeout.
        sheet: File for a picture of some frames, if there are any; None for no picture.
    """
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in (options or {}).items()}
    lines, problems, verdict = run_isolated(
        partial(_diagnose, task, given, steps, seed, sheet),
        timeout=timeout,
        setting="--timeout",
        say=say,
        console=out,
        show_output=True,
    ).value
    say("\n".join(lines))
    if problems:
        raise EnvError(f"{task} has {problems} problem{'s' if problems > 1 else ''}, see above.")
    return str(verdict)


def _diagnose(
    task: str,
    options: dict[str, Any],
    steps: int,
    seed: int,
    sheet: Path | None,
    reporter: Reporter,
) -> tuple[list[str], int, str]:
    """Play the environment; the frames go to a file."""

    def visible(seed: int) -> Any:
        # An environment that renders without an option is not made again: that may be slow.
        return make_visible_env(task, seed=seed, **options) if rendering_options(task) else None

    make = partial(make_env, task, **options)
    result = diagnose(
        lambda seed: make(seed=seed),
        steps=steps,
        seed=seed,
        make_visible=visible,
        tell=reporter.call,
    )
    reporter.call(None)  # the last call of user code
    if sheet and result.frames:
        write(sheet, encode_png(contact_sheet([_small(frame) for frame in result.frames])))
    config = RunConfig()
    try:
        if result.obs_space:
            config.agent_type.check(result.obs_space, result.act_space, config.agent_config)
    except SpaceError as error:
        result.problems.append(Finding(str(error), ""))
    verdict = "is fine" if not result.hints else "can be used"
    end = "" if result.problems else f"\n{suggestion(task, options, result)}\n\n{task} {verdict}."
    return list(_report(result, sheet)), len(result.problems), end


def _report(result: Diagnosis, sheet: Path | None) -> Iterator[str]:
    """What was measured and found, in lines."""
    rows = [("", "key", "dtype", "shape", "range")] if result.obs_space else []
    for role, spaces in (("observation", result.obs_space), ("action", result.act_space)):
        for key, space in spaces.items():
            rows.append((role, key, space.dtype.name, str(space.shape), space.range))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()
    for note in result.notes:
        yield f"note    {note}"
    if result.steps:
        episodes = f"{result.episodes} in {result.steps:,} random steps"
        if result.episodes:
            episodes += f", mean score {result.score:.4g}, mean length {result.length:.4g}"
        yield f"\nepisodes       {episodes}"
        yield (
            f"speed          {result.steps_per_second:,.0f} steps/s, slowest reset "
            f"{1000 * result.slowest_reset:.1f} ms, constructor {result.make_seconds:.2f} s"
        )
    if sheet and result.frames:
        yield f"frames         {len(result.frames)} in {sheet}"
    for title, findings in (("problem", result.problems), ("hint", result.hints)):
        for finding in findings:
            yield f"{title:<8}{finding.what} {finding.fix}".rstrip()
            if finding.trace:
                yield indent(finding.trace, "        ")


def suggestion(task: str, options: Mapping[str, Any], result: Diagnosis) -> str:
    """A command to start with, by rule: `pixels` for images, resized to 64x64 if they are larger
    or fit no encoder; `dmc_cpu` for dm_control; `default` for everything else. Slow
    environments are spread over the cores."""
    sizes = {space.shape[:2] for space in observed(result.obs_space).values() if space.image}
    if sizes:
        preset, reason = "pixels", "the task has images"
    elif task.startswith("dmc:"):
        preset, reason = "dmc_cpu", "the task is one of dm_control"
    else:
        preset, reason = "default", "the task has no images"
    given = dict(options)
    fits = len(sizes) == 1 and all(
        not (height % _IMAGE_MULTIPLE or width % _IMAGE_MULTIPLE) and height * width <= 64**2
        for height, width in sizes
    )
    if sizes and "size" not in options and not fits:
        given["size"] = (64, 64)
    known = PRESETS[preset].env_options
    own = {name: value for name, value in given.items() if known.get(name) != value}
    words = ["dreamfleet", "train", "--task", task]
    words += ["--preset", preset] if preset != "default" else []
    words += ["--env-options"] if own else []
    for name, value in own.items():
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        words.append(f"{name}={text}")
    envs = PRESETS[preset].envs
    if result.single:
        words += ["--envs", "1"]
    elif result.steps_per_second < _STEPS_PER_SECOND / envs:
        words += ["--envs-per-process", str(-(-envs // cores()))]
    return f"Suggestion: preset {preset}, because {reason}:\n\n{shlex.join(words)}"


def cores() -> int:
    """Cores that this process may use."""
    has = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has else os.cpu_count() or 1


def _small(frame: Any) -> Any:
    height, width = frame.shape[:2]
    shrink = max(1.0, max(height, width) / _LARGEST_FRAME)
    size = max(1, round(height / shrink)), max(1, round(width / shrink))
    return resize(np.ascontiguousarray(frame), size)
