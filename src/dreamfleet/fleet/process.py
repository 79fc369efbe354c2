"""One process of the fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle

from dreamfleet.fleet.record import WorkerState

_TAIL_BYTES = 20_000
_TAIL_LINES = 60
_REASON_LENGTH = 200
_HUNG = "Timeout ("  # what faulthandler writes before it ends a process that took too long


class Process:
    """A function that runs in a fresh interpreter, with its output in a log file.

    Unlike `multiprocessing`, it never imports the parent's main module: scripts need no guard,
    and a child holds what its own function needs and nothing else.

    Args:
        name: The role; names the process, its log file and its errors.
        function: Takes nothing. Sent with cloudpickle, so closures will do.
        logs: Directory of the log file, which is appended to.
        environment: Environment variables besides this process's own.
    """

    error: BaseException | None = None
    """What it raised, where that can be known: a process has only its last words."""
    started = 0.0
    """Unix time of its last start; the supervisor notes it, and the two below."""
    restarts = 0
    failure = ""

    def __init__(
        self,
        name: str,
        function: Callable[[], Any],
        logs: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_file = logs / f"{name}.log"
        self._payload = cloudpickle.dumps(function)
        self._environment = dict(environment or {})
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    @property
    def state(self) -> WorkerState:
        if self.alive:
            return "running"
        return "restarting" if self.restarts else "starting"

    def start(self) -> None:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "path": sys.path,
            "title": f"dreamfleet {self.name}",
            "bytes": len(self._payload),
        }
        with self.log_file.open("ab") as output:
            self._log_start = output.tell()
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "dreamfleet.fleet.child"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment},
            )
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # it died at once; whoever waits for it learns so
            self._popen.stdin.write(json.dumps(header).encode() + b"\n" + self._payload)
            self._popen.stdin.flush()

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code, or None if it still runs after `timeout` seconds."""
        try:
            code = self._started.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        assert self._started.stdin is not None
        with suppress(BrokenPipeError):
            self._started.stdin.close()
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        if self.alive:
            self._started.terminate()

    def kill(self) -> None:
        if self.alive:
            self._started.kill()

    def last_words(self) -> str:
        """The end of what it wrote since it was started: its traceback, if it raised."""
        with self.log_file.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])

    def reason(self) -> str:
        """One line on why it failed: its exception, or that it hung; empty if it did not say."""
        lines = self.last_words().splitlines()
        if hung := next((line for line in reversed(lines) if line.startswith(_HUNG)), None):
            return f"it hung for {hung.removeprefix(_HUNG).rstrip(')!')}"
        if not any(line.startswith("Traceback") for line in lines):
            return ""
        said = [line for line in lines if line[:1].strip()]
        return said[-1][:_REASON_LENGTH]

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._popen is not None, f"{self.name} was not started"
        return self._popen
