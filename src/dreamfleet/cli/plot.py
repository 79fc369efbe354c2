"""`dreamfleet plot LOGDIR...`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from rich.table import Table

from dreamfleet.cli.console import say
from dreamfleet.formatting import readable
from dreamfleet.plotting import Panel, aggregates, draw, final_score, read_panels
from dreamfleet.statistics import mean_interval
from dreamfleet.sweep import runs_of


def plot(
    logdirs: tuple[Path, ...],
    /,
    out: Path = Path("curves.png"),
    bins: Annotated[int, Meta(ge=2)] = 50,
    evaluations: bool = False,
    aggregate: bool = False,
) -> None:
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
    say(_table(panels))
    if aggregate:
        say(_over_tasks(panels))
    say(f"picture        {out}")


def _table(panels: Sequence[Panel]) -> Table:
    """The score over the last tenth of each run, and what is published for as many frames."""
    columns = ("task", "setting", "seeds", "frames", "score", "95 %", "range", "published")
    table = Table(*columns, box=None)
    for panel in panels:
        for group in panel.groups:
            end = float(group.curve.at[-1])
            scores = [final_score(run.scores) for run in group.runs]
            mean = mean_interval(scores)
            there = panel.published.at(end) if panel.published else None
            table.add_row(
                panel.task,
                group.label,
                f"{group.seeds}" + (f" ({len(scores)} runs)" if len(scores) > group.seeds else ""),
                readable(end),
                readable(sum(scores) / len(scores)),
                f"{mean.low:.4g} to {mean.high:.4g}" if len(scores) > 1 else "",
                f"{readable(min(scores))} to {readable(max(scores))}" if len(scores) > 1 else "",
                f"{there[0]:.0f} ± {there[1]:.0f}" if there else "",
            )
    return table


def _over_tasks(panels: Sequence[Panel]) -> Table:
    table = Table("setting", "tasks", "runs", "IQM [95 %]", "P(better than the first)", box=None)
    for each in aggregates(panels):
        better = str(each.improvement) if each.improvement else ""
        table.add_row(each.label, f"{each.tasks}", f"{each.runs}", str(each.iqm), better)
    return table
