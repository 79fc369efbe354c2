"""What a supervisor writes about its workers, and who may use a directory."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dreamfleet.errors import ConfigError
from dreamfleet.fleet.claim import claim_directory
from dreamfleet.fleet.record import (
    FILE_NAME,
    RunStatus,
    WorkerStatus,
    read_record,
    supervisor_process,
    write_record,
)

WORKERS = (
    WorkerStatus("agent", "agent", "running", 12, "here", 1.5),
    WorkerStatus("env-3", "env", "restarting", None, "here", 2.5, 4, "ValueError: pole"),
)


def of_another_process() -> RunStatus:
    """Of a process that lives and is not this one."""
    other = psutil.Process(os.getppid())
    return RunStatus(other.pid, other.create_time(), socket.gethostname(), 0.0)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    record = replace(RunStatus.of_this_process(), workers=WORKERS, state="ending")
    write_record(tmp_path / "run", record)
    assert read_record(tmp_path / "run") == record
    plain = json.loads((tmp_path / "run" / FILE_NAME).read_text())
    assert plain["workers"][1]["error"] == "ValueError: pole"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"pid": 1}', b"[" * 100_000, b'{"a":' * 100_000],
)
def test_a_damaged_record_is_none(tmp_path: Path, content: bytes) -> None:
    assert read_record(tmp_path) is None
    (tmp_path / FILE_NAME).write_bytes(content)
    assert read_record(tmp_path) is None


def test_a_record_with_a_wrong_type_is_damaged(tmp_path: Path) -> None:
    write_record(tmp_path, RunStatus.of_this_process())
    fields = json.loads((tmp_path / FILE_NAME).read_text())
    for change in ({"pid": "7"}, {"state": "asleep"}, {"workers": [{"name": "env"}]}):
        (tmp_path / FILE_NAME).write_text(json.dumps({**fields, **change}))
        assert read_record(tmp_path) is None
    (tmp_path / FILE_NAME).write_text(json.dumps({**fields, "added_later": 1}))
    assert read_record(tmp_path) is not None


def test_a_supervisor_is_known_by_pid_and_creation_time() -> None:
    me = RunStatus.of_this_process()
    found = supervisor_process(me)
    assert found is not None
    assert found.pid == os.getpid()
    assert supervisor_process(replace(me, created=me.created - 100)) is None
    assert supervisor_process(replace(me, host="elsewhere")) is None
    assert supervisor_process(replace(me, pid=-1)) is None
    assert supervisor_process(replace(me, pid=1 << 80)) is None


def test_a_directory_has_one_supervisor(tmp_path: Path) -> None:
    """The claim is a lock, so there is no moment at which two may take it."""
    with claim_directory(tmp_path):
        mine = read_record(tmp_path)
        assert mine is not None
        with (
            pytest.raises(ConfigError, match=f"is in use by .* [(]process {mine.pid} on"),
            claim_directory(tmp_path),
        ):
            pass
        assert read_record(tmp_path) == mine
    with claim_directory(tmp_path):
        pass


def test_a_directory_is_free_when_its_supervisor_has_ended(tmp_path: Path) -> None:
    """Also if another process has got the supervisor's pid, or if it does something else by now."""
    other = of_another_process()
    for old in (replace(other, created=other.created - 100), replace(other, state="ended")):
        write_record(tmp_path, old)
        with claim_directory(tmp_path):
            record = read_record(tmp_path)
            assert record is not None
            assert (record.pid, record.state) == (os.getpid(), "running")


@pytest.mark.parametrize(
    ("error", "state"), [(None, "ended"), (KeyboardInterrupt, "ended"), (RuntimeError, "failed")]
)
def test_how_a_run_ended_stays_in_the_record(
    tmp_path: Path, error: type[BaseException] | None, state: str
) -> None:
    def run() -> None:
        with claim_directory(tmp_path):
            record = read_record(tmp_path)
            assert record is not None
            write_record(tmp_path, replace(record, workers=WORKERS))
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    record = read_record(tmp_path)
    assert record is not None
    assert (record.state, record.workers) == (state, WORKERS)


def test_what_the_supervisor_said_about_the_end_is_kept(tmp_path: Path) -> None:
    with claim_directory(tmp_path):
        record = read_record(tmp_path)
        assert record is not None
        write_record(tmp_path, replace(record, state="failed"))
    record = read_record(tmp_path)
    assert record is not None
    assert record.state == "failed"


def test_a_run_that_was_killed_after_its_steps_has_not_ended() -> None:
    status = RunStatus(1, 0.0, "", 0.0, steps=100, step=100, state="ended")
    assert status.message == "The run has ended: it has made all its steps."
    killed, failed = replace(status, state="killed"), replace(status, state="failed")
    assert killed.message == "The run was killed. The same command resumes it."
    assert failed.message == "The run has failed. The same command resumes it."
