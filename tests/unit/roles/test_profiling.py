"""`profile`: every worker writes where its threads were."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import small_run

from dreamfleet.fleet.workers import fleet_workers
from dreamfleet.roles import profiling
from dreamfleet.roles.profiling import how_to_look, profile_folder, profiled
from dreamfleet.roles.runtime import Factories


class Looked:
    """A role that runs until it was looked at so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen = threading.Semaphore(0)
        look = profiling.Sampler.look

        def counted(sampler: Any) -> None:
            look(sampler)
            self._seen.release()

        monkeypatch.setattr(profiling.Sampler, "look", counted)

    def stand_still(self, times: int) -> None:
        for _ in range(times):
            assert self._seen.acquire(timeout=120)


def test_all_threads_are_seen_by_the_functions_that_they_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, done = Looked(monkeypatch), threading.Event()

    def wait_beside() -> None:
        done.wait(120)

    def role() -> None:
        thread = threading.Thread(target=wait_beside, name="helper")
        thread.start()
        looked.stand_still(20)
        done.set()
        thread.join()

    args = small_run(tmp_path)
    profiled(role, "env-0", args)
    text = (profile_folder(args) / "env-0.txt").read_text()
    assert "s on a processor" in text
    assert "wait_beside (roles/test_profiling.py:" in text
    assert "stand_still (roles/test_profiling.py:" in text
    folded = (profile_folder(args) / "env-0.folded").read_text().splitlines()
    (helper, *_) = [line for line in folded if line.startswith("helper;") and "Event.wait" in line]
    assert helper.index("wait_beside") < helper.index("Event.wait"), "the outermost first"
    assert sum(int(line.rpartition(" ")[2]) for line in folded) >= 20
    assert str(profile_folder(args)) in how_to_look(args)


def test_a_role_that_fails_leaves_its_profile_and_its_error(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        profiled(fail, "logger", small_run(tmp_path))
    assert (tmp_path / "profile" / "logger.txt").exists()


def test_every_worker_of_a_run_is_profiled_if_that_is_wanted(tmp_path: Path) -> None:
    def make(*_: Any) -> None: ...

    plain = fleet_workers(Factories(*(make,) * 7), small_run(tmp_path, eval_every=10))
    wanted = fleet_workers(
        Factories(*(make,) * 7), small_run(tmp_path, eval_every=10, profile=True)
    )
    assert [worker.name for worker in wanted] == [worker.name for worker in plain]
    for worker in wanted:
        assert isinstance(worker.function, partial)
        assert worker.function.func is profiled
        assert worker.function.args[1] == worker.name
    assert not any(getattr(worker.function, "func", None) is profiled for worker in plain)
