"""Learning curves of runs, several seeds of one setting as one curve, and published ones to compare
with; as a picture.

Runs that differ in nothing but their seed, and in where and how they are computed, are one curve:
the mean of the seeds, and the range from the lowest to the highest. Every task gets a panel, with a
published curve where there is one. The x axis counts environment frames, that is steps times the
action repeat.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from rich.console import Group as Lines
from rich.table import Table

from dreamfleet.config import CONFIG_FILE, RunConfig, read_config
from dreamfleet.errors import ConfigError, MetricsError, import_extra
from dreamfleet.files import atomic_write
from dreamfleet.formatting import readable
from dreamfleet.metrics.outputs.jsonl import read_jsonl
from dreamfleet.statistics import Floats, mean_interval, probability_of_improvement
from dreamfleet.statistics import aggregate as interquartile


@dataclass(frozen=True)
class Scores:
    """The episodes of one run: when each ended, and what it scored."""

    at: Floats
    score: Floats


@dataclass(frozen=True)
class Curve:
    """Several runs as one: the mean of the runs' curves, and the lowest and highest of them."""

    at: Floats
    mean: Floats
    low: Floats
    high: Floats
    present: NDArray[np.int64]
    """Runs that each point is the mean of: one that has ended earlier adds nothing."""
    runs: int

    @property
    def whole(self) -> NDArray[np.bool_]:
        """Which points are the mean of all runs."""
        return np.equal(self.present, self.runs)

    @property
    def partial(self) -> NDArray[np.bool_]:
        """Which points are on the lines from or to those that are the mean of some runs."""
        some = np.pad(~self.whole, 1)
        return some[:-2] | some[1:-1] | some[2:]


def read_scores(logdir: Path, frames_per_step: int = 1) -> Scores:
    """The scores of a run, in order.

    A run that was resumed from an older checkpoint may hold some steps twice; all of them happened.
    """
    path = logdir / "scores.jsonl"
    found = [
        (row["step"], row["episode/score"])
        for row in _rows(path, "episode")
        if row.get("episode/score") is not None and "step" in row
    ]
    return _scores(found, frames_per_step, path, "episode")


def read_evaluations(logdir: Path, frames_per_step: int = 1) -> Scores:
    """The means of a run's evaluations, in order: of rounds while it trained, and at its ends."""
    path = logdir / "evaluations.jsonl"
    means = evaluation_means(_rows(path, "evaluation"))
    return _scores(means.tolist(), frames_per_step, path, "evaluation")


def evaluation_means(rows: Iterable[Mapping[str, Any]]) -> Floats:
    """Steps and means of evaluations, in two columns. Of several at one step (one that was
    interrupted, one that the user asked for) the one with the most episodes counts, and the last of
    equal ones."""
    found: dict[float, tuple[int, float]] = {}
    for row in rows:
        step, episodes = row["step"], row.get("episodes") or 0
        if row.get("mean") is not None and episodes >= found.get(step, (0,))[0]:
            found[step] = episodes, row["mean"]
    table = [(step, found[step][1]) for step in sorted(found)]
    return np.array(table, np.float64).reshape(-1, 2)


def _rows(path: Path, what: str) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        what = "scores" if what == "episode" else f"{what}s"
        raise MetricsError(f"{path.parent} holds no {what}: there is no {path}.")
    return read_jsonl(path)


def _scores(rows: Sequence[tuple[float, float]], frames: int, path: Path, what: str) -> Scores:
    if not rows:
        raise MetricsError(f"{path} is empty: no {what} has ended yet.")
    table = np.array(sorted(rows, key=lambda row: row[0]), np.float64)
    return Scores(table[:, 0] * frames, table[:, 1])


def bin_width(longest: float, most: int = 50) -> float:
    """A round width that cuts such a length into at most `most` bins: 1, 2 or 5 times ten to a
    power."""
    least = (longest or 1.0) / most
    power = 10.0 ** math.floor(math.log10(least))
    return next(width for f in (1, 2, 5, 10) if (width := f * power) >= least * (1 - 1e-9))


