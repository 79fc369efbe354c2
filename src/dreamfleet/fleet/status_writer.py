"""Writes `status.json`: what the supervisor, the logger and the run's files know of a run."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Self

import psutil

from dreamfleet.config import RunConfig
from dreamfleet.fleet.record import (
    FleetRecord,
    MachineStatus,
    ProcessUsage,
    RunStatus,
    WorkerStatus,
    write_record,
)
from dreamfleet.fleet.stall import idle_machines, late_after, why_still
from dreamfleet.fleet.status import Watcher
from dreamfleet.metrics.timing import Rate
from dreamfleet.roles.addresses import find_server, server_name
from dreamfleet.roles.health import read_health
from dreamfleet.transport import Client, Future, TransportError

log = logging.getLogger(__name__)

_WRITE_SECONDS = 1.0
_HANG_SECONDS = 10.0  # of a shared directory, at the end
_SAMPLE_SECONDS = 5.0  # between two samples of the processes
_RATE_SECONDS = 30.0
_ACTOR_RATE = r"actor(-\d+)?/steps_per_second$"
_ANSWER_SECONDS = 0.5
_UNANSWERED_SECONDS = 5.0


class StatusWriter:
    """Writes `status.json` once a second while the block runs, and at its end.

    Args:
        logdir: The run's directory.
        record: Returns the supervisor and its workers as they are now; None to write nothing.
        machines: Returns the machines that have joined.
    """

    def __init__(
        self,
        logdir: Path,
        record: Callable[[], FleetRecord | None],
        machines: Callable[[], tuple[MachineStatus, ...]] = tuple,
    ) -> None:
        self._logdir, self._record, self._machines = logdir, record, machines
        self._files = Watcher(logdir)
        self._logger: _LoggerQuestions | None = None
        self._progress = _Progress()
        self._processes: dict[int, tuple[psutil.Process, float, ProcessUsage]] = {}
        self._last: RunStatus | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(_HANG_SECONDS)

    def _run(self) -> None:
        self._write(ask=False)  # the workers, before the logger is asked
        while not self._over.wait(_WRITE_SECONDS):
            self._write(ask=True)
        self.close()
        self._write(ask=False)

    def _write(self, *, ask: bool) -> None:
        try:
            record = self._record()
            if record is None:
                return
            if ask:
                self._last = self.look(record)
            elif self._last is not None:
                self._last = replace(
                    self._last, workers=record.workers, state=record.state, events=record.events
                )
            write_record(self._logdir, self._last or record)
        except Exception as error:  # such as a full disk, which must not end the run
            log.warning("The status of the run cannot be written: %s", error)

    def close(self) -> None:
        if self._logger is not None:
            self._logger.close()

    def look(self, record: FleetRecord, patience: float = _ANSWER_SECONDS) -> RunStatus | None:
        """What the run is doing; None as long as there is no configuration in its directory.

        Args:
            record: The supervisor and its workers.
            patience: Seconds to wait for the logger; a later answer comes with the next look.
        """
        found = self._files.derive(record, record.state)
        if found is None:
            return None
        config, machines = found.config, self._machines()
        logger = self._logger = self._logger or _LoggerQuestions(config)
        logger.ask(patience)
        # A logger that was just started does not know the step yet.
        step = int(logger.metrics.get("step", 0)) or found.step
        folder = self._logdir / "workers"
        agent = read_health(folder / "agent")
        rates = [v for k, v in logger.metrics.items() if re.match(_ACTOR_RATE, k)]
        acts = "is compiling" not in agent.waiting  # else rates are those of before
        self._progress.add(time.monotonic(), step, agent.steps, sum(rates) if acts else 0.0)
        rate = self._progress.rate if acts else 0.0
        idle = idle_machines(machines) if record.state == "running" else ()
        # A thread of the supervisor has no process of its own.
        usages = [None if each.pid == record.pid else self._usage(each) for each in found.workers]
        status = replace(
            found,
            written=time.time(),
            responding=logger.responding,
            step=step,
            metrics=logger.metrics,
            steps_per_second=rate,
            seconds_left=_time_left(config, step, rate, found.seconds),
            workers=tuple(map(_with_usage, found.workers, usages)),
            supervisor=self._usage(record),
            machines=machines,
            hanging="; ".join(filter(None, [found.hanging, *idle])),
        )
        moves = logger.responding and not self._progress.stands_still(config.log_every)
        if moves or status.state != "running":
            return status
        shards = range(config.replay_shards if config.remote_replay else 0)
        elsewhere = [read_health(folder / server_name("replay", shard)) for shard in shards]
        return replace(status, waiting=why_still(status, self._progress.still_for, elsewhere))

    def _usage(self, of: WorkerStatus | FleetRecord) -> ProcessUsage | None:
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


def _with_usage(worker: WorkerStatus, usage: ProcessUsage | None) -> WorkerStatus:
    return replace(worker, usage=usage)


class _LoggerQuestions:
    """Asks the logger how the run is doing, without waiting for long."""

    def __init__(self, config: RunConfig) -> None:
        self._client = Client(find_server(config, "logger"), "watcher", keys=config.run_keys)
        self._question: Future | None = None
        self._asked = 0.0
        self.metrics: dict[str, Any] = {}
        self.responding = False

    def ask(self, patience: float) -> None:
        """A question that was not answered yet is not asked again."""
        try:
            if self._question is None:
                self._question, self._asked = self._client.status(), time.monotonic()
            if self._question.wait(patience):
                question, self._question = self._question, None
                self.metrics, self.responding = question.result(), True
            elif time.monotonic() - self._asked > _UNANSWERED_SECONDS:
                self.responding = False
        except TransportError as error:
            log.debug("The logger does not respond: %s", error)
            self._question, self.responding = None, False

    def close(self) -> None:
        self._client.close(0.0)  # a question that was not sent is dropped


class _Progress:
    """How fast a run makes steps, and whether it stands still."""

    def __init__(self) -> None:
        self._now = 0.0
        self._steps = Rate(_RATE_SECONDS)
        self._step = 0
        self._step_since = self._updates_since = -inf
        self._updates, self._reported = 0, 0.0
        self._moved = False

    def add(self, now: float, step: int, updates: int, reported: float = 0.0) -> None:
        """Take how many steps and updates there are, and the steps a second that actors report."""
        first = self._step_since == -inf
        if first or step != self._step:
            self._moved = not first
            self._step_since = now
        if first or updates != self._updates or not self._step:  # the first steps come first
            self._updates_since = now
        if not step:  # what was before the first step does not count
            self._steps = Rate(_RATE_SECONDS)
        self._steps.add(now, step)
        self._now, self._step, self._updates, self._reported = now, step, updates, reported

    @property
    def rate(self) -> float:
        """Steps a second over the last while; before that is known, what actors reported."""
        return self._reported if self._steps.seconds < 1.0 else self._steps.value

    @property
    def still_for(self) -> float:
        """Seconds since the last step or the last update, whichever is longer ago."""
        return self._now - min(self._step_since, self._updates_since)

    def stands_still(self, log_every: float) -> bool:
        """Whether there were no steps, or no updates, for a while.

        Steps are reported at once, or, without environments, every `log_every` seconds. Updates
        start long after the first steps.
        """
        if self._now - self._step_since > 1.5 * log_every:
            return True
        if not self._moved and self.rate == 0:  # nothing else is known at the first looks
            return True
        return self._now - self._updates_since > late_after(log_every)


def _time_left(config: RunConfig, step: int, rate: float, seconds: float) -> float | None:
    if 0 < config.steps <= step:  # the last updates are made; their time is unknown
        return None
    ends = []
    if config.duration:
        ends.append(config.duration - seconds)
    if config.steps and rate > 0:
        ends.append((config.steps - step) / rate)
    return max(0.0, min(ends)) if ends else None
