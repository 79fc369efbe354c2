"""A run drawn in a terminal or a notebook, from the same `RunStatus` that every other display
shows."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dreamfleet.fleet.record import (
    MachineState,
    MachineStatus,
    ProcessUsage,
    RunStatus,
    WorkerState,
    WorkerStatus,
)
from dreamfleet.fleet.stall import some_of
from dreamfleet.fleet.status import Watcher
from dreamfleet.fleet.supervisor import Say, silent
from dreamfleet.formatting import clock, readable

_BARS = "▁▂▃▄▅▆▇█"
_SECONDS_BETWEEN_LOOKS = 1.0
_REPEAT_SECONDS = 30.0
_SPARKS = 26
_WIDEST = 100
_FAILED_SECONDS = 600.0
_MOST_ERRORS = 3
_MOST_MACHINES = 12
_NAME_WIDTH = 32
_MACHINE_COLORS: dict[MachineState, str] = {"joined": "green", "away": "red", "left": "dim"}
# Of several states in a row of the table, the first of these is shown.
_COLORS: dict[WorkerState, str] = {
    "restarting": "red",
    "starting": "yellow",
    "ended": "dim",
    "running": "green",
}


@contextmanager
def live(logdir: Path, console: Console | None = None, say: Say | None = None) -> Iterator[Say]:
    """Show a run until the block ends, if there is a notebook or a terminal to show it on.

    Yields what takes the lines about progress: they are dropped if the display shows the same, and
    go to `say` if there is no display.
    """
    console = console or Console(highlight=False, emoji=False)
    if publish := _notebook():
        with _followed(logdir, lambda status: publish(*_for_notebook(status))):
            yield silent
    elif console.is_terminal:
        with (
            Live(console=console, auto_refresh=False, transient=False) as display,
            _followed(logdir, lambda status: display.update(picture(status), refresh=True)),
        ):
            yield silent
    else:
        yield calm(say or print_line)


def calm(say: Say, seconds: float = _REPEAT_SECONDS) -> Say:
    """The same, but a line that says nothing new is said now and then only: it is like one of the
    last lines, but for the seconds that it counts."""
    recent: deque[tuple[str, float]] = deque(maxlen=4)

    def calmly(line: str) -> None:
        news, now = re.sub(r"\d+ s\b", "", line), time.monotonic()
        if any(news == before and now - at < seconds for before, at in recent):
            return
        recent.append((news, now))
        say(line)

    return calmly


def print_line(line: str) -> None:
    """Print a line at once, also into a pipe or a file; with a question mark for what cannot be
    shown there."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding), flush=True)  # noqa: T201 - asked for


