"""The local launcher: every worker is a process of this machine.

A worker runs in a fresh interpreter. Its standard input tells it what to do: a line of JSON, then a
function pickled by cloudpickle, from parent to child only. Unlike with `multiprocessing`, a script
needs no guard around its main code, and a process imports only what its own function needs.

The pipe stays open. When it ends, the parent is gone, and the worker has two seconds to stop with
everything that it has started. Workers have a session of their own, so signals to the parent's
process group (Ctrl-C, `timeout`) do not reach them. A SIGTERM to all processes of a job (Slurm,
systemd) does: a worker gives the supervisor ten seconds to stop the workers in order.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Self

import cloudpickle
import setproctitle

from dreamfleet.config import RunConfig
from dreamfleet.fleet.launchers import Worker
from dreamfleet.roles.runtime import (
    STOP_SIGNAL,
    STOPPED,
    obey_supervisor,
    pickled,
    process_was_asked_to_stop,
)
from dreamfleet.transport.address import remove_socket_files

_TAIL_BYTES, _TAIL_LINES = 20_000, 60
_LOG_BYTES = 16 << 20
_LOG_SECONDS = 1.0  # between two looks at the size of a log
_ORPHAN_SECONDS = 1.5
_PR_SET_PDEATHSIG = 1


class LocalLauncher:
    """Starts processes, with their output in `logs/NAME.log`, which is appended to. A process whose
    log has more than 16 MB moves it to `NAME.log.1`."""

    default_address = "ipc://{auto}"

    def __init__(self, logdir: Path, args: RunConfig | None = None) -> None:  # noqa: ARG002
        self._logs = logdir / "logs"
        self._payloads: dict[str, bytes] = {}

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        _allow_all_files()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def prepare(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self._payloads[worker.name] = pickled(worker.name, worker.function)

    def start(self, worker: Worker) -> LocalWorker:
        return LocalWorker(worker, self._payloads[worker.name], self.log_file(worker))

    def log_file(self, worker: Worker) -> Path:
        return self._logs / f"{worker.name}.log"


class LocalWorker:
    """A process that runs a worker's function."""

    error = None  # a process leaves only its output

    def __init__(self, worker: Worker, payload: bytes, log_file: Path) -> None:
        self.host = socket.gethostname()
        self._log_file = log_file
        self._ended = False
        header = {
            "path": sys.path,
            "title": f"dreamfleet {worker.name}",
            "log": str(log_file.absolute()),
            "bytes": len(payload),
        }
        # Each thread of a server would keep a heap of its own, 2 MB and more. An agent computes in
        # its threads, and keeps them.
        heaps = {} if worker.role == "agent" else {"MALLOC_ARENA_MAX": "2"}
        with log_file.open("ab") as output:
            self.log_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dreamfleet.fleet.launchers.local"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**heaps, **os.environ, **worker.environment},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once, which `wait` tells
            self._process.stdin.write(json.dumps(header).encode() + b"\n" + payload)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int | None:
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._ended:
            self._ended = True
            with suppress(ProcessLookupError):  # nothing that it has started is left
                os.killpg(self.pid, signal.SIGKILL)
        return code

    def terminate(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)  # in case it was stopped by SIGSTOP
            self._process.send_signal(STOP_SIGNAL)

    def kill(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def output(self) -> str:
        return tail(self._log_file, self.log_start)


def tail(path: Path, start: int) -> str:
    """The end of what was written to a file from this place on."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])


LAUNCHER = LocalLauncher


def run_worker() -> None:
    """What the process of a worker does."""
    orphaned = threading.Event()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT, also for what it starts
    obey_supervisor()
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    # Unbuffered: a thread that waits in a buffered reader cannot be left behind at the end.
    pipe = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    header = json.loads(pipe.readline())
    sys.path[:] = header["path"]
    setproctitle.setproctitle(header["title"])
    function = cloudpickle.loads(_read(pipe, header["bytes"]))
    watched = [pipe, Path(header["log"]), orphaned]
    threading.Thread(target=_watch_parent, args=watched, name="parent", daemon=True).start()
    _wake_with_parent()
    _allow_all_files()
    try:
        function()
    finally:
        if orphaned.is_set():
            _end_group()
    if process_was_asked_to_stop():
        sys.exit(STOPPED)


def _read(pipe: FileIO, size: int) -> bytes:
    parts = []
    while size:
        part = pipe.read(size)
        if not part:
            sys.exit("The parent process ended before it sent this process its task.")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _watch_parent(pipe: FileIO, log_file: Path, orphaned: threading.Event) -> None:
    """End when the parent is gone; meanwhile keep the log small."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while not poll.poll(1000 * _LOG_SECONDS):
        bound_log(log_file)
    orphaned.set()
    os.kill(os.getpid(), STOP_SIGNAL)
    threading.Event().wait(_ORPHAN_SECONDS)
    _end_group()


def bound_log(path: Path, most: int = _LOG_BYTES) -> None:
    """Move the end of a log that has grown too large to NAME.1, over what is there. Processes that
    append to it go on at its start."""
    with suppress(OSError), path.open("rb") as file:  # a log that cannot be moved stays
        size = file.seek(0, os.SEEK_END)
        if size > most:
            file.seek(size - most)
            path.with_name(f"{path.name}.1").write_bytes(file.read(most))
            os.truncate(path, 0)


def _end_group() -> None:
    """End this process and all that it has started."""
    remove_socket_files()
    os.killpg(os.getpid(), signal.SIGKILL)


def _wake_with_parent() -> None:
    """Let the kernel continue this process when its parent dies: one that is stopped would never
    notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _allow_all_files() -> None:
    """Open as many files as the machine allows: a launcher has a pipe for each worker, an actor a
    connection for each environment, and libzmq ends a server when there are too many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system that names no limit may have one all the same
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    run_worker()