def combine(runs: Sequence[Scores], width: float, *, interval: bool = False) -> Curve:
    """One curve of several runs, with a point at the end of each bin of this width. With `interval`
    its range is the 95 % interval of the mean; a point of one run has none.

    In each bin a run is the mean of its episodes there. A bin in which none ended (episodes may be
    longer) holds the value of the bin before; before its first and after its last episode a run
    adds nothing.
    """
    last = max(float(run.at[-1]) for run in runs)
    count = max(1, math.ceil(last / width - 1e-9))
    ends: Floats = width * np.arange(1, count + 1, dtype=np.float64)
    table = np.stack([_binned(run, ends, width) for run in runs])
    there = ~np.isnan(table)
    some = there.any(0)
    table, ends, there = table[:, some], ends[some], there[:, some]
    mean = np.where(there, table, 0).sum(0) / there.sum(0)
    low, high = np.nanmin(table, 0), np.nanmax(table, 0)
    if interval:
        found = [
            mean_interval(column[known]) for column, known in zip(table.T, there.T, strict=True)
        ]
        edges = np.array([(each.low, each.high) for each in found]).T
        low, high = np.where(np.isnan(edges), mean, edges)
    return Curve(np.minimum(ends, last), mean, low, high, there.sum(0), len(runs))


def final_score(run: Scores, share: float = 0.1) -> float:
    """The mean of the episodes in the last part of a run, and of the last one at least."""
    late = run.at > run.at[-1] * (1 - share)
    return float(run.score[late].mean())


def _binned(run: Scores, ends: Floats, width: float) -> Floats:
    index = np.clip(np.ceil(run.at / width - 1e-9).astype(int) - 1, 0, len(ends) - 1)
    sums = np.bincount(index, run.score, len(ends))
    counts = np.bincount(index, minlength=len(ends))
    result = np.full(len(ends), np.nan)
    held = np.nan
    for number in range(index[-1] + 1):
        if counts[number]:
            held = sums[number] / counts[number]
        result[number] = held
    return result


@dataclass(frozen=True)
class PublishedCurve:
    """Mean and standard deviation over seeds of the episode score, by environment frames."""

    seeds: int
    frames: Floats
    mean: Floats
    std: Floats

    def at(self, frames: float) -> tuple[float, float] | None:
        """Mean and standard deviation at a number of frames; None outside of the curve."""
        if not self.frames[0] <= frames <= self.frames[-1]:
            return None
        mean, std = (float(np.interp(frames, self.frames, y)) for y in (self.mean, self.std))
        return mean, std


def published_curve(task: str, options: Mapping[str, Any] | None = None) -> PublishedCurve | None:
    """The published curve of DreamerV3 for a task, if there is one. Pixels instead of states are
    another task."""
    if (options or {}).get("obs", "state") != "state" and task.startswith("dmc:"):
        return None
    prefix, _, name = task.partition(":")
    suite = _table()["suites"].get(prefix, {"tasks": {}})
    entry = suite["tasks"].get(name)
    if entry is None:
        return None
    every = _table()["every"]
    frames = entry["first"] + every * np.arange(len(entry["mean"]), dtype=np.float64)
    mean, std = (np.array(entry[key], np.float64) for key in ("mean", "std"))
    return PublishedCurve(entry["seeds"], frames, mean, std)


@cache
def _table() -> dict[str, Any]:
    file = resources.files("dreamfleet.metrics") / "published.json"
    table: dict[str, Any] = json.loads(file.read_text())
    return table


_REPEATS = {"atari": 4, "atari100k": 4}
_SHOWN = 3
COLORS = ("#0b6fb8", "#d1495b", "#2f8f5b", "#8a5fbf", "#c98a12", "#4d9da6")


@dataclass(frozen=True)
class PlottedRun:
    """The configuration and the scores of one run."""

    config: RunConfig
    scores: Scores

    @property
    def setting(self) -> dict[str, Any]:
        return self.config.experiment()


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[PlottedRun]
    curve: Curve

    @property
    def seeds(self) -> int:
        """Seeds that differ from each other."""
        return len({run.config.seed for run in self.runs})

    @property
    def size(self) -> str:
        """`3 seeds`, or `3 runs of 1 seed`."""
        words = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        return words if self.seeds == len(self.runs) else f"{len(self.runs)} runs of {words}"


