"""The fleet under test: `dreamfleet train` in a process of its own, seen from outside."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path

import psutil

from chaos.env import TASK
from chaos.schedule import SUPERVISOR
from dreamfleet.config import CONFIG_FILE, RunConfig, read_config
from dreamfleet.fleet.record import WorkerStatus, read_record
from dreamfleet.fleet.tied import tied
from dreamfleet.metrics import read_jsonl
from dreamfleet.roles.addresses import published_address
from dreamfleet.roles.health import health_path, read_health
from dreamfleet.transport import Keys
from dreamfleet.transport.address import Address, parse

STOPPED_BY_SIGNAL = 130
"""The exit code of `dreamfleet train` that was asked to stop."""
_MARK = "DREAMFLEET_CHAOS"  # a variable that all processes of a fleet inherit
_STOP_SECONDS = 180.0
_GONE_SECONDS = 10.0
_PIDFD_GETFD = 438  # number of the system call, on every architecture

SETTINGS = f"""--task {TASK} --eval-envs 1 --eval-episodes 0 --steps 0 --batch-size 8
--batch-length 16 --train-ratio 16 --replay.chunk 256 --replay.capacity 4000000 --log-every 1
--save-every 5 --report-every 20 --outputs jsonl --ray-address local"""
AGENTS = {
    "dreamer": "--agent dreamer --dreamer.model debug --envs 8 --envs-per-process 4 "
    "--env-options seconds=0.002",
    "random": "--agent random --envs 4 --envs-per-process 2 --env-options seconds=0.01",
}
"""A small fleet that saves and logs often; with the random agent, one for a busy machine."""


class Fleet:
    """A run whose supervisor is another process, which may be killed and started again.

    Args:
        logdir: The run's directory.
        folder: For what else it writes: its output and temporary files.
        settings: Of `dreamfleet train`.
    """

    def __init__(self, logdir: Path, folder: Path, settings: Sequence[str]) -> None:
        self.logdir, self._folder, self._settings = logdir, folder, settings
        self.temporary = folder / "tmp"
        self.temporary.mkdir(mode=0o700)
        self.output = folder / "fleet.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the supervisor, which starts or resumes the run."""
        words = ["dreamfleet.cli", "train", *self._settings, "--logdir", str(self.logdir)]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                tied(words),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self.environment(),
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        """Variables that all processes of the fleet inherit, by which they are found."""
        code = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(code),
            "TMPDIR": str(self.temporary),
            _MARK: str(self._folder),
            "SPT_NOENV": "1",  # the title of a process would overwrite its variables
        }

    @cached_property
    def config(self) -> RunConfig:
        """The settings of the run, once it has started."""
        return read_config(self.logdir)

    @property
    def is_configured(self) -> bool:
        return (self.logdir / CONFIG_FILE).exists()

    @property
    def ended(self) -> bool:
        """Whether the supervisor has ended without being asked to."""
        return self._process is not None and self._process.poll() is not None

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        """Send the supervisor a signal, and wait for its end; returns its exit code."""
        assert self._process is not None
        with self._process as process:
            self._process = None
            process.send_signal(how)
            try:
                return process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()

    def wait_until_gone(self) -> float:
        """Seconds until every process of the fleet has ended."""
        begin = time.monotonic()
        while self.processes() and time.monotonic() - begin < _GONE_SECONDS:
            time.sleep(0.01)
        return time.monotonic() - begin

    def processes(self) -> list[psutil.Process]:
        """Every process that the fleet has started."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            mine = process.environ().get(_MARK) == str(self._folder)
            return mine and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def close(self) -> None:
        """Leave nothing running."""
        if self._process is not None:
            with self._process as supervisor:
                supervisor.kill()
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    # --- from outside ----------------------------------------------------------------------------

    def workers(self) -> dict[str, WorkerStatus]:
        """Running workers by name, and the supervisor."""
        record = read_record(self.logdir)
        if record is None or self._process is None or record.pid != self._process.pid:
            return {}
        mine = WorkerStatus(
            SUPERVISOR, SUPERVISOR, "running", record.pid, record.host, record.started
        )
        running = [worker for worker in record.workers if worker.state == "running"]
        return {each.name: each for each in (*running, mine)}

    def names(self) -> list[str]:
        """All workers, running or not."""
        record = read_record(self.logdir)
        return [worker.name for worker in record.workers] if record else []

    def pid(self, name: str) -> int | None:
        """The process of a worker, if it runs."""
        worker = self.workers().get(name)
        return worker.pid if worker else None

    def signal(self, name: str, number: signal.Signals) -> int | None:
        """Send a signal to a worker; returns its process, None if it does not run."""
        pid = self.pid(name)
        if pid is not None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return None
        return pid

    def steps(self, worker: str | None = None) -> int:
        """Steps that environments have made in the life of the run: those of a worker, or of all
        that play for training."""
        if self.config.launcher == "serial":  # environments are no workers
            path = self.logdir / "metrics.jsonl"
            newest = deque(read_jsonl(path) if path.exists() else (), maxlen=1)
            return int(newest[0]["step"]) if newest else 0
        envs = [name for name in self.names() if name.startswith("env-")]
        training = [name for name in envs if int(name.removeprefix("env-")) < self.config.envs]
        names = [worker] if worker else training
        return sum(read_health(health_path(self.config, name)).steps for name in names)

    def address(self, worker: str) -> str:
        """Where a worker serves; empty if it does not."""
        role, _, index = worker.partition("-")
        if role not in ("agent", "actor", "replay", "logger"):
            return ""
        return published_address(
            self.logdir,
            "actor" if role == "agent" else role,  # type: ignore[arg-type]
            int(index or 0),
        )

    def keys(self, address: str) -> Keys | None:
        """What opens an address."""
        return Keys.load(self.logdir / "keys") if address.startswith("tcp:") else None


def cut(pid: int, address: str, how: int = socket.SHUT_RDWR) -> list[socket.SocketKind]:
    """Shut the connections of a server down inside of its process, and return their kinds.

    No proxy is needed: `pidfd_getfd` duplicates the server's own sockets, so what is cut is what
    users' runs talk over.

    Raises:
        PermissionError: This process may not touch the sockets of the other one.
    """
    place, found = parse(address), []
    with ExitStack() as stack:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return []
        stack.callback(os.close, process)
        libc = ctypes.CDLL(None, use_errno=True)
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if not str(path.readlink()).startswith("socket:"):
                    continue
            descriptor = libc.syscall(_PIDFD_GETFD, process, int(path.name), 0)
            if descriptor < 0:
                if (number := ctypes.get_errno()) == errno.EPERM:
                    raise PermissionError(number, os.strerror(number))
                continue  # closed meanwhile
            connection = stack.enter_context(socket.socket(fileno=descriptor))
            if _is_accepted(connection, place):
                with suppress(OSError):  # the client has gone
                    connection.shutdown(how)
                    found.append(connection.type)
    return found


def _is_accepted(connection: socket.socket, place: Address) -> bool:
    """Whether a socket is a connection that a server at this address has accepted."""
    try:
        connection.getpeername()
        name = connection.getsockname()
    except OSError:  # it listens, or is no connection
        return False
    if place.kind == "tcp":
        return isinstance(name, tuple) and name[1] == place.port
    return isinstance(name, str) and name.startswith(str(place.path))
