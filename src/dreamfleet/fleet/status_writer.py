"""Writes `status.json`: what the supervisor, the logger and the run's files know of a run."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Self

import psutil

from dreamfleet.fleet.record import ProcessUsage, RunStatus, WorkerStatus, write_record
from dreamfleet.fleet.stall import hanging, idle_machines, late_after, waits_for, why_still
from dreamfleet.fleet.status import Watcher
from dreamfleet.metrics.timing import Rate
from dreamfleet.roles.addresses import server_name
from dreamfleet.roles.health import HealthRecord, read_health
from dreamfleet.roles.logger import RECORD

log = logging.getLogger(__name__)

_WRITE_SECONDS = 1.0
_HANG_SECONDS = 10.0  # of a shared directory, at the end
_SAMPLE_SECONDS = 5.0  # between two samples of the processes
_RATE_SECONDS = 30.0
_SILENT_SECONDS = 5.0


class StatusWriter:
    """Writes `status.json` once a second while the block runs, and at its end. `record` returns
    what the supervisor knows of itself, its workers and machines; None to write nothing."""

    def __init__(self, logdir: Path, record: Callable[[], RunStatus | None]) -> None:
        self._logdir, self._record = logdir, record
        self._files = Watcher(logdir)
        self._logger = logdir / "workers" / RECORD
        self._beat: tuple[int, int, float] = (0, 0, 0.0)  # of the logger, and when it was seen
        self._progress = _Progress()
        self._processes: dict[int, tuple[psutil.Process, float, ProcessUsage]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._logger.unlink(missing_ok=True)  # that of the run before
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(_HANG_SECONDS)

    def _run(self) -> None:
        self._write()
        while not self._over.wait(_WRITE_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        try:
            if (record := self._record()) is not None:
                write_record(self._logdir, self.look(record) or record)
        except Exception as error:  # such as a full disk, which must not end the run
            log.warning("The status of the run cannot be written: %s", error)

    def look(self, record: RunStatus) -> RunStatus | None:
        """What the run is doing; None as long as there is no configuration in its directory."""
        now, folder = time.monotonic(), self._logdir / "workers"
        responding = self._logger_responds(record, now)  # before its metrics are read
        found = self._files.derive(record, record.state)
        config = self._files.config
        if found is None or config is None or not found.running:
            return found
        if responding:
            self._progress.add(now, found.step, read_health(folder / "agent").steps)
        late = late_after(config.log_every)
        running = [each for each in found.workers if each.state == "running"]
        health = {each.name: read_health(folder / each.name) for each in running}
        status = replace(
            found,
            written=time.time(),
            responding=responding,
            steps_per_second=self._progress.rate,
            workers=tuple(
                self._as_now(each, health.get(each.name, HealthRecord()), late, record.pid)
                for each in found.workers
            ),
            supervisor=self._usage(record),
        )
        if status.state != "running":
            return status
        stuck = [hanging(health.values(), config.env_timeout, status.written)]
        stuck += idle_machines(status.machines)
        status = replace(status, hanging="; ".join(filter(None, stuck)))
        if responding and not self._progress.stands_still(config.log_every):
            return status
        shards = range(config.replay_shards if config.remote_replay else 0)
        elsewhere = [read_health(folder / server_name("replay", shard)) for shard in shards]
        why = why_still(status, config, self._progress.still_for, elsewhere)
        return replace(status, waiting=why)

    def _as_now(
        self, worker: WorkerStatus, health: HealthRecord, late: float, supervisor: int
    ) -> WorkerStatus:
        """A worker as it is now; the agent has a second health record, its actor's."""
        now = time.time()
        waiting = [waits_for(worker, health, now, late)]
        if worker.role == "agent":
            actor = read_health(self._logdir / "workers" / "actor")
            waiting.insert(0, waits_for(worker, actor, now, late, "actor"))
        return replace(
            worker,
            seconds=max(0.0, now - worker.started) if worker.pid else 0.0,
            waiting="; ".join(filter(None, waiting)),
            # A thread of the supervisor has no process of its own.
            usage=None if worker.pid == supervisor else self._usage(worker),
        )

    def _logger_responds(self, record: RunStatus, now: float) -> bool:
        """Whether the logger has replaced its record a short while ago. One that is a part of the
        agent, in a serial run, may be busy."""
        try:
            written = self._logger.stat()
        except OSError:
            return False
        if (beat := (written.st_ino, written.st_mtime_ns)) != self._beat[:2]:
            self._beat = *beat, now
        in_agent = not any(each.role == "logger" for each in record.workers)
        return in_agent or now - self._beat[2] < _SILENT_SECONDS

    def _usage(self, of: WorkerStatus | RunStatus) -> ProcessUsage | None:
        """What a process uses, sampled now and then; None if it is not on this machine."""
        pid, now = of.pid, time.monotonic()
        if pid is None or of.host != socket.gethostname():
            return None
        try:
            process, sampled, used = self._processes.get(pid) or (psutil.Process(pid), -inf, None)
            if not process.is_running():
                process, sampled = psutil.Process(pid), -inf
            if used is None or now - sampled >= _SAMPLE_SECONDS:
                # Kept from sample to sample: the share of a CPU is that since the last one.
                used = ProcessUsage(process.cpu_percent() / 100, process.memory_info().rss)
                self._processes[pid] = process, now, used
            return used
        except (psutil.Error, ValueError, OverflowError):
            self._processes.pop(pid, None)
            return None


class _Progress:
    """How fast a run makes steps, and whether it stands still."""

    def __init__(self) -> None:
        self._steps = Rate(_RATE_SECONDS)
        self._step = self._updates = -1
        self._now = self._stepped = self._updated = 0.0  # when those were last seen to change
        self._moved = False

    def add(self, now: float, step: int, updates: int) -> None:
        """Take how many steps and updates there are."""
        if step != self._step:
            self._moved, self._stepped = self._step >= 0, now
        if updates != self._updates or not self._step:  # the first steps come first
            self._updated = now
        if not step:  # what was before the first step does not count
            self._steps = Rate(_RATE_SECONDS)
        self._steps.add(now, step)
        self._now, self._step, self._updates = now, step, updates

    @property
    def rate(self) -> float:
        """Steps a second over the last while; 0 before that is known."""
        return self._steps.value if self._steps.seconds >= 1.0 else 0.0

    @property
    def still_for(self) -> float:
        """Seconds since the last step or the last update, whichever is longer ago."""
        return self._now - min(self._stepped, self._updated)

    def stands_still(self, log_every: float) -> bool:
        """Whether there were no steps, or no updates, for a while. Steps are reported at once, or,
        without environments, every `log_every` seconds. Updates start long after them."""
        late = self._now - self._stepped > 1.5 * log_every
        return late or not self._moved or self._now - self._updated > late_after(log_every)
