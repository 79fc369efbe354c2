"""Learning curves of runs, as a picture.

Runs that differ in nothing but their seed are one curve: the mean of the seeds, and the range from
the lowest to the highest. Every task gets a panel, with a published curve where there is one. The x
axis counts environment frames, that is steps times the action repeat.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreamfleet.config import RunConfig, read_config
from dreamfleet.errors import ConfigError, import_extra
from dreamfleet.files import atomic_write
from dreamfleet.metrics.curves import (
    Curve,
    PublishedCurve,
    Scores,
    bin_width,
    combine,
    published_curve,
    read_evaluations,
    read_scores,
)

INCIDENTAL = (
    *("seed", "logdir", "steps", "duration", "actor_addr", "replay_addr", "logger_addr"),
    *("eval_every", "eval_episodes", "eval_envs", "eval_max_steps", "evaluator_addr"),
    *("actors", "learner_addr"),
    *("log_every", "report_every", "save_every", "on_failure", "max_restarts"),
    *("episode_timeout", "target_score", "outputs", "keys", "env_timeout", "on_nan"),
)
"""Settings that do not make a run another experiment."""
_REPEATS = {"atari": 4, "atari100k": 4}
_SHOWN = 3
COLORS = ("#0b6fb8", "#d1495b", "#2f8f5b", "#8a5fbf", "#c98a12", "#4d9da6")


@dataclass(frozen=True)
class Run:
    """The configuration and the scores of one run."""

    config: RunConfig
    scores: Scores

    @property
    def setting(self) -> dict[str, Any]:
        return {
            key: v for key, v in self.config.flat().items() if key.split(".")[0] not in INCIDENTAL
        }


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[Run]
    curve: Curve


@dataclass(frozen=True)
class Panel:
    """The curves of one task."""

    task: str
    groups: list[Group]
    published: PublishedCurve | None

    @property
    def end(self) -> float:
        return max(float(group.curve.at[-1]) for group in self.groups)


def read_panels(
    logdirs: Sequence[Path], bins: int = 50, *, evaluations: bool = False
) -> list[Panel]:
    """A panel for each task of these runs, which may be under way.

    Args:
        logdirs: Directories of runs.
        bins: Points of a curve at most; each is the mean of the episodes that ended there.
        evaluations: Take the means of evaluations instead of training episodes.

    Raises:
        ConfigError: A directory holds no run.
        MetricsError: A run has no scores.
    """
    if not logdirs:
        raise ConfigError("Name at least one run's directory.")
    return panels_of([_read(logdir, evaluations) for logdir in logdirs], bins)


def _read(logdir: Path, evaluations: bool) -> Run:
    config = read_config(logdir)
    read = read_evaluations if evaluations else read_scores
    return Run(config, read(logdir, action_repeat(config)))


def action_repeat(config: RunConfig) -> int:
    """Environment frames in a step of the agent."""
    given = config.env_options.get("repeat")
    return _REPEATS.get(config.task.partition(":")[0], 1) if given is None else int(given)


def panels_of(runs: Sequence[Run], bins: int) -> list[Panel]:
    """A panel for each task of runs that were read."""
    panels = []
    for task in dict.fromkeys(run.config.task for run in runs):
        mine = [run for run in runs if run.config.task == task]
        width = bin_width(max(float(run.scores.at[-1]) for run in mine), bins)
        groups: dict[str, list[Run]] = {}
        for run in mine:
            groups.setdefault(json.dumps(run.setting, sort_keys=True), []).append(run)
        different = _differences([group[0].setting for group in groups.values()])
        made = [
            Group(_label(group[0], different), group, combine([r.scores for r in group], width))
            for group in groups.values()
        ]
        published = published_curve(task, mine[0].config.env_options)
        panels.append(Panel(task, made, published))
    return panels


def _differences(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that are not the same everywhere, also those that only some runs have."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if len({json.dumps(s.get(key)) for s in settings}) > 1]


def _label(run: Run, different: Sequence[str]) -> str:
    """What tells this setting from the others, in one line; where that is too much for a line, the
    directory tells it."""
    setting = run.setting
    given = [key for key in different if key in setting and key != "agent"]
    shown = [f"{key.split('.')[-1]}={setting[key]}" for key in given[:_SHOWN]]
    if len(given) > _SHOWN:
        shown.append(f"... ({run.config.logdir.name})")
    return ", ".join([run.config.agent, *shown])


def draw(panels: Sequence[Panel], out: Path) -> None:
    """Draw panels to a file that ends in .png, .svg or .pdf."""
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"out={out} is not valid: its name has to end in .png, .svg or .pdf.")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = make_figure(5.2 * columns, 3.7 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in list(axes)[len(panels) :]:
        axis.set_visible(False)
    save_figure(figure, out)


def make_figure(width: float, height: float) -> Any:
    """A figure of its own, without the package's global state and without a window."""
    module: Any = import_extra("matplotlib.figure", "Plots", "plot")
    return module.Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, out: Path, dpi: int = 150) -> None:
    """Write a figure to a file, by whose end the format is known."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=out.suffix[1:])
    atomic_write(out, picture.getvalue())


def plain_axis(axis: Any) -> None:
    """The look of all pictures: a faint grid, and no frame."""
    axis.grid(color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_panel(axis: Any, panel: Panel) -> None:
    if panel.published:
        theirs = panel.published
        shown = theirs.frames <= max(panel.end * 1.25, theirs.frames[1])
        x, mean, std = theirs.frames[shown], theirs.mean[shown], theirs.std[shown]
        axis.fill_between(x, mean - std, mean + std, color="0.5", alpha=0.18, linewidth=0)
        label = f"published, {theirs.seeds} seeds (mean ± deviation)"
        axis.plot(x, mean, color="0.35", linestyle="--", linewidth=1.4, label=label)
    for number, group in enumerate(panel.groups):
        color, curve = COLORS[number % len(COLORS)], group.curve
        if len(group.runs) == 1:
            scores = group.runs[0].scores
            axis.plot(scores.at, scores.score, ".", color=color, markersize=2, alpha=0.3)
            label = f"{group.label}, 1 seed"
        else:
            axis.fill_between(curve.at, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
            label = f"{group.label}, {curve.runs} seeds (mean and range)"
        axis.plot(curve.at, curve.mean, color=color, linewidth=1.8, label=label)
    repeats = {action_repeat(run.config) for group in panel.groups for run in group.runs}
    repeated = repeats != {1}
    said = f" (action repeat {', '.join(map(str, sorted(repeats)))})" if repeated else ""
    axis.set_title(panel.task, fontsize=11, loc="left", fontweight="bold")
    axis.set_xlabel(f"environment {'frames' if repeated else 'steps'}{said}")
    axis.set_ylabel("episode return")
    axis.xaxis.set_major_formatter(lambda value, _: _short(value))
    axis.set_xlim(left=0)
    plain_axis(axis)
    if len(panel.groups) > 1:
        # Several settings have long names, which would cover the curves.
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    else:
        axis.legend(fontsize=8, frameon=False, loc="best")


def _short(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
