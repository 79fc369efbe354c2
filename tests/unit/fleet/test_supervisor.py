"""The supervisor's policy: when a run ends, and how often a worker may fail."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_parts import until_stopped
from launcher_parts import ignore_the_request

from dreamfleet.fleet import status_writer, supervisor
from dreamfleet.fleet.launchers import (
    Launcher,
    RestartPolicy,
    RunningWorker,
    Worker,
    find_launcher,
)
from dreamfleet.fleet.record import MAX_EVENTS, Event, RunStatus, read_record, write_record
from dreamfleet.fleet.supervisor import Failures, FleetError, Supervisor
from dreamfleet.roles.health import Health


def test_a_run_ends_after_its_duration(tmp_path: Path) -> None:
    workers = [Worker("agent", "agent", until_stopped), Worker("replay", "replay", until_stopped)]
    begin = time.monotonic()
    with find_launcher("serial")(tmp_path) as launcher:
        Supervisor(workers, launcher, duration=0.5).run()
    assert time.monotonic() - begin >= 0.5


def test_a_signal_in_the_middle_of_a_line_ends_the_run_in_order(tmp_path: Path) -> None:
    """What writes lines cannot be called again while it writes one."""
    lines: list[str] = []
    writing = threading.Lock()

    def say(line: str) -> None:
        assert writing.acquire(blocking=False), "called while it writes a line"
        if not lines:
            os.kill(os.getpid(), signal.SIGINT)
        lines.append(line)
        writing.release()

    with find_launcher("serial")(tmp_path) as launcher:
        running = Supervisor([Worker("agent", "agent", until_stopped)], launcher, say=say)
        with pytest.raises(KeyboardInterrupt):
            running.run(lambda: say("interrupt"), every=0.1)
    assert "Saving and ending; a second signal ends at once." in lines


@pytest.fixture
def hangup() -> Iterator[Callable[[Any], None]]:
    """Sets what SIGHUP does before the run."""
    before = signal.getsignal(signal.SIGHUP)
    yield partial(signal.signal, signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("more", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_ends_the_run_in_order_also_if_another_signal_follows(
    tmp_path: Path, hangup: Callable[[Any], None], more: signal.Signals
) -> None:
    """The kernel and the shell both send SIGHUP, and systemd sends it with SIGTERM."""
    ended: list[str] = []

    def agent() -> None:
        until_stopped()
        os.kill(os.getpid(), more)
        ended.append("agent")

    hangup(lambda *_: ended.append("too late"))
    with find_launcher("serial")(tmp_path) as launcher:
        running = Supervisor([Worker("agent", "agent", agent)], launcher, duration=20.0)
        with pytest.raises(KeyboardInterrupt):
            running.run(lambda: os.kill(os.getpid(), signal.SIGHUP), every=0.1)
    assert ended == ["agent"]
    assert not running._at_once


def test_nohup_keeps_a_run_going(tmp_path: Path, hangup: Callable[[Any], None]) -> None:
    heard = threading.Semaphore(0)

    def tick() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        heard.release()

    def agent() -> None:
        for _ in range(3):
            assert heard.acquire(timeout=60)

    hangup(signal.SIG_IGN)
    with find_launcher("serial")(tmp_path) as launcher:
        worker = Worker("agent", "agent", agent, ends_run=True)
        Supervisor([worker], launcher).run(tick, every=0.01)


def test_the_delay_doubles_up_to_half_a_minute() -> None:
    failures = Failures()
    delays = [failures.add("env-0", "", RestartPolicy()) for _ in range(9)]
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert failures.add("env-1", "", RestartPolicy()) == 0, "each worker has its own count"


def test_a_worker_that_makes_progress_may_fail_for_ever_and_is_always_mended_at_once() -> None:
    failures = Failures()
    for progress in range(31):
        assert failures.add("agent", "bad luck", RestartPolicy(max_restarts=2), progress + 1) == 0


def test_too_many_without_progress_end_the_run_with_the_first_error_that_is_not_forgiven() -> None:
    policy = RestartPolicy(max_restarts=2)
    failures = Failures()
    failures.add("agent", "long ago and forgiven", policy, 1)
    failures.add("replay", "the disk is broken", policy, 7)
    assert failures.add("agent", "the replay is gone", policy, 2) == 0
    assert failures.add("agent", "the replay is gone again", policy, 2) == 0.5
    words = "agent failed again after 2 restarts without progress .*max_restarts is 2"
    with pytest.raises(FleetError, match=words) as error:
        failures.add("agent", "and again", policy, 2)
    assert "The first error was: the disk is broken" in str(error.value)


def test_every_failure_is_recorded_also_one_that_is_mended_at_once_or_ends_the_run(
    tmp_path: Path,
) -> None:
    before = tuple(Event(float(n), "env-0", "failed") for n in range(MAX_EVENTS))
    write_record(tmp_path, replace(RunStatus.of_this_process(), events=before))
    leader = Worker("agent", "agent", until_stopped, ends_run=True)
    replay = Worker("replay", "replay", until_stopped, restart=RestartPolicy(max_restarts=2))
    with find_launcher("serial")(tmp_path) as launcher:
        room: Any = NoRoom(launcher, "replay", -1)
        with pytest.raises(FleetError):
            Supervisor([leader, replay], room, logdir=tmp_path).run()
    record = read_record(tmp_path)
    assert record is not None
    events = [(each.worker, each.event, each.error) for each in record.events[-5:]]
    failed = ("replay", "failed", "OSError: [Errno 12] Cannot allocate memory")
    started = ("replay", "started", "")
    assert events == [failed, started, failed, started, failed]
    assert len(record.events) == MAX_EVENTS, "those of before are kept, and the list is bounded"
    assert record.events[0].time == 5.0


def noted_failures(path: Path, seen: list[str]) -> None:
    """An environment worker whose environments failed, and then one that gives up."""
    health = Health(path)
    health.failed("environment 3: RuntimeError: the pole is broken")
    health.failed("environment 3: RuntimeError: the pole is broken")
    while not seen:
        threading.Event().wait(0.01)
    health.give_up()
    raise RuntimeError("failed too often")


def test_a_failing_environment_is_told_once_and_a_worker_that_gives_up_ends_the_run(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    health = tmp_path / "workers" / "env-0"
    leader = Worker("agent", "agent", until_stopped, ends_run=True)
    broken = Worker("env-0", "env", partial(noted_failures, health, lines), health=health)
    with find_launcher("serial")(tmp_path) as launcher:
        supervisor = Supervisor([leader, broken], launcher, logdir=tmp_path, say=lines.append)
        with pytest.raises(FleetError, match="failed too often"):
            supervisor.run(every=0.05)
    [line] = lines  # and it was not started again
    assert line.startswith("A failure: environment 3: RuntimeError: the pole is broken. Its")
    assert str(tmp_path / "logs" / "serial.log") in line
    record = read_record(tmp_path)
    assert record is not None
    assert record.workers[1].restarts == 0
    assert [each.event for each in record.events] == ["environment failed", "failed"]


def test_a_record_that_cannot_be_written_keeps_nobody_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the run goes through its start and its orderly end all the same."""
    saved: list[str] = []

    def save_when_stopped() -> None:
        until_stopped()
        saved.append("replay")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status_writer, "write_record", full)
    leader = Worker("agent", "agent", lambda: saved.append("agent"), ends_run=True)
    with find_launcher("serial")(tmp_path) as launcher:
        Supervisor(
            [leader, Worker("replay", "replay", save_when_stopped)], launcher, logdir=tmp_path
        ).run()
    assert saved == ["agent", "replay"]


