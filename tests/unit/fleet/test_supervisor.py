"""The supervisor alone, with processes that do next to nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fleet_parts import until_stopped

from dreamfleet.fleet import FleetError, Process, Supervisor


def test_a_run_ends_after_its_duration(tmp_path: Path) -> None:
    processes = [Process(name, until_stopped, tmp_path) for name in ("agent", "replay")]
    begin = time.monotonic()
    Supervisor(processes, duration=0.5).run()
    assert time.monotonic() - begin >= 0.5
    assert not any(process.alive for process in processes)


def test_the_run_is_over_when_the_leader_returns(tmp_path: Path) -> None:
    processes = [
        Process("agent", lambda: None, tmp_path),
        Process("env-0", until_stopped, tmp_path),
    ]
    Supervisor(processes).run()
    assert not any(process.alive for process in processes)


def test_a_failure_shows_the_traceback_of_this_life_only(tmp_path: Path) -> None:
    (tmp_path / "env-0.log").write_text("an older life")

    def fail() -> None:
        raise RuntimeError("out of coffee")

    processes = [Process("agent", until_stopped, tmp_path), Process("env-0", fail, tmp_path)]
    with pytest.raises(FleetError, match="env-0 ended with code 1") as error:
        Supervisor(processes, on_failure="stop").run()
    assert "RuntimeError: out of coffee" in str(error.value)
    assert "an older life" not in str(error.value)
    assert not any(process.alive for process in processes)
