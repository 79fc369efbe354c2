"""What a process of the local launcher is given."""

import resource
import signal
from functools import partial
from pathlib import Path

import psutil
from launcher_parts import LONG, appears, note_files, save_when_stopped, write_much

from dreamfleet.fleet.launchers import Worker
from dreamfleet.fleet.launchers.local import LocalLauncher, bound_log
from dreamfleet.roles.runtime import STOPPED


def test_launcher_and_worker_may_open_as_many_files_as_the_machine_allows(tmp_path: Path) -> None:
    """A shell often allows 1,024; a thousand environments are as many pipes or connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    worker = Worker("agent", "agent", partial(note_files, tmp_path / "files"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2 if hard > 0 else 1024, hard))
    try:
        with LocalLauncher(tmp_path) as launcher:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
            launcher.prepare([worker])
            assert launcher.start(worker).wait(LONG) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert int((tmp_path / "files").read_text()) == hard


def test_the_log_of_a_chatty_worker_stays_small(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "env-0.log"
    worker = Worker("env-0", "env", partial(write_much, log))
    with LocalLauncher(tmp_path) as launcher:
        launcher.prepare([worker])
        running = launcher.start(worker)
        assert running.wait(LONG) == 0
        assert running.output() == "and the end"
    assert log.stat().st_size < 1000
    assert log.with_name("env-0.log.1").stat().st_size == 16 << 20


def test_of_a_log_that_is_too_large_the_end_is_kept(tmp_path: Path) -> None:
    log, older = tmp_path / "a.log", tmp_path / "a.log.1"
    with log.open("ab") as writer:
        writer.write(b"0123456789")
        writer.flush()
        bound_log(log, 10)
        assert not older.exists()
        bound_log(log, 4)
        writer.write(b"more")
    assert (log.read_bytes(), older.read_bytes()) == (b"more", b"6789")
    bound_log(tmp_path / "missing.log", 4)


def test_a_worker_that_is_stopped_by_sigstop_saves_when_it_is_asked_to_end(tmp_path: Path) -> None:
    work = partial(save_when_stopped, tmp_path / "there", tmp_path / "saved")
    worker = Worker("replay", "replay", work)
    with LocalLauncher(tmp_path) as launcher:
        launcher.prepare([worker])
        replay = launcher.start(worker)
        try:
            assert appears(tmp_path / "there")
            replay._process.send_signal(signal.SIGSTOP)
            process = psutil.Process(replay.pid)
            while process.status() != psutil.STATUS_STOPPED:
                pass
            replay.terminate()
            assert replay.wait(LONG) == STOPPED
        finally:
            replay.kill()
    assert (tmp_path / "saved").exists()