def test_a_record_is_written_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nothing changes any more: else it would name processes that are long gone."""
    attempts: list[RunStatus] = []
    written = threading.Event()

    def full_at_first(logdir: Path, record: RunStatus) -> None:
        attempts.append(record)
        if len(attempts) <= 2:
            raise OSError(28, "No space left on device")
        written.set()

    monkeypatch.setattr(status_writer, "write_record", full_at_first)
    monkeypatch.setattr(status_writer, "_WRITE_SECONDS", 0.01)
    leader = Worker("agent", "agent", lambda: written.wait(120), ends_run=True)
    replay = Worker("replay", "replay", until_stopped)
    with find_launcher("serial")(tmp_path) as launcher:
        Supervisor([leader, replay], launcher, logdir=tmp_path).run()
    assert {worker.state for worker in attempts[2].workers} == {"running"}


class NoRoom:
    """A launcher that cannot start a worker of this name, some times."""

    def __init__(self, launcher: Launcher, name: str, times: int) -> None:
        self._launcher, self._name, self._left = launcher, name, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)

    def start(self, worker: Worker) -> RunningWorker:
        if worker.name == self._name and self._left:
            self._left -= 1
            raise OSError(12, "Cannot allocate memory")
        return self._launcher.start(worker)


def test_a_worker_that_cannot_be_started_has_failed_and_is_tried_again(tmp_path: Path) -> None:
    there = threading.Event()
    lines: list[str] = []

    def serve() -> None:
        there.set()
        until_stopped()

    def wait_for_it() -> None:
        assert there.wait(120)

    leader = Worker("agent", "agent", wait_for_it, ends_run=True)
    replay = Worker("replay", "replay", serve)
    with find_launcher("serial")(tmp_path) as launcher:
        room: Any = NoRoom(launcher, "replay", 2)
        Supervisor([leader, replay], room, logdir=tmp_path, say=lines.append).run()
    assert there.is_set()
    assert [line.partition(" and is started again")[0] for line in lines] == [
        "replay ended with code 1 (OSError: [Errno 12] Cannot allocate memory)"
    ] * 2


def test_a_worker_that_can_never_be_started_ends_the_run(tmp_path: Path) -> None:
    leader = Worker("agent", "agent", until_stopped, ends_run=True)
    replay = Worker("replay", "replay", until_stopped, restart=RestartPolicy(max_restarts=1))
    with find_launcher("serial")(tmp_path) as launcher:
        room: Any = NoRoom(launcher, "replay", -1)
        with pytest.raises(FleetError, match=r"(?s)failed again.*Cannot allocate memory"):
            Supervisor([leader, replay], room, logdir=tmp_path).run()


def test_a_full_disk_is_the_reason_when_workers_cannot_write_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    leader = Worker("agent", "agent", until_stopped, ends_run=True)
    replay = Worker("replay", "replay", until_stopped, restart=RestartPolicy(max_restarts=1))
    lines: list[str] = []
    words = r"the disk of \S+ is full: make room, and the run continues"
    with find_launcher("serial")(tmp_path) as launcher:
        room: Any = NoRoom(launcher, "replay", -1)
        with pytest.raises(FleetError, match=words):
            Supervisor([leader, replay], room, logdir=tmp_path, say=lines.append).run()
    assert re.search(words, lines[0])


def test_no_worker_is_restarted_while_the_run_ends(tmp_path: Path) -> None:
    fail, failed, starts = threading.Event(), threading.Event(), list[str]()

    def serve() -> None:
        starts.append("replay")
        assert fail.wait(120)
        failed.set()
        raise RuntimeError("the disk is broken")

    def save() -> None:
        until_stopped()
        fail.set()
        assert failed.wait(120)

    leader = Worker("agent", "agent", save, ends_run=True)
    with find_launcher("serial")(tmp_path) as launcher:
        Supervisor([leader, Worker("replay", "replay", serve)], launcher, duration=0.2).run()
    assert starts == ["replay"]


def test_a_worker_that_fails_when_it_is_to_stop_is_told_of(tmp_path: Path) -> None:
    def fail() -> None:
        until_stopped()
        raise RuntimeError("nothing is saved")

    lines: list[str] = []
    with find_launcher("serial")(tmp_path) as launcher:
        leader = Worker("agent", "agent", fail, ends_run=True)
        Supervisor([leader], launcher, duration=0.2, say=lines.append).run()
    [line] = lines
    assert line.startswith("agent ended with code 1 (RuntimeError: nothing is saved) while it was")


@pytest.mark.parametrize("gets_on", [True, False])
def test_an_end_that_gets_on_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gets_on: bool
) -> None:
    """A busy machine may need longer than a quiet one; seconds are made up here."""
    now, looks, lines = [0.0], [0], list[str]()
    path = tmp_path / "workers" / "agent"
    read = supervisor.read_health

    def look(path: Path) -> Any:
        looks[0] += 1
        return read(path)

    def save_slowly() -> None:
        health = Health(path)
        until_stopped()
        while now[0] < 2 * supervisor._SAVE_SECONDS:
            if gets_on:
                health.progress()
            seen = looks[0]
            while looks[0] < seen + 2 and not lines:
                threading.Event().wait(0.001)
            now[0] += supervisor._SAVE_SECONDS / 2

    monkeypatch.setattr(supervisor, "read_health", look)
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.01)
    with find_launcher("serial")(tmp_path) as launcher:
        leader = Worker("agent", "agent", save_slowly, ends_run=True, health=path)
        watching = Supervisor([leader], launcher, say=lines.append)
        monkeypatch.setattr(
            supervisor, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time)
        )
        watching.stop()
        watching.run()
    assert any("agent did not stop within" in line for line in lines) != gets_on


def test_a_second_signal_kills_a_worker_that_does_not_stop(tmp_path: Path) -> None:
    started, lines = tmp_path / "started", list[str]()

    def say(line: str) -> None:
        lines.append(line)
        os.kill(os.getpid(), signal.SIGINT)

    def interrupt() -> None:
        if started.exists():
            os.kill(os.getpid(), signal.SIGINT)

    stubborn = Worker("env-0", "env", partial(ignore_the_request, started, tmp_path / "over"))
    with find_launcher("local")(tmp_path) as launcher, pytest.raises(KeyboardInterrupt):
        Supervisor([stubborn], launcher, say=say).run(interrupt, every=0.05)
    assert lines == ["Saving and ending; a second signal ends at once."]