@contextmanager
def _followed(logdir: Path, show: Callable[[RunStatus], None]) -> Iterator[None]:
    """Show what the run in a directory is doing, by a thread, until the block ends."""
    ended = threading.Event()

    def follow() -> None:
        watcher = Watcher(logdir)
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):  # the run as it was stays on the screen
            if (status := watcher.look()) is not None:
                show(status)

    thread = threading.Thread(target=follow, name="display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _notebook() -> Callable[[str, str], None] | None:
    """What shows text, or HTML where that is understood, in one place of a notebook's cell, again
    and again; None outside of a notebook.

    IPython's own display needs no further package, unlike rich's.
    """
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is None:  # none at all, or one in a terminal
        return None
    place: Any = None

    def publish(text: str, html: str) -> None:
        nonlocal place
        data = {"text/plain": text, "text/html": html}
        if place is None:
            place = ipython.display.display(data, raw=True, display_id=True)
        else:
            place.update(data, raw=True)

    return publish


def _for_notebook(status: RunStatus) -> tuple[str, str]:
    """The picture of a run as text and as HTML."""
    console = _drawn(status)
    text = console.export_text(clear=False)
    return text, console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def picture(status: RunStatus) -> RenderableType:
    """A run as a panel: progress, scores, speed, workers, and why it stands still."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", min_width=8)
    rows.add_column(ratio=1)
    rows.add_row("progress", _progress(status))
    rows.add_row("score", _score(status))
    parts: list[RenderableType] = [rows]
    if status.running:
        rows.add_row("speed", _speed(status))
        rows.add_row("time", _time(status))
        if status.start:
            rows.add_row("agent", Text(status.start))
        parts += [Text(), _workers(status), *_machines(status), *_failures(status)]
    if status.message:
        parts += [Text(), Text(status.message, style="yellow")]
    return Panel(
        Group(*parts),
        title=f"[bold]dreamfleet[/] {status.task}",
        title_align="left",
        subtitle=f"[dim]{status.logdir}[/]",
        subtitle_align="right",
        width=_WIDEST,
        border_style="blue" if status.running else "dim",
    )


def picture_svg(status: RunStatus) -> str:
    """The picture of a run as the content of an SVG file."""
    return _drawn(status).export_svg(title="dreamfleet")


def _drawn(status: RunStatus) -> Console:
    console = Console(record=True, width=_WIDEST, force_terminal=True, file=io.StringIO())
    console.print(picture(status))
    return console


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


def _progress(status: RunStatus) -> RenderableType:
    words = f"{readable(status.step)} steps"
    if status.steps:
        words = f"{readable(status.step)} of {readable(status.steps)} steps"
    share = status.share
    if share is None:
        return Text(words)
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
    if status.checkpoint_age is not None:
        words += f", saved {clock(status.checkpoint_age)} ago"
    elif status.updates:
        words += ", not saved yet"
    return Text.from_markup(words)


def _score(status: RunStatus) -> RenderableType:
    if status.score is None:
        return Text("no episode has ended yet", style="dim")
    row = Table.grid(padding=(0, 2))
    count, best_score = status.scores.count, status.scores.best
    best = "" if best_score is None else f", best {readable(best_score)}"
    episodes = f"{count:,} episode{'s' if count != 1 else ''}{best}"
    if status.eval_score is not None:
        episodes += f", evaluation {readable(status.eval_score)}"
    spark = Text(f"{sparkline(status.scores.curve):<{_SPARKS}}", style="green")
    row.add_row(spark, Text.from_markup(f"[bold]{readable(status.score)}[/]   [dim]{episodes}[/]"))
    return row


def _speed(status: RunStatus) -> RenderableType:
    words = [f"{readable(round(status.steps_per_second, 1))} steps/s"]
    if status.updates_per_second is not None:
        words.append(f"{readable(round(status.updates_per_second, 1))} updates/s")
    if status.replay_ratio is not None:
        words.append(f"replay ratio {readable(round(status.replay_ratio, 1))}")
    elif status.train_ratio > 0:
        words.append(f"train ratio {readable(status.train_ratio)}")
    if status.env_failures:
        words.append(f"{status.env_failures} failures of environments")
    return Text("   ".join(words))


def _workers(status: RunStatus) -> RenderableType:
    """A row for each role; environments, which may be many, share one."""
    table = Table("role", "state", "cores", "memory", "running", box=None, header_style="dim")
    for column in table.columns[2:]:
        column.justify = "right"
    for role, group in groupby(status.workers, key=lambda worker: worker.role):
        members = list(group)
        ages = [worker.seconds for worker in members if worker.pid is not None]
        table.add_row(
            role if len(members) == 1 else f"{role} x {len(members)}",
            _state(members),
            *_usage([worker.usage for worker in members if worker.usage is not None]),
            clock(min(ages)) if ages else "",
        )
    if status.supervisor is not None:
        table.add_row(
            "supervisor",
            Text.from_markup("[green]●[/] running"),
            *_usage([status.supervisor]),
            clock(status.seconds),
        )
    return table


def _machines(status: RunStatus) -> list[RenderableType]:
    """A row for each machine that has joined, or has left a short while ago."""
    shown = [
        machine
        for machine in status.machines
        if machine.state != "left" or machine.seconds < _FAILED_SECONDS
    ]
    if not shown:
        return []
    table = Table("machine", "state", "environments", "steps/s", "failures", box=None)
    table.header_style = "dim"
    table.columns[0].max_width = _NAME_WIDTH
    table.columns[1].no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for machine in shown[:_MOST_MACHINES]:
        words = _machine_words(machine)
        here = machine.state == "joined"
        table.add_row(
            Text(machine.name, overflow="ellipsis", no_wrap=True),
            Text.from_markup(f"[{_MACHINE_COLORS[machine.state]}]●[/] {words}"),
            f"{machine.envs}" + (f" + {machine.eval_envs} eval" if machine.eval_envs else ""),
            readable(round(machine.steps_per_second, 1)) if here else "",
            str(machine.failures) if machine.failures else "",
        )
    more = len(shown) - _MOST_MACHINES
    errors = [
        Text(f"{machine.name}: {machine.error}", "yellow") for machine in shown if machine.error
    ]
    parts: list[RenderableType] = [Text(), table]
    if more > 0:
        parts.append(Text(f" and {more} more machines", "dim"))
    return [*parts, *errors[:_MOST_ERRORS]]


def _machine_words(machine: MachineStatus) -> str:
    if machine.state == "joined":
        return f"joined {clock(machine.seconds)} ago"
    if machine.state == "away":
        return f"away for {clock(machine.silence)}"
    return f"left {clock(machine.seconds)} ago"


def _usage(usages: Sequence[ProcessUsage]) -> tuple[str, str]:
    if not usages:
        return "", ""
    memory = readable(sum(usage.memory for usage in usages))
    return f"{sum(usage.cpu for usage in usages):.1f}", f"{memory}B"


def _state(workers: Sequence[WorkerStatus]) -> Text:
    counts = Counter(worker.state for worker in workers)
    state = next(state for state in _COLORS if state in counts)
    count = "" if counts[state] == len(workers) else f"{counts[state]} "
    text = Text.from_markup(f"[{_COLORS[state]}]●[/] {count}{state}")
    if restarts := sum(worker.restarts for worker in workers):
        text.append(f", {restarts} restart{'s' if restarts > 1 else ''}", style="yellow")
    return text


def _failures(status: RunStatus) -> list[RenderableType]:
    """Why workers failed that are restarting, or did so a short while ago."""
    names: dict[str, list[str]] = {}
    for worker in status.workers:
        if worker.error and (worker.state == "restarting" or worker.seconds < _FAILED_SECONDS):
            names.setdefault(worker.error, []).append(worker.name)
    return [
        Text(f"{some_of(found)} failed: {error}", style="yellow")
        for error, found in list(names.items())[:_MOST_ERRORS]
    ]
