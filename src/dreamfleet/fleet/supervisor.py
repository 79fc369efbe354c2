"""Watches the workers of a fleet: restarts those that fail, and stops all of them together."""

from __future__ import annotations

import logging
import queue
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from dreamfleet.errors import DreamfleetError
from dreamfleet.fleet.launchers import (
    JoinedNode,
    Launcher,
    Node,
    ReportedWorker,
    RestartPolicy,
    RunningWorker,
    Worker,
)
from dreamfleet.fleet.record import (
    MAX_EVENTS,
    Event,
    EventKind,
    MachineStatus,
    RunState,
    RunStatus,
    WorkerState,
    WorkerStatus,
)
from dreamfleet.fleet.status_writer import StatusWriter
from dreamfleet.roles.health import Health, HealthRecord, read_health
from dreamfleet.roles.runtime import STOP_SIGNAL, STOPPED, backoff, on_end_signal

log = logging.getLogger(__name__)

Say = Callable[[str], None]

_SAVE_SECONDS = 90.0
_FAILED_SECONDS = 60.0
_STOP_SECONDS = 20.0
_MOST_WAITS = 4
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_ASKED = (-STOP_SIGNAL, -signal.SIGTERM, -signal.SIGHUP)
_LOOK_SECONDS = 1.0  # a signal that another thread took does not wake this one
_REASON_LENGTH = 200
_FULL = 1 << 20  # bytes that are left on a full disk, which the system keeps for itself
_HUNG = "Timeout ("  # what faulthandler writes before it ends a process that took too long


class FleetError(DreamfleetError):
    """A worker failed, and the run ended because of it; the message shows the first error."""


def without_output(error: str) -> str:
    """How a worker has failed, on one line and without the end of its log."""
    return " ".join(error.partition(". The end of ")[0].split())


def silent(line: str) -> None:
    del line


def unless_full(say: Say) -> Say:
    """The same, but what cannot be written is not said: a full disk is no reason to end a run."""

    def said(line: str) -> None:
        try:
            say(line)
        except BrokenPipeError:
            raise
        except OSError as error:
            log.warning("A line could not be printed (%s): %s", error, line)

    return said


