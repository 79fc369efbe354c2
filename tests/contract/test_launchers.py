"""What every launcher has to do."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from fleet_parts import until_stopped
from launcher_parts import (
    LONG,
    appears,
    count_starts,
    fail,
    fail_once,
    ignore_the_request,
    leave_a_child,
    note_blocked_signals,
    note_end,
    note_variable,
    save_when_stopped,
    write,
)

from dreamfleet.errors import ConfigError
from dreamfleet.fleet.launchers import LAUNCHERS, Launcher, RestartPolicy, Worker, find_launcher
from dreamfleet.fleet.record import read_record
from dreamfleet.fleet.supervisor import FleetError, Supervisor
from dreamfleet.roles.runtime import STOPPED

# Ray starts its processes by forking, of which JAX warns if it was imported before.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


@pytest.fixture(params=sorted(LAUNCHERS))
def launcher(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launcher]:
    if request.param == "ray":
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_cluster").address)
    with find_launcher(request.param)(tmp_path) as made:
        yield made


def worker(name: str, function: Callable[[], Any], **options: Any) -> Worker:
    return Worker(name, "env", function, **options)


def start(launcher: Launcher, function: Callable[[], Any]) -> Any:
    one = worker("env-0", function)
    launcher.prepare([one])
    return launcher.start(one)


def test_a_function_that_returns_ends_with_code_0(launcher: Launcher, tmp_path: Path) -> None:
    running = start(launcher, partial(write, tmp_path / "done", "yes"))
    assert running.wait(LONG) == 0
    assert running.pid > 0  # before, it may wait for a machine
    assert running.host
    assert (tmp_path / "done").read_text() == "yes"


def test_a_function_that_raises_shows_its_traceback(launcher: Launcher) -> None:
    running = start(launcher, partial(fail, "the pole is broken"))
    assert running.wait(LONG) == 1
    assert "Traceback" in running.output()
    assert "RuntimeError: the pole is broken" in running.output()


def test_a_worker_that_is_asked_to_stop_saves_first(launcher: Launcher, tmp_path: Path) -> None:
    started, saved = tmp_path / "started", tmp_path / "saved"
    running = start(launcher, partial(save_when_stopped, started, saved))
    assert appears(started)
    assert running.wait(0) is None
    running.terminate()
    assert running.wait(LONG) == STOPPED
    assert saved.read_text() == "saved"
    running.terminate()  # does nothing to one that has ended
    running.kill()


def test_a_worker_that_does_not_stop_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    started, over = tmp_path / "started", tmp_path / "over"
    running = start(launcher, partial(ignore_the_request, started, over))
    assert appears(started)
    running.terminate()
    assert running.wait(0.05) is None
    running.kill()
    code = running.wait(LONG)
    assert code is not None
    assert code < 0
    over.touch()  # a thread cannot be killed, and must not outlive its test
    for thread in threading.enumerate():
        if thread.name == "env-0":
            thread.join(LONG)


def test_output_is_that_of_the_last_start_only(launcher: Launcher) -> None:
    one = worker("env-0", partial(fail, "the second time"))
    path = launcher.log_file(one)
    path.write_text("RuntimeError: an older start\n")
    launcher.prepare([one])
    running = launcher.start(one)
    assert running.wait(LONG) == 1
    assert "the second time" in running.output()
    assert "an older start" not in running.output()


def test_supervised_worker_that_fails_is_started_again(launcher: Launcher, tmp_path: Path) -> None:
    lines: list[str] = []
    leader = Worker(
        "agent",
        "agent",
        partial(fail_once, tmp_path / "mark"),
        restart=RestartPolicy(),
        ends_run=True,
    )
    other = worker("env-0", until_stopped)
    Supervisor([leader, other], launcher, logdir=tmp_path, say=lines.append).run()
    assert [line.split()[0] for line in lines if "is started again" in line] == ["agent"]
    assert "(RuntimeError: out of coffee)" in lines[0]
    record = read_record(tmp_path)
    assert record.state == "ended"
    assert [(w.name, w.state, w.restarts) for w in record.workers] == [
        ("agent", "ended", 1),
        ("env-0", "ended", 0),
    ]
    assert "out of coffee" in record.workers[0].error


def test_a_worker_that_returns_without_being_asked_is_started_again(
    launcher: Launcher, tmp_path: Path
) -> None:
    """An environment that ends by itself is not the end of the run, whatever its exit code is."""
    counts, go = tmp_path / "counts", tmp_path / "go"
    leader = Worker("agent", "agent", partial(appears, go), ends_run=True)
    other = worker("env-0", partial(count_starts, counts, go, 3))
    Supervisor([leader, other], launcher).run()
    assert counts.read_text() == "xxx"


def test_failure_may_end_the_run_and_says_whose_it_was(launcher: Launcher, tmp_path: Path) -> None:
    stop = RestartPolicy(on_failure="stop")
    leader = Worker("agent", "agent", until_stopped, restart=stop, ends_run=True)
    broken = worker("env-0", partial(fail, "out of coffee"), restart=stop)
    with pytest.raises(FleetError, match="env-0 ended with code 1") as error:
        Supervisor([leader, broken], launcher, logdir=tmp_path).run()
    assert "RuntimeError: out of coffee" in str(error.value)
    record = read_record(tmp_path)
    assert record.state == "failed"
    assert {w.state for w in record.workers} == {"ended"}


def test_roles_stop_one_after_the_other(launcher: Launcher, tmp_path: Path) -> None:
    """The agent may need the replay, and the replay the logger, until their own end."""
    order = tmp_path / "order"

    names = [("agent", "agent"), ("env-0", "env"), ("env-1", "env"), ("replay", "replay")]
    workers = [
        Worker(name, role, partial(note_end, order, tmp_path / f"{name}-started", name))  # type: ignore[arg-type]
        for name, role in names
    ]
    supervisor = Supervisor(workers, launcher)

    def stop_when_all_run() -> None:
        if all((tmp_path / f"{name}-started").exists() for name, _ in names):
            supervisor.stop()

    supervisor.run(stop_when_all_run, every=0.05)
    ended = order.read_text().split()
    assert ended[0] == "agent"
    assert set(ended[1:3]) == {"env-0", "env-1"}
    assert ended[3] == "replay"


def test_an_unknown_launcher_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="did you mean 'local'"):
        find_launcher("lokal")


def test_processes_and_threads_are_what_they_say(tmp_path: Path) -> None:
    with find_launcher("local")(tmp_path) as local, find_launcher("serial")(tmp_path) as serial:
        process, thread = start(local, int), start(serial, int)
        assert process.pid != os.getpid()
        assert thread.pid == os.getpid()
        assert process.wait(LONG) == thread.wait(LONG) == 0


def test_a_process_gets_its_environment_variables(tmp_path: Path) -> None:
    """Threads share theirs, which the serial launcher says."""
    one = worker("env-0", partial(note_variable, "OF_THE_WORKER", tmp_path / "value"))
    one = replace(one, environment={"OF_THE_WORKER": "yes"})
    with find_launcher("local")(tmp_path) as launcher:
        launcher.prepare([one])
        assert launcher.start(one).wait(LONG) == 0
    assert (tmp_path / "value").read_text() == "yes"
    assert "OF_THE_WORKER" not in os.environ


def test_a_process_can_be_interrupted_also_where_its_parent_ignores_it(tmp_path: Path) -> None:
    """Ray blocks SIGINT in its processes, and what they start has that from them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with find_launcher("local")(tmp_path) as launcher:
            running = start(launcher, partial(note_blocked_signals, tmp_path / "blocked"))
            assert running.wait(LONG) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (tmp_path / "blocked").read_text() == "set()"


def test_children_of_a_process_that_died_go_too(tmp_path: Path) -> None:
    with find_launcher("local")(tmp_path) as launcher:
        running = start(launcher, partial(leave_a_child, tmp_path / "child"))
        assert running.wait(LONG) == 1
    pid = int((tmp_path / "child").read_text())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(LONG)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
