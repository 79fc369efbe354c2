"""Watches the processes of a fleet, and ends all of them together."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dreamfleet.fleet.errors import FleetError
from dreamfleet.fleet.process import Process
from dreamfleet.fleet.record import FleetRecord, FleetState, WorkerRecord, write_record
from dreamfleet.fleet.restarts import Restarts

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Says nothing."""
    del line


_SAVE_SECONDS = 90.0
_FAILED_SECONDS = 20.0
_END_SECONDS = 20.0


@dataclass(frozen=True)
class _Exited:
    process: Process
    code: int


@dataclass(frozen=True)
class _Restart:
    process: Process


@dataclass(frozen=True)
class _Stop:
    reason: str


class Supervisor:
    """Runs a fleet until its leading process has ended well.

    Processes are ended in the order they are given: whoever comes earlier may still need those
    that come later.

    Args:
        processes: In the order in which they end; the first one leads. When it returns, the run is
            over.
        on_failure: Whether a process that fails ends the run, or is started again after a while
            that doubles each time.
        max_restarts: Restarts of one process within `restart_window` seconds after which the run
            ends all the same.
        restart_window: Seconds after which a restart is forgotten.
        duration: Seconds after which the run is ended; 0 for never.
        say: Takes lines for the person.
        logdir: Where the record of the fleet is written; None for nowhere.
        launcher: What the record says about who started the processes.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        *,
        on_failure: Literal["restart", "stop"] = "stop",
        max_restarts: int = 10,
        restart_window: float = 3600.0,
        duration: float = 0.0,
        say: Say = silent,
        logdir: Path | None = None,
        launcher: str = "",
    ) -> None:
        self._processes = list(processes)
        self._on_failure = on_failure
        self._restarts = Restarts(max_restarts, restart_window)
        self._duration, self._say = duration, say
        self._events: queue.SimpleQueue[_Exited | _Restart | _Stop] = queue.SimpleQueue()
        self._record = FleetRecord.of_this_process(launcher)
        self._logdir = logdir

    def run(self, tick: Callable[[], None] = lambda: None, every: float = 10.0) -> None:
        """Start everything and return when the run is over and every process has ended.

        Args:
            tick: Called every so often, to show progress.
            every: Seconds between two ticks.

        Raises:
            FleetError: A process failed, and the run ended because of it.
            KeyboardInterrupt: The person ended the run; everything is saved.
        """
        patience = _FAILED_SECONDS
        with self._signals():
            try:
                for process in reversed(self._processes):
                    self._start(process)
                stopped = self._watch(tick, every)
                patience = _SAVE_SECONDS
            finally:
                self._write_record("ending")
                self._end(patience)
                self._write_record("failed" if patience == _FAILED_SECONDS else "ended")
        if stopped in ("SIGINT", "SIGTERM"):
            raise KeyboardInterrupt

    def stop(self, reason: str = "stop") -> None:
        """End the run in an orderly way; may be called from any thread and from signals."""
        self._events.put(_Stop(reason))

    def _watch(self, tick: Callable[[], None], every: float) -> str:
        end = time.monotonic() + self._duration if self._duration else float("inf")
        next_tick = time.monotonic() + every
        while True:
            now = time.monotonic()
            if now >= end:
                return "duration"
            if now >= next_tick:
                next_tick = now + every
                tick()
            try:
                event = self._events.get(timeout=max(0.0, min(end, next_tick) - now))
            except queue.Empty:
                continue
            if isinstance(event, _Stop):
                return event.reason
            if isinstance(event, _Restart):
                self._start(event.process)
            elif event.process is self._processes[0] and event.code == 0:
                return "done"
            else:
                self._on_exit(event.process, event.code)

    def _on_exit(self, process: Process, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        error = f"{process.name} {how}. The end of {process.log_file}:\n{process.last_words()}"
        reason = process.reason() if code > 0 else ""
        process.failure = reason or how
        if self._on_failure == "stop":
            raise FleetError(error) from process.error
        delay = self._restarts.after(process.name, error)
        self._say(
            f"{process.name} {how}{f' ({reason})' if reason else ''} and is started again in "
            f"{delay:g} s; see {process.log_file}"
        )
        process.restarts += 1
        self._write_record()
        timer = threading.Timer(delay, self._events.put, [_Restart(process)])
        timer.daemon = True
        timer.start()

    def _start(self, process: Process) -> None:
        process.start()
        process.started = time.time()
        self._write_record()

        def wait() -> None:
            code = process.wait()
            assert code is not None
            self._events.put(_Exited(process, code))

        threading.Thread(target=wait, name=f"wait-{process.name}", daemon=True).start()

    def _write_record(self, state: FleetState = "running") -> None:
        if self._logdir is None:
            return
        host = self._record.host
        workers = tuple(
            WorkerRecord(
                name=each.name,
                role=each.name.split("-")[0],
                state=each.state if state == "running" or each.alive else "ended",
                pid=each.pid if each.alive else None,
                host=host,
                started=each.started,
                restarts=each.restarts,
                error=each.failure,
            )
            for each in self._processes
        )
        write_record(self._logdir, replace(self._record, workers=workers, state=state))

    def _end(self, patience: float) -> None:
        """Ask the leader first, so that it hands over and saves while the others still serve. After
        a failure one of them may be gone for good, so it is not waited for as long."""
        leader, *others = self._processes
        _end_all([leader], patience)
        roles: dict[str, list[Process]] = {}
        for process in others:
            roles.setdefault(process.name.split("-")[0], []).append(process)
        for group in roles.values():
            _end_all(group, _END_SECONDS)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run in an orderly way; a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        seen: list[str] = []

        def handle(number: int, _frame: Any) -> None:
            name = signal.Signals(number).name
            if seen:
                for process in self._processes:
                    process.kill()
            else:
                self._say("Saving and ending; once more ends at once.")
            seen.append(name)
            self.stop(name)

        old = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in old.items():
                signal.signal(each, handler)


def _end_all(processes: Sequence[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.terminate()
    for process in processes:
        if process.alive and process.wait(max(0.0, deadline - time.monotonic())) is None:
            process.kill()
            process.wait()