class Supervisor:
    """Runs a fleet until a worker that ends the run has returned, or until it is stopped. A worker
    that ends without having been asked to is started again, as its restart policy says.

    Args:
        workers: In the order in which they are stopped; they are started in the opposite order.
        launcher: Starts them.
        logdir: Where `status.json` is written; None for nowhere.
        duration: Seconds after which the run is stopped; 0 for never.
        say: Takes lines to show.
        on_end: Told of each worker that has ended: its name, its output, and whether it is given
            up. One that is given up ends nothing then.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        launcher: Launcher,
        *,
        logdir: Path | None = None,
        duration: float = 0.0,
        say: Say = silent,
        on_end: Callable[[str, str, bool], None] | None = None,
    ) -> None:
        self.machines: Callable[[], tuple[MachineStatus, ...]] = tuple
        """Machines that have joined, for `status.json`."""
        self.on_failure: Say = silent
        """Told of the failure that ends the run, before all workers are stopped."""
        self._members = [_Member(worker, launcher) for worker in workers]
        self._launcher = launcher
        self._failures = Failures()
        self._told_of_envs = False
        self._duration, self._say, self._on_end = duration, say, on_end
        self._events: queue.SimpleQueue[Callable[[], str]] = queue.SimpleQueue()
        self._logdir = logdir
        self._inode = logdir.stat().st_ino if logdir is not None else None
        self._record = RunStatus.of_this_process(logdir)
        self._events_seen = deque(self._record.events, MAX_EVENTS)
        self._state: RunState = "running"
        self._at_once = self._interrupted = False

    def run(self, tick: Callable[[], None] = lambda: None, every: float = 10.0) -> None:
        """Start everything and return when the run is over and every worker has ended.

        Raises:
            FleetError: A worker failed, and the run ended because of it.
            KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP ended the run; everything is saved.
        """
        failed = True
        self._launcher.prepare([member.worker for member in self._members])
        status = StatusWriter(self._logdir, self._status) if self._logdir else nullcontext()
        with on_end_signal(self._on_signal), status:
            try:
                for member in reversed(self._members):
                    self._start(member)
                stopped = self._watch(tick, every)
                self._check_health()
                failed = False
            except FleetError as error:
                self.on_failure(str(error))
                raise
            finally:
                self._state = "ending"
                self._stop_all(failed)
                self._state = "failed" if failed else "ended"
        if stopped in _SIGNALS:
            raise KeyboardInterrupt

    def stop(self, reason: str = "stop", *, at_once: bool = False) -> None:
        """End the run in order, or kill all workers `at_once`; from any thread or signal."""
        self._at_once = self._at_once or at_once
        self._events.put(lambda: reason)

    def add(self, node: JoinedNode, workers: Sequence[Worker]) -> None:
        """Take over the workers of a machine that has joined; from any thread."""
        self._events.put(partial(self._on_join, node, workers))

    def remove(self, node: JoinedNode) -> None:
        """Forget the workers of a machine that has left; from any thread."""
        self._events.put(partial(self._forget, node))

    def _watch(self, tick: Callable[[], None], every: float) -> str:
        """Handle events until the run is over; returns why it is."""
        end = time.monotonic() + self._duration if self._duration else float("inf")
        next_tick = time.monotonic() + every
        while True:
            now = time.monotonic()
            self._check_directory()
            self._check_health()
            if now >= end:
                return "duration"
            if now >= next_tick:
                next_tick = now + every
                tick()
            try:
                wake = min(end, next_tick, now + _LOOK_SECONDS)
                event = self._events.get(timeout=max(0.0, wake - now))
            except queue.Empty:
                continue
            if reason := event():
                if reason in _SIGNALS:
                    # Not by the handler: it may interrupt a line that is just being written.
                    self._say("Saving and ending; a second signal ends at once.")
                return reason

    # Events return why the run is over; nothing, if it is not.

    def _start(self, member: _Member) -> str:
        if member not in self._members:
            return ""  # its machine has left
        running = member.start()
        if member.restarts:
            self._add_event(member, "started")

        def wait() -> None:
            code = running.wait()
            assert code is not None
            self._events.put(partial(self._on_exit, member, code))

        threading.Thread(target=wait, name=f"wait-{member.name}", daemon=True).start()
        return ""

    def _on_join(self, node: JoinedNode, workers: Sequence[Worker]) -> str:
        members = [_Member(worker, node, node) for worker in workers]
        servers = [m for m in self._members if m.worker.role in ("replay", "logger")]
        others = [m for m in self._members if m not in servers]
        self._members = [*others, *members, *servers]  # stopped after the run's own environments
        for member in members:
            self._start(member)
        return ""

    def _forget(self, node: Node) -> str:
        self._members = [each for each in self._members if each.node is not node]
        return ""

    def _on_exit(self, member: _Member, code: int) -> str:
        """Decide what follows the end of a worker that was not asked to stop."""
        if member not in self._members:
            return ""  # its machine has left
        if member.worker.ends_run and code == 0:
            return "done"
        given_up, output = False, member.output() if self._on_end else ""  # before its next start
        try:
            self._restart(member, code)
        except FleetError as error:
            given_up = True
            if member.machine:
                self._dismiss(member.machine, member, error)
            elif not self._on_end:
                raise
        if self._on_end:
            self._on_end(member.name, output, given_up)
        return ""

    def _dismiss(self, machine: JoinedNode, member: _Member, error: FleetError) -> None:
        """Send a joined machine away that has failed too often; the run goes on, unless it ends at
        failures."""
        why = without_output(str(error))
        machine.dismiss(why)
        if member.worker.restart.on_failure == "stop" or member.health().not_finite:
            raise FleetError(f"The joined machine {machine.name} failed: {why}") from None
        self._say(f"The joined machine {machine.name} is dismissed: {why}")
        self._forget(machine)

    def _restart(self, member: _Member, code: int) -> None:
        self._check_directory()
        how = member.describe_exit(code)
        self._add_event(member, "failed")
        error = f"{member.name} {how}. The end of {member.log_file}:\n{member.output()}"
        policy, health = member.worker.restart, member.health()
        if policy.on_failure == "stop" or health.final:
            raise FleetError(error) from member.running.error
        same = [each for each in self._members if each.budget == member.budget]
        progress = sum(each.health().progress for each in same)
        delay = self._failures.add(member.budget, error, policy, progress)
        when = f"in {delay:g} s" if delay else "at once"
        self._say(f"{member.name} {how} and is started again {when}; see {member.log_file}")
        member.restarts += 1
        if not delay:
            self._start(member)
            return
        timer = threading.Timer(delay, self._events.put, [partial(self._start, member)])
        timer.daemon = True
        timer.start()

    def _check_directory(self) -> None:
        """End the run without saving if its directory was moved or removed: what workers write by
        its name would be half a run."""
        if not self._is_gone():
            return
        self._at_once = True
        raise FleetError(
            f"The run's directory {self._logdir} was moved or removed while the run was under way, "
            "so it has ended without saving: resume it from where the directory is now."
        )

    def _is_gone(self) -> bool:
        """Whether the run's directory is no longer at its place."""
        try:
            return self._logdir is not None and self._logdir.stat().st_ino != self._inode
        except (FileNotFoundError, NotADirectoryError):
            return self._inode is not None
        except OSError:  # a file system that does not answer for a moment
            return False

    def _check_health(self) -> None:
        """Record environments that have failed and are built again; the first one is said."""
        for member in self._members:
            health = member.health()
            if health.failures <= member.env_failures:
                continue
            member.env_failures = health.failures
            member.failure = health.error
            self._add_event(member, "environment failed")
            if not self._told_of_envs:
                self._told_of_envs = True
                self._say(
                    f"A failure: {health.error}. Its episode was cut short, and the environment is "
                    "rebuilt or reset. The status counts further failures; "
                    f"{member.log_file} has the traceback."
                )

    def _stop_all(self, failed: bool) -> None:
        """Stop role after role, so that the agent sends and saves while the others still serve.
        Nothing is restarted: the agent does not wait long for a worker that is away."""
        seconds = _FAILED_SECONDS if failed else _SAVE_SECONDS
        for _, group in groupby(self._members, lambda m: m.worker.role):
            self._stop_role(list(group), seconds)
            seconds = _STOP_SECONDS

    def _stop_role(self, members: list[_Member], seconds: float) -> None:
        """Stop some members together. Progress gains as many seconds again, a few times: a machine
        may be busy."""
        begin = deadline = time.monotonic()
        progress: list[int] = []
        asked = [member for member in members if member.alive]
        for member in () if self._at_once else asked:
            member.running.terminate()
        while any(m.alive for m in asked) and not self._at_once:
            now = time.monotonic()
            if progress != (progress := [member.health().progress for member in asked]):
                deadline = min(now, begin + _MOST_WAITS * seconds) + seconds
            if now >= deadline:
                break
            with suppress(queue.Empty):
                self._events.get(timeout=min(deadline - now, _LOOK_SECONDS))
        for member in self._members if self._at_once else ():
            member.running.kill()
        for member in asked:
            if not member.end() and not self._at_once:
                waited = time.monotonic() - begin
                self._say(
                    f"{member.name} did not stop within {waited:.0f} s and was killed; what it had "
                    f"not saved by then is lost. See {member.log_file}."
                )
            elif not self._at_once and (how := member.failed_to_end()):
                self._say(f"{member.name} {how} while it was stopping; see {member.log_file}")

    def _status(self) -> RunStatus | None:
        """The supervisor and its workers as they are now; None if the directory is gone."""
        if self._is_gone():
            return None
        workers = tuple(member.status(self._state) for member in self._members)
        events, machines = tuple(self._events_seen), self.machines()
        return replace(
            self._record, workers=workers, state=self._state, events=events, machines=machines
        )

    def _add_event(self, member: _Member, event: EventKind) -> None:
        error = "" if event == "started" else member.failure
        self._events_seen.append(Event(round(time.time(), 3), member.name, event, error))

    def _on_signal(self, number: int, _frame: Any) -> None:
        """SIGINT, SIGTERM and SIGHUP end the run in order; a second one ends it at once. SIGHUP is
        never a second one: a terminal that is closed brings several, and perhaps a SIGTERM."""
        again = number != signal.SIGHUP and self._interrupted
        self._interrupted = self._interrupted or number != signal.SIGHUP
        self.stop(signal.Signals(number).name, at_once=again)


