"""What a person sees of a run that is under way: in its terminal, and from another one."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dreamfleet.cli import main
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.claim import claim_directory
from dreamfleet.fleet.record import WorkerStatus, read_record
from dreamfleet.fleet.status import Watcher
from dreamfleet.transport import resolve

COMMAND = [str(Path(sys.executable).with_name("dreamfleet")), "train"]
DUMMY = [*COMMAND, "--task", "bundled:dummy", "--agent", "random", "--envs", "2",
         "--envs-per-process", "1", "--env-options", "size=[8,8]", "--log-every",
         "0.1"]  # fmt: skip
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """The other end of a terminal, which is read all the time: one that is not read gets full."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self.text = ""
        self._closed = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:  # the other end was closed
                data = b""
            with self._changed:
                self.text += _ESCAPES.sub("", data.decode(errors="replace"))
                self._closed = not data
                self._changed.notify_all()
            if not data:
                return

    def wait_for(self, pattern: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or re.search(pattern, self.text))
        assert re.search(pattern, self.text), self.text

    def wait_for_its_end(self) -> str:
        with self._changed:
            self._changed.wait_for(lambda: self._closed)
        return self.text


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """A run whose output goes to a terminal, and what that shows."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*DUMMY, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
    )
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        terminal.wait_for_its_end()
        os.close(ours)


def test_a_terminal_shows_the_run_and_another_one_sees_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_a_terminal("--steps", "0", "--logdir", str(tmp_path)) as (process, terminal):
        terminal.wait_for("dreamfleet bundled:dummy")
        terminal.wait_for("[0-9] episodes, best")
        terminal.wait_for("agent +● running")
        terminal.wait_for("env x 2 +● running")

        assert main(["status", str(tmp_path)]) == 0
        seen = capsys.readouterr().out
        for role in ("agent", "replay", "logger", "env x 2"):
            assert re.search(rf"{role} +● running", seen), seen
        assert "steps/s" in seen
        assert main(["status", str(tmp_path), "--svg", str(tmp_path / "status.svg")]) == 0
        capsys.readouterr()
        assert "bundled:dummy" in (tmp_path / "status.svg").read_text()

        with (
            pytest.raises(ConfigError, match="is in use by another run"),
            claim_directory(tmp_path),
        ):
            pass

        watcher = Watcher(tmp_path)
        before = env_1(watcher)
        assert before.pid is not None
        psutil.Process(before.pid).kill()
        while (after := env_1(watcher)).pid in (None, before.pid):
            time.sleep(0.1)
        assert after.restarts == 1
        assert after.error == "was killed by signal 9"
        terminal.wait_for("env-1 failed: was killed by signal 9")

        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        # The lines that others see would tear the picture apart.
        assert not re.search(r"^step ", terminal.wait_for_its_end(), re.MULTILINE)
    assert main(["status", str(tmp_path)]) == 0
    assert "not under way" in capsys.readouterr().out
    record = read_record(tmp_path)
    assert record.state == "ended"
    assert {worker.state for worker in record.workers} == {"ended"}


def env_1(watcher: Watcher) -> WorkerStatus:
    status = watcher.look()
    (found,) = (worker for worker in status.workers if worker.name == "env-1")
    return found


def test_a_terminal_shows_why_a_run_stands_still(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same words as the status from another terminal."""
    never_started = ("--remote-envs", "--actor-addr", resolve("ipc://{auto}"))
    with on_a_terminal("--logdir", str(tmp_path), *never_started) as (_, terminal):
        reason = "no observation from 2 environments (0, 1) yet"
        terminal.wait_for(re.escape(f"Waiting: {reason}"))
        assert main(["status", str(tmp_path), "--json"]) == 0
        seen = json.loads(capsys.readouterr().out)
        assert seen["state"] == "running"
        assert seen["waiting"].startswith(reason)
        assert {worker["name"] for worker in seen["workers"]} == {"agent", "replay", "logger"}


def test_the_end_of_a_run_is_left_on_the_screen(tmp_path: Path) -> None:
    arguments = ("--steps", "300", "--logdir", str(tmp_path), "--eval-episodes", "1")
    with on_a_terminal(*arguments) as (process, terminal):
        assert process.wait() == 0
        text = terminal.wait_for_its_end()
    assert "Evaluation: mean score" in text
    assert "Results:" in text
    assert "Traceback" not in text


def test_directory_without_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
