"""Growth of a run: memory, files, sockets and threads of every process while it trains.

The run is an ordinary one, and its processes are sampled whenever it logs. Afterwards the last
quarter of the run is compared with the second; in the first one programs are compiled and the
replay fills. `soak.json` and `soak.png` in the run's directory hold all samples.
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

from benchmarks.report import Row
from dreamfleet.cli.train import config_of
from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import atomic_write
from dreamfleet.fleet.record import read_record
from dreamfleet.plotting import COLORS, make_figure, plain_axis, save_figure
from dreamfleet.resuming import holds_run
from dreamfleet.training import StopTraining, train

KINDS = {"memory": "MB", "files": "", "sockets": "", "threads": ""}
"""What is sampled, with its unit. Memory is that of a process alone: pages of mapped files are the
kernel's, which reclaims them when it needs them."""
_SETTINGS = """--task bundled:catch --preset pixels --envs 4 --envs-per-process 2 --train-ratio 8
--replay.capacity 10000 --steps 0 --eval-episodes 0"""
_TOLERANCE = {"memory": (8.0, 0.03), "files": (1, 0.0), "sockets": (1, 0.0), "threads": (0, 0.0)}
CRITERION = (
    "The median over the last quarter may exceed that over the second by 8 MB or 3 % of memory "
    "(whichever is more), 1 file, 1 socket and no thread."
)
_MIN_SAMPLES = 8  # of a process: two in each quarter


def run(
    logdir: Path, minutes: float = 60.0, quick: bool = False, settings: Sequence[str] = ()
) -> Iterator[Row]:
    """Train for some minutes; raises an error if a process grew.

    Args:
        logdir: A directory without a run.
        minutes: How long, from the first steps on.
        quick: Train for a second, with the random agent.
        settings: Further settings of `dreamfleet train`, such as `--task bundled:dummy`.
    """
    if holds_run(logdir):
        raise ConfigError(f"{logdir} holds a run already: name another directory.")
    words = [*_SETTINGS.split(), *(["--agent", "random"] if quick else []), *settings]
    seconds = 1.0 if quick else 60 * minutes
    every = min(10.0, seconds / 40)
    config = config_of([*words, "--logdir", str(logdir), "--log-every", str(every)])
    found = soak(config, seconds, logdir / "soak")
    for name, series in found.processes.items():
        for kind, unit in KINDS.items():
            _, more = series.growth(kind, found.duration)
            note = f"{more:+.1f} since the second quarter"
            yield Row(f"{name}: {kind}", getattr(series, kind)[-1], unit, note=note)
    if grown := list(found.grown()):
        raise DreamfleetError(f"Processes grew: {'; '.join(grown)}. {CRITERION}")


@dataclass
class Series:
    """Samples of one process."""

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
        """The median over the second quarter, and by how much that over the last exceeds it."""
        values: Sequence[float] = getattr(self, kind)
        quarter = [min(3, int(4 * at / duration)) for at in self.seconds]
        parts = [[v for v, q in zip(values, quarter, strict=True) if q == n] for n in (1, 3)]
        if not all(parts):
            return 0.0, 0.0
        before, after = map(statistics.median, parts)
        return before, after - before


@dataclass
class Soak:
    """All samples of a run."""

    duration: float
    steps: int = 0
    restarts: int = 0
    processes: dict[str, Series] = field(default_factory=dict)

    def grown(self) -> Iterator[str]:
        """One sentence per growth."""
        for name, series in self.processes.items():
            if len(series.seconds) < _MIN_SAMPLES:
                yield f"{name} has {len(series.seconds)} samples: use more --minutes"
                continue
            for kind, unit in KINDS.items():
                before, more = series.growth(kind, self.duration)
                least, share = _TOLERANCE[kind]
                if more > max(least, share * before):
                    yield f"{kind} of {name}: {more:+.1f} {unit} on {before:.1f}".rstrip()
        if self.restarts:
            yield f"{self.restarts} processes were restarted"

    def to_json(self) -> str:
        grown = list(self.grown())
        growth = {
            name: {kind: round(series.growth(kind, self.duration)[1], 3) for kind in KINDS}
            for name, series in self.processes.items()
        }
        summary = {"flat": not grown, "grown": grown, "criterion": CRITERION, "growth": growth}
        return dumps({**summary, **asdict(self)}, indent=1) + "\n"


def soak(config: RunConfig, duration: float, out: Path) -> Soak:
    """Train for some seconds from the first steps on, and write OUT.json and OUT.png. On a slow
    machine it takes longer, until there are enough samples.

    Raises:
        ConfigError: This system has no /proc.
    """
    if not Path("/proc/self/status").exists():
        raise ConfigError("soak reads /proc, which only Linux has.")
    found, begin = Soak(duration), time.monotonic()
    due = LocalClock(config.log_every / 2)  # the roles log at different times

    def sample(step: int, _: Mapping[str, Any]) -> None:
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
        if seconds >= duration and seen >= _MIN_SAMPLES:
            raise StopTraining

    train(config, on_log=sample)
    found.duration = time.monotonic() - begin
    atomic_write(out.with_suffix(".json"), found.to_json())
    draw(found, out.with_suffix(".png"))
    return found


def usage(pid: int) -> dict[str, float]:
    """What a process uses now; empty if it has ended."""
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
    """One panel per kind, one line per process."""
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
