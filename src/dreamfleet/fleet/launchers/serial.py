"""The serial launcher: every worker is a thread of this process, for a debugger.

Under the same supervisor, so Ctrl-C, resuming and the end of a run are as with processes. Most runs
have a single worker then, in which the roles take turns (`dreamfleet.roles.serial`).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from dreamfleet.config import RunConfig
from dreamfleet.fleet.launchers import KILLED, ReportedWorker, Worker
from dreamfleet.roles.runtime import STOPPED, StopSignal

log = logging.getLogger(__name__)


class SerialLauncher:
    """Starts threads, with what they log in `logs/serial.log`. Nothing is pickled, and environment
    variables are not set, because all threads share them."""

    default_address = "ipc://{auto}"

    def __init__(self, logdir: Path, args: RunConfig | None = None) -> None:  # noqa: ARG002
        self._path = logdir / "logs" / "serial.log"
        self._root = logging.getLogger("dreamfleet")
        self._level = self._root.level

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(self._path)
        self._handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s")
        )
        self._root.addHandler(self._handler)
        self._root.setLevel(logging.INFO)
        return self

    def __exit__(self, *error: object) -> None:
        self._root.setLevel(self._level)
        self._root.removeHandler(self._handler)
        with suppress(OSError):  # the disk is full
            self._handler.close()

    def prepare(self, workers: Sequence[Worker]) -> None:
        pass

    def start(self, worker: Worker) -> SerialWorker:
        return SerialWorker(worker)

    def log_file(self, worker: Worker) -> Path:  # noqa: ARG002 - the protocol's
        return self._path


class SerialWorker(ReportedWorker):
    """A thread that runs a worker's function. It cannot be killed: one that does not stop when
    asked to is abandoned, and ends with the process."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(socket.gethostname())
        self.pid = os.getpid()
        self._worker = worker
        self._signal = StopSignal()
        self._thread = threading.Thread(target=self._run, name=worker.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        code = 0
        try:
            self._signal.run(self._worker.function)
            if self._signal.event.is_set():
                code = STOPPED
        except BaseException as error:
            log.exception("%s failed", self._worker.name)
            code = 1
            if not self._ended.is_set():
                self.error = error
        self.end(code)

    def wait(self, timeout: float | None = None) -> int | None:
        code = super().wait(timeout)
        if code not in (None, KILLED):
            self._thread.join()  # its last instruction was to say that it has ended
        return code

    def terminate(self) -> None:
        self._signal.stop()


LAUNCHER = SerialLauncher
