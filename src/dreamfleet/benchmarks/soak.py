"""Whether a run grows: memory, files, sockets and threads of every process while it trains.

The run is an ordinary one. Whenever it logs, the processes of its fleet are looked at, by the names
that the supervisor gives them. After the run the last quarter is compared with the second: the
first one is for compiling and for filling the replay.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from typing import Any

from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.files import atomic_write
from dreamfleet.fleet.record import read_record
from dreamfleet.plotting import COLORS, make_figure, plain_axis, save_figure
from dreamfleet.training import StopTraining, train

KINDS = {"memory": "MB", "files": "", "sockets": "", "threads": ""}
"""What is looked at, with its unit. Memory is what belongs to a process alone: pages of mapped
files are the kernel's, which takes them back when it needs them."""
_ROOM = {"memory": (8.0, 0.03), "files": (1, 0.0), "sockets": (1, 0.0), "threads": (0, 0.0)}
CRITERION = (
    "A process is flat if its median over the last quarter of the run is at most 8 MB or 3 % of "
    "memory (whichever is more), 1 file, 1 socket and no thread above that over the second quarter."
)
_FEWEST = 8  # samples of a process: two in each quarter


@dataclass
class Series:
    """What one process used, over time."""

    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    files: list[float] = field(default_factory=list)
    sockets: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)

    def add(self, seconds: float, values: Mapping[str, float]) -> None:
        self.seconds.append(seconds)
        for kind, value in values.items():
            getattr(self, kind).append(value)

    def growth(self, kind: str, duration: float) -> tuple[float, float]:
        """The median over the second quarter of the run, and what the last quarter's is above."""
        values: Sequence[float] = getattr(self, kind)
        quarter = [min(3, int(4 * at / duration)) for at in self.seconds]
        parts = [[v for v, q in zip(values, quarter, strict=True) if q == n] for n in (1, 3)]
        if not all(parts):
            return 0.0, 0.0
        before, after = map(statistics.median, parts)
        return before, after - before


@dataclass
class Soak:
    """A run that was looked at all the time."""

    duration: float
    steps: int = 0
    restarts: int = 0
    processes: dict[str, Series] = field(default_factory=dict)

    def grown(self) -> Iterator[str]:
        """A sentence for everything that is not flat."""
        for name, series in self.processes.items():
            if len(series.seconds) < _FEWEST:
                yield f"{name} was seen {len(series.seconds)} times: let the run last longer."
                continue
            for kind, unit in KINDS.items():
                before, more = series.growth(kind, self.duration)
                least, share = _ROOM[kind]
                if more > max(least, share * before):
                    yield f"{kind} of {name}: {more:+.1f} {unit} on {before:.1f}".rstrip()
        if self.restarts:
            yield f"{self.restarts} processes had to be started again."

    def to_json(self) -> str:
        grown = list(self.grown())
        growth = {
            name: {kind: round(series.growth(kind, self.duration)[1], 3) for kind in KINDS}
            for name, series in self.processes.items()
        }
        told = {"flat": not grown, "grown": grown, "criterion": CRITERION, "growth": growth}
        return dumps({**told, **asdict(self)}, indent=1) + "\n"


def soak(config: RunConfig, duration: float, out: Path) -> Soak:
    """Train for some seconds, and write what was seen to OUT.json and OUT.png. Seconds are counted
    from the first steps on, when everything is compiled. On a slow machine it takes longer, until
    there is enough to compare.

    Raises:
        ConfigError: This system does not tell what processes use.
    """
    if not Path("/proc/self/status").exists():
        raise ConfigError("What processes use is read from /proc, which only Linux has.")
    found, begin = Soak(duration), time.monotonic()
    due = LocalClock(config.log_every / 2)  # the roles log at different times

    def look(step: int, _: Mapping[str, Any]) -> None:
        nonlocal begin
        found.steps = step
        if not step:
            begin = time.monotonic()
        if not step or not due():
            return
        seconds = time.monotonic() - begin
        record = read_record(config.logdir)
        workers = record.workers if record else ()
        found.restarts = sum(worker.restarts for worker in workers)
        running = {worker.name: worker.pid for worker in workers if worker.pid}
        for name, pid in {"supervisor": os.getpid(), **running}.items():
            if pid == os.getpid() and name != "supervisor":
                continue  # a thread of the supervisor
            if values := usage(pid):
                found.processes.setdefault(name, Series()).add(seconds, values)
        seen = min(len(series.seconds) for series in found.processes.values())
        if seconds >= duration and seen >= _FEWEST:
            raise StopTraining

    train(config, on_log=look)
    found.duration = time.monotonic() - begin
    atomic_write(out.with_suffix(".json"), found.to_json())
    draw(found, out.with_suffix(".png"))
    return found


def usage(pid: int) -> dict[str, float]:
    """What a process uses now; nothing if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.partition(":")[::2] for line in lines)
        kinds = Counter[bool]()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                kinds[str(path.readlink()).startswith("socket:")] += 1
        kilobytes = sum(int(status[key].split()[0]) for key in ("RssAnon", "RssShmem"))
    except (OSError, KeyError):
        return {}
    return {
        "memory": kilobytes / 1024,
        "files": kinds[False],
        "sockets": kinds[True],
        "threads": int(status["Threads"]),
    }


def draw(found: Soak, out: Path) -> None:
    """A panel for each kind, with a line for each process."""
    figure = make_figure(10.4, 7.0)
    axes = figure.subplots(2, 2).flat
    for axis, (kind, unit) in zip(axes, KINDS.items(), strict=True):
        for number, (name, series) in enumerate(found.processes.items()):
            values = getattr(series, kind)
            minutes = [at / 60 for at in series.seconds]
            color = COLORS[number % len(COLORS)]
            axis.plot(minutes, values, color=color, linewidth=1.4, label=name)
        axis.axvspan(0, found.duration / 240, color="0.95", zorder=0)
        axis.set_title(f"{kind} ({unit})" if unit else kind, fontsize=11, loc="left")
        axis.set_xlabel("minutes")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        plain_axis(axis)
    axes[0].legend(fontsize=8, frameon=False)
    save_figure(figure, out, dpi=110)