class _Member:
    """A worker, and what became of it so far."""

    def __init__(self, worker: Worker, node: Node, machine: JoinedNode | None = None) -> None:
        self.worker, self.name, self.node, self.machine = worker, worker.name, node, machine
        self.budget = machine.name if machine else worker.name
        self.restarts = 0
        self.failure = ""
        self.env_failures = self.health().failures  # those before this supervisor are known
        self.running: RunningWorker = _NotStarted()
        self._started = 0.0

    @property
    def alive(self) -> bool:
        return self.running.wait(0) is None

    @property
    def log_file(self) -> Path:
        return self.node.log_file(self.worker)

    def health(self) -> HealthRecord:
        record = self.worker.health
        if record is None:
            return HealthRecord()
        return read_health(record) if isinstance(record, Path) else record()

    def start(self) -> RunningWorker:
        try:
            if isinstance(self.worker.health, Path):
                Health(self.worker.health)  # clears what its predecessor was doing
            self.running = self.node.start(self.worker)
        except OSError as error:  # no memory, no more processes, a full disk
            self.running = _NotStarted(error)
        self._started = time.time()
        return self.running

    def end(self) -> bool:
        """Kill it if it has not ended by itself; returns whether it had."""
        if not self.alive:
            return True
        self.running.kill()
        self.running.wait()
        return False

    def failed_to_end(self) -> str:
        """How it has failed instead of ending in order; empty if it has not."""
        code = self.running.wait(0)
        # A process that was just starting is ended by our signal, or by that of a scheduler.
        if code in (0, STOPPED, *_ASKED) or code is None:
            return ""
        return self.describe_exit(code)

    def output(self) -> str:
        try:
            return self.running.output()
        except OSError as error:  # its log cannot be read
            return str(error)

    def describe_exit(self, code: int) -> str:
        """How it ended, with one line on why, if it has said it."""
        how = f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}"
        reason = self._reason(code)
        self.failure = reason or how
        return f"{how} ({reason})" if reason else how

    def _reason(self, code: int) -> str:
        """Its exception, or that it hung; empty if it did not say."""
        if code < 0:
            return str(self.running.error or "")[:_REASON_LENGTH]
        folder = self.log_file.parent
        with suppress(OSError):
            if shutil.disk_usage(folder).free < _FULL:  # it could not even write why
                return f"the disk of {folder} is full: make room, and the run continues"
        lines = self.output().splitlines()
        if hung := next((line for line in reversed(lines) if line.startswith(_HUNG)), None):
            health = self.health()
            who = f"{health.doing} environment {health.envid}"
            who = "it" if health.doing == "waiting" else who
            return f"{who} hung for {hung.removeprefix(_HUNG).rstrip(')!')}"
        if not any(line.startswith("Traceback") for line in lines):
            return ""
        return [line for line in lines if line[:1].strip()][-1][:_REASON_LENGTH]

    def status(self, fleet: RunState) -> WorkerStatus:
        running = self.running if self.alive else _NotStarted()
        state: WorkerState = "restarting" if self.restarts else "starting"
        if running.pid:
            state = "running"
        elif fleet != "running":
            state = "ended"
        return WorkerStatus(
            name=self.name,
            role=self.worker.role,
            state=state,
            pid=running.pid or None,
            host=running.host,
            started=self._started,
            restarts=self.restarts,
            error=self.failure,
        )


class _NotStarted(ReportedWorker):
    """A worker that was not started, or that could not be, which is a failure like any other."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self.error = error
        self.end(int(error is not None))


class Failures:
    """The failures of workers that have made no progress since: a run survives a crash a day, and
    one that fails at every start ends soon."""

    def __init__(self) -> None:
        self._failures: list[tuple[str, str]] = []  # who, and the error
        self._progress: dict[str, int] = {}

    def add(self, name: str, error: str, policy: RestartPolicy, progress: int = 0) -> float:
        """Seconds until the worker that failed is started again. Progress is a number that has
        risen since its last failure if it has made some.

        Raises:
            FleetError: It has failed too often; shows the first error of any worker that is not
                forgiven yet, because one failure often brings others along.
        """
        if progress > self._progress.get(name, 0):
            self._failures = [each for each in self._failures if each[0] != name]
        self._progress[name] = progress
        count = sum(who == name for who, _ in self._failures)
        self._failures.append((name, error))
        if count >= policy.max_restarts:
            raise FleetError(
                f"{name} failed again after {count} restarts without progress in between "
                f"(max_restarts is {policy.max_restarts}). The first error was: "
                f"{self._failures[0][1]}"
            )
        return backoff(count)
