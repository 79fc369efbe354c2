"""The picture of a run in the terminal."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dreamfleet.cli.console import out, say
from dreamfleet.fleet.overview import RoleStatus, RunStatus, Watcher
from dreamfleet.fleet.supervisor import Say, silent
from dreamfleet.formatting import readable

_BARS = "▁▂▃▄▅▆▇█"
_SECONDS_BETWEEN_LOOKS = 1.0
_SPARKS = 26
_WIDEST = 100


@contextmanager
def live(logdir: Path, console: Console = out) -> Iterator[Say]:
    """Show a run until the block ends, if there is a terminal to show it on.

    Yields what progress lines are to be said to: nobody where the display shows more, and the
    person where there is none.
    """
    if not console.is_terminal:
        yield say
        return
    ended = threading.Event()
    with Live(console=console, auto_refresh=False, transient=False) as display:
        thread = threading.Thread(
            target=_follow, args=[logdir, display, ended], name="display", daemon=True
        )
        thread.start()
        try:
            yield silent
        finally:
            ended.set()
            thread.join()


def _follow(logdir: Path, display: Live, ended: threading.Event) -> None:
    with Watcher(logdir) as watcher:
        while True:
            last = ended.wait(_SECONDS_BETWEEN_LOOKS)
            status = watcher.look()
            # A run that has ended would look like one whose processes are all lost.
            if last:
                return
            if status is not None:
                display.update(picture(status), refresh=True)


def picture(status: RunStatus) -> RenderableType:
    """A run as a panel: progress, scores, rates, roles."""
    config = status.config
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", min_width=8)
    rows.add_column(ratio=1)
    rows.add_row("progress", _progress(status))
    rows.add_row("score", _score(status))
    parts: list[RenderableType] = [rows]
    if status.running:
        rows.add_row("speed", _speed(status))
        rows.add_row("time", _time(status))
        parts += [Text(), _roles(status.roles, ending=0 < config.steps <= status.step)]
    note = _note(status)
    if note:
        parts += [Text(), Text(note, style="yellow")]
    return Panel(
        Group(*parts),
        title=f"[bold]dreamfleet[/] {config.task}",
        title_align="left",
        subtitle=f"[dim]{config.logdir}[/]",
        subtitle_align="right",
        width=_WIDEST,
        border_style="blue" if status.running else "dim",
    )


def drawing(status: RunStatus) -> str:
    """The picture of a run as an SVG file."""
    console = Console(record=True, width=_WIDEST, force_terminal=True, file=io.StringIO())
    console.print(picture(status))
    return console.export_svg(title="dreamfleet")


def sparkline(values: Sequence[float], width: int = _SPARKS) -> str:
    """Values as a row of bars, each the mean of its share of them."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * count
    top = len(_BARS) - 1
    return "".join(_BARS[round((mean - low) / (high - low) * top)] for mean in means)


def clock(seconds: float) -> str:
    """3:07, 1:02:03 or 3 d 4 h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _progress(status: RunStatus) -> RenderableType:
    config = status.config
    words = f"{readable(status.step)} steps"
    shares = []
    if config.steps:
        words = f"{readable(status.step)} of {readable(config.steps)} steps"
        shares.append(status.step / config.steps)
    if config.duration and status.running:
        shares.append(status.seconds / config.duration)
    if not shares:
        return Text(words)
    share = min(1.0, max(shares))
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(
        total=1.0, completed=share, width=_SPARKS, complete_style="blue", finished_style="green"
    )
    row.add_row(bar, Text.from_markup(f"[bold]{share:.0%}[/]   {words}"))
    return row


def _time(status: RunStatus) -> RenderableType:
    words = f"{clock(status.seconds)} running"
    if status.seconds_left is not None:
        words += f", [bold]{clock(status.seconds_left)} left[/]"
    return Text.from_markup(words)


def _score(status: RunStatus) -> RenderableType:
    if status.score is None:
        return Text("no episode has ended yet", style="dim")
    row = Table.grid(padding=(0, 2))
    count = len(status.scores)
    best = f", best {readable(max(status.scores))}" if status.scores else ""
    episodes = f"{count:,} episode{'s' if count != 1 else ''}{best}"
    spark = Text(f"{sparkline(status.scores):<{_SPARKS}}", style="green")
    row.add_row(spark, Text.from_markup(f"[bold]{readable(status.score)}[/]   [dim]{episodes}[/]"))
    return row


def _speed(status: RunStatus) -> RenderableType:
    metrics = status.metrics
    words = [f"{readable(round(status.steps_per_second, 1))} steps/s"]
    if "learner/updates" in metrics:
        rate = float(metrics["learner/updates_per_second"])
        words.append(f"{readable(round(rate, 1))} updates/s")
    if "learner/replay_ratio" in metrics:
        words.append(f"replay ratio {readable(round(float(metrics['learner/replay_ratio']), 1))}")
    elif status.config.train_ratio > 0:
        words.append(f"train ratio {readable(status.config.train_ratio)}")
    return Text("   ".join(words))


def _roles(roles: Sequence[RoleStatus], *, ending: bool) -> RenderableType:
    """A row for each role; environments, which may be many, share one."""
    table = Table("role", "state", "cores", "memory", "running", box=None, header_style="dim")
    for column in table.columns[2:]:
        column.justify = "right"
    for kind, group in groupby(roles, key=lambda role: role.name.partition("-")[0]):
        members = list(group)
        here = [role for role in members if role.pid is not None]
        name = kind if len(members) == 1 else f"{kind} x {len(members)}"
        restarts = sum(role.restarts for role in members)
        state = _state(len(members) - len(here), len(members), ending)
        if restarts:
            state.append(f", {restarts} restart{'s' if restarts > 1 else ''}", style="yellow")
        since = min((role.seconds for role in here), default=None)
        table.add_row(
            name,
            state,
            f"{sum(role.cpu for role in here):.1f}" if here else "",
            f"{readable(sum(role.memory for role in here))}B" if here else "",
            clock(since) if since is not None else "",
        )
    return table


def _state(away: int, count: int, ending: bool) -> Text:
    if not away:
        return Text.from_markup("[green]●[/] running")
    if ending:
        return Text("○ ended", style="dim")
    return Text.from_markup("[red]●[/] away" if away == count else f"[red]●[/] {away} away")


def _note(status: RunStatus) -> str:
    if not status.running and status.step >= status.config.steps > 0:
        return "The run has ended: it has made all its steps."
    if not status.running:
        return "The run is not under way. The same command that started it goes on with it."
    if not status.answers:
        return "The logger does not answer yet."
    if status.steps_per_second == 0:
        waiting = status.metrics.get("replay/waiting")
        return str(waiting or status.metrics.get("learner/state") or "No environment has stepped.")
    return ""