@dataclass(frozen=True)
class Panel:
    """The curves of one task."""

    task: str
    groups: list[Group]
    published: PublishedCurve | None
    goal: float | None = None
    """A score to reach, drawn as a line."""

    @property
    def end(self) -> float:
        return max(float(group.curve.at[-1]) for group in self.groups)


def read_panels(
    logdirs: Sequence[Path], bins: int = 50, *, evaluations: bool = False
) -> list[Panel]:
    """A panel for each task of these runs; see `plot`."""
    if not logdirs:
        raise ConfigError("Name at least one run's directory.")
    read, runs = read_evaluations if evaluations else read_scores, []
    for logdir in logdirs:
        config = read_config(logdir)
        runs.append(PlottedRun(config, read(logdir, action_repeat(config))))
    return panels_of(runs, bins)


def action_repeat(config: RunConfig) -> int:
    """Environment frames in a step of the agent."""
    given = config.env_options.get("repeat")
    return _REPEATS.get(config.task.partition(":")[0], 1) if given is None else int(given)


def panels_of(runs: Sequence[PlottedRun], bins: int, *, interval: bool = False) -> list[Panel]:
    """A panel for each task of runs that were read."""
    panels = []
    for task in dict.fromkeys(run.config.task for run in runs):
        mine = [run for run in runs if run.config.task == task]
        width = bin_width(max(float(run.scores.at[-1]) for run in mine), bins)
        groups: dict[str, list[PlottedRun]] = {}
        for run in mine:
            groups.setdefault(json.dumps(run.setting, sort_keys=True), []).append(run)
        different = differing([group[0].setting for group in groups.values()])
        made = []
        for group in groups.values():
            curve = combine([run.scores for run in group], width, interval=interval)
            made.append(Group(_label(group[0], different), group, curve))
        published = published_curve(task, mine[0].config.env_options)
        panels.append(Panel(task, made, published))
    return panels


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that are not the same everywhere, also those that only some runs have."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if len({json.dumps(s.get(key)) for s in settings}) > 1]


def _label(run: PlottedRun, different: Sequence[str]) -> str:
    """What tells this setting from the others, in one line; where that is too much for a line, the
    directory tells it."""
    setting = run.setting
    given = [key for key in different if key in setting and key != "agent"]
    shown = [f"{key.split('.')[-1]}={setting[key]}" for key in given[:_SHOWN]]
    if len(given) > _SHOWN:
        shown.append(f"... ({run.config.logdir.name})")
    return ", ".join([run.config.agent, *shown])


SWEEP_FILE = "sweep.json"
"""In the directory of a sweep: what it runs. In that of one of its runs: how that ended."""


def runs_of(folder: Path) -> list[Path]:
    """The runs of a sweep that have scores; the folder itself if it is no sweep."""
    if not (folder / SWEEP_FILE).is_file() or (folder / CONFIG_FILE).is_file():
        return [folder]
    return [each for each in sorted(folder.iterdir()) if (each / "scores.jsonl").is_file()]


def plot(
    logdirs: tuple[Path, ...],
    /,
    out: Path = Path("curves.png"),
    bins: Annotated[int, Meta(ge=2)] = 50,
    evaluations: bool = False,
    aggregate: bool = False,
) -> Lines:
    """Draw learning curves, with published ones where the task has one.

    Runs that differ in nothing but their seed are one curve: the mean of the seeds, and the range
    from the lowest to the highest. Every task gets a panel. The x axis counts environment frames,
    that is steps times the action repeat.

    Args:
        logdirs: Directories of runs or sweeps; they may be under way.
        out: Where to put the picture; .png, .svg or .pdf.
        bins: Points of a curve at most; each is the mean of the episodes that ended there.
        evaluations: Draw the means of evaluations, while training and at the end, instead of
            training episodes.
        aggregate: Also print one line for each setting over all tasks: the interquartile mean of
            normalised scores, and the probability of improvement over the first setting, with 95 %
            intervals.
    """
    runs = [run for logdir in logdirs for run in runs_of(logdir)]
    panels = read_panels(runs, bins, evaluations=evaluations)
    draw(panels, out)
    tables = [score_table(panels), *([aggregate_table(panels)] if aggregate else [])]
    return Lines(*tables, f"picture        {out}")


