"""Two machines that share a directory, and whose locks may not reach each other."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.errors import ConfigError
from dreamfleet.fleet import claim
from dreamfleet.fleet.claim import BEAT_NAME, LOCK_NAME, claim_directory
from dreamfleet.fleet.record import RunStatus, read_record, write_record

IN_USE = r"is in use by another run [(]process 77 on elsewhere[)]"


@contextmanager
def another_machine(logdir: Path, *, beats: bool) -> Iterator[None]:
    """A run of another machine, whose clock is an hour late and whose lock does not reach us."""
    record = RunStatus(77, 1.0, "elsewhere", time.time() - 3600)
    write_record(logdir, record)
    over = threading.Event()

    def beat() -> None:
        count = 0
        while not over.wait(0.05):
            count += 1
            (logdir / BEAT_NAME).write_bytes(b"%s %020d\n" % (b"e" * 16, count))

    (logdir / BEAT_NAME).write_bytes(b"%s %020d\n" % (b"e" * 16, 0))
    thread = threading.Thread(target=beat)
    if beats:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if beats:
            thread.join()


def test_a_run_of_another_machine_is_known_by_its_beat(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        another_machine(tmp_path, beats=True),
        pytest.raises(ConfigError, match=IN_USE),
        claim_directory(tmp_path, said.append),
    ):
        pass
    assert "was last on elsewhere (process 77)" in said[0]
    record = read_record(tmp_path)
    assert record is not None
    assert record.host == "elsewhere", "its record is left alone"


def test_a_machine_that_has_died_leaves_its_directory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "_SILENT_SECONDS", 0.5)
    with another_machine(tmp_path, beats=False), claim_directory(tmp_path):
        record = read_record(tmp_path)
        assert record is not None
        assert record.pid == os.getpid()
    write_record(tmp_path, replace(record, host="elsewhere", state="ended"))
    monkeypatch.setattr(claim, "_SILENT_SECONDS", 3600.0)
    with claim_directory(tmp_path):  # one that said that it ended is not waited for
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_the_process_and_the_beat_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(claim.fcntl, "flock", flock)
    with (
        claim_directory(tmp_path),
        pytest.raises(ConfigError, match=f"in use by .* [(]process {os.getpid()} on"),
        claim_directory(tmp_path),
    ):
        pass
    with claim_directory(tmp_path):
        pass
    with (
        another_machine(tmp_path, beats=True),
        pytest.raises(ConfigError, match=IN_USE),
        claim_directory(tmp_path),
    ):
        pass


def test_who_was_overtaken_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at the same moment do not see each other, and one of them beats last."""
    monkeypatch.setattr(claim, "BEAT_SECONDS", 0.01)
    ended, said = threading.Event(), []
    monkeypatch.setattr(claim, "end_at_once", ended.set)
    with claim_directory(tmp_path, said.append):
        before = (tmp_path / BEAT_NAME).read_bytes()
        while (tmp_path / BEAT_NAME).read_bytes() == before:
            time.sleep(0.01)  # it beats
        assert not ended.is_set()
        with another_machine(tmp_path, beats=False):
            assert ended.wait(120)
    assert "process 77 on elsewhere has taken" in said[-1]


def test_a_full_directory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("write_record", "_Beat"):
        with monkeypatch.context() as patch:
            patch.setattr(claim, name, full)
            words = "No space left on device[)], so the run was not started: make room"
            with pytest.raises(ConfigError, match=words), claim_directory(tmp_path):
                pass
    (tmp_path / LOCK_NAME).unlink()
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(ConfigError, match="cannot be written to"), claim_directory(tmp_path):
        pass
