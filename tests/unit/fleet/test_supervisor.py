"""The supervisor's policy: when a run ends, and how often a worker may fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fleet_parts import until_stopped

from dreamfleet.fleet import supervisor
from dreamfleet.fleet.launchers import RestartPolicy, Worker, find_launcher
from dreamfleet.fleet.supervisor import Failures, FleetError, Supervisor

DAY = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_run_ends_after_its_duration(tmp_path: Path) -> None:
    workers = [Worker("agent", "agent", until_stopped), Worker("replay", "replay", until_stopped)]
    begin = time.monotonic()
    with find_launcher("serial")(tmp_path) as launcher:
        Supervisor(workers, launcher, duration=0.5).run()
    assert time.monotonic() - begin >= 0.5


def test_the_delay_doubles_up_to_half_a_minute() -> None:
    failures = Failures(Clock())
    delays = [failures.add("env-0", "", RestartPolicy()) for _ in range(9)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert failures.add("env-1", "", RestartPolicy()) == 0.5, "each worker has its own count"


def test_a_crash_a_day_never_ends_a_run_and_is_always_mended_at_once() -> None:
    clock = Clock()
    failures = Failures(clock)
    for day in range(31):
        clock.now = day * DAY
        assert failures.add("agent", "out of luck", RestartPolicy(max_restarts=2)) == 0.5


def test_too_many_in_a_while_end_the_run_with_the_first_error_of_that_while() -> None:
    clock, policy = Clock(), RestartPolicy(max_restarts=2)
    failures = Failures(clock)
    failures.add("env-0", "long ago and forgotten", policy)
    clock.now = DAY
    failures.add("replay", "the disk is broken", policy)
    failures.add("agent", "the replay is gone", policy)
    failures.add("agent", "the replay is gone again", policy)
    with pytest.raises(FleetError, match="agent failed again after 2 restarts") as error:
        failures.add("agent", "and again", policy)
    assert "The first error was: the disk is broken" in str(error.value)


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

    monkeypatch.setattr(supervisor, "write_record", full)
    leader = Worker("agent", "agent", lambda: saved.append("agent"), ends_run=True)
    with find_launcher("serial")(tmp_path) as launcher:
        Supervisor(
            [leader, Worker("replay", "replay", save_when_stopped)], launcher, logdir=tmp_path
        ).run()
    assert saved == ["agent", "replay"]