def score_table(panels: Sequence[Panel]) -> Table:
    """The score over the last tenth of each run, and what is published for as many frames."""
    columns = ("task", "setting", "seeds", "frames", "score", "95 %", "range", "published")
    table = Table(*columns, box=None)
    for panel in panels:
        for group in panel.groups:
            end = float(group.curve.at[-1])
            scores = [final_score(run.scores) for run in group.runs]
            mean, several = mean_interval(scores), len(scores) > 1
            there = panel.published.at(end) if panel.published else None
            table.add_row(
                panel.task,
                group.label,
                f"{group.seeds}" + (f" ({len(scores)} runs)" if len(scores) > group.seeds else ""),
                readable(end),
                readable(mean.value),
                f"{mean.low:.4g} to {mean.high:.4g}" if several else "",
                f"{readable(min(scores))} to {readable(max(scores))}" if several else "",
                f"{there[0]:.0f} ± {there[1]:.0f}" if there else "",
            )
    return table


def aggregate_table(panels: Sequence[Panel]) -> Table:
    """Every setting over its tasks, with the probability of a higher score than the first
    setting's. Scores are normalised by task: dm_control's by 1000, others by the lowest and the
    highest point of all curves of the task."""
    different = dict.fromkeys(
        key for panel in panels for key in differing([g.runs[0].setting for g in panel.groups])
    )
    found: dict[str, dict[str, list[float]]] = {}
    for panel in panels:
        low = min(float(group.curve.low.min()) for group in panel.groups)
        high = max(float(group.curve.high.max()) for group in panel.groups)
        if panel.task.startswith("dmc:"):
            low, high = 0.0, 1000.0
        span = max(high - low, 1e-9)
        for group in panel.groups:
            scores = [(final_score(r.scores) - low) / span for r in group.runs]
            found.setdefault(_label(group.runs[0], list(different)), {})[panel.task] = scores
    table = Table("setting", "tasks", "runs", "IQM [95 %]", "P(better than the first)", box=None)
    first = next(iter(found.values()))
    for label, tasks in found.items():
        shared = tasks is not first and {*tasks} & {*first}
        better = str(probability_of_improvement(tasks, first)) if shared else ""
        count = sum(map(len, tasks.values()))
        table.add_row(label, str(len(tasks)), str(count), str(interquartile(tasks)), better)
    return table


def draw(panels: Sequence[Panel], out: Path) -> None:
    """Draw panels to a file that ends in .png, .svg or .pdf."""
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"out={out} is not valid: its name must end in .png, .svg or .pdf.")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = make_figure(5.2 * columns, 3.7 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes[len(panels) :]:
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
            label = f"{group.label}, {group.size}"
        else:
            axis.fill_between(curve.at, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
            label = f"{group.label}, {group.size} (mean and range)"
        for shown, dashes, name in ((curve.whole, "-", label), (curve.partial, ":", None)):
            mean = np.where(shown, curve.mean, np.nan)
            axis.plot(curve.at, mean, dashes, color=color, linewidth=1.8, label=name)
    if panel.goal is not None:
        axis.axhline(panel.goal, color="0.35", linestyle=":", linewidth=1.2, label="goal")
    repeats = {action_repeat(run.config) for group in panel.groups for run in group.runs}
    repeated = repeats != {1}
    said = f" (action repeat {', '.join(map(str, sorted(repeats)))})" if repeated else ""
    axis.set_title(panel.task, fontsize=11, loc="left", fontweight="bold")
    axis.set_xlabel(f"environment {'frames' if repeated else 'steps'}{said}")
    axis.set_ylabel("episode return")
    axis.xaxis.set_major_formatter(lambda value, _: readable(value))
    axis.set_xlim(left=0)
    axis.locator_params(axis="x", nbins=6)  # more labels run into each other
    plain_axis(axis)
    if len(panel.groups) > 1:
        # Several settings have long names, which would cover the curves.
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    else:
        axis.legend(fontsize=8, frameon=False, loc="best")
