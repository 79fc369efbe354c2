"""A fleet in a process of its own, whose workers find each other through proxies.

Fleet          starts and ends it, and looks at it from outside
main           what that process does
BehindProxies  the launcher of its workers
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import psutil

from dreamfleet.config import CONFIG_FILE, RunConfig, read_config
from dreamfleet.envs import make_env
from dreamfleet.files import atomic_write
from dreamfleet.fleet.claim import claim_directory
from dreamfleet.fleet.factories import factories
from dreamfleet.fleet.launchers import Launcher, RunningWorker, Worker, find_launcher
from dreamfleet.fleet.record import WorkerStatus, read_record
from dreamfleet.fleet.tied import tied
from dreamfleet.fleet.workers import worker_names
from dreamfleet.metrics import read_jsonl
from dreamfleet.parallel import combined
from dreamfleet.roles.addresses import AddressBook, book_in_use, use_book
from dreamfleet.roles.health import health_path, read_health
from dreamfleet.roles.spaces_file import write_spaces

SUPERVISOR = "supervisor"
_MARK = "DREAMFLEET_CHAOS"  # a variable that all processes of a fleet inherit
_END_SECONDS = 180.0
_GONE_SECONDS = 10.0


class Fleet:
    """A run whose supervisor is another process, which may be killed and started again."""

    def __init__(self, config: RunConfig, addresses: Mapping[str, str], folder: Path) -> None:
        self.config = config
        self._addresses, self._folder = addresses, folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(mode=0o700)
        self._process: subprocess.Popen[bytes] | None = None
        envs = [name for name in worker_names(config) if name.startswith("env-")]
        self._trainers = [name for name in envs if int(name.removeprefix("env-")) < config.envs]
        atomic_write(config.logdir / CONFIG_FILE, config.to_json())

    def start(self) -> None:
        """Start the supervisor, which starts or resumes the run."""
        command = tied(["dreamfleet.chaos", str(self.config.logdir)])
        with (self.config.logdir / "fleet.log").open("ab") as output:
            self._process = subprocess.Popen(
                [*command, json.dumps(dict(self._addresses))],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self.environment(),
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        """Variables that all processes of the fleet inherit, by which they are found."""
        # The title of a process would overwrite them: SPT_NOENV.
        mine = {"TMPDIR": str(self.temporary), _MARK: str(self._folder), "SPT_NOENV": "1"}
        return {**os.environ, **mine}

    @property
    def ended(self) -> bool:
        """Whether the supervisor has ended, although nobody asked it to."""
        return self._process is not None and self._process.poll() is not None

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        """Send the supervisor a signal, and wait until it has ended; returns its exit code."""
        assert self._process is not None
        with self._process as process:
            self._process = None
            process.send_signal(how)
            try:
                return process.wait(_END_SECONDS)
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
        """Every process that the fleet has started, and that was not started for something else."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            mine = process.environ().get(_MARK) == str(self._folder)
            return mine and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def close(self) -> None:
        """Leave nothing running, whatever happened."""
        if self._process is not None:
            with self._process as supervisor:
                supervisor.kill()
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    # --- seen from outside -----------------------------------------------------------------------

    def workers(self) -> dict[str, WorkerStatus]:
        """Those that run, by name, and the supervisor."""
        record = read_record(self.config.logdir)
        if record is None or self._process is None or record.pid != self._process.pid:
            return {}
        mine = WorkerStatus(
            SUPERVISOR, SUPERVISOR, "running", record.pid, record.host, record.started
        )
        running = [worker for worker in record.workers if worker.state == "running"]
        return {each.name: each for each in (*running, mine)}

    def pid(self, name: str) -> int | None:
        """The process of a worker, if it runs."""
        worker = self.workers().get(name)
        return worker.pid if worker else None

    def restarts(self) -> dict[str, int]:
        """How often each worker was started again by this supervisor."""
        record = read_record(self.config.logdir)
        return {worker.name: worker.restarts for worker in record.workers} if record else {}

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
        if self.config.launcher == "serial":  # environments are no workers of their own
            path = self.config.logdir / "metrics.jsonl"
            newest = deque(read_jsonl(path) if path.exists() else (), maxlen=1)
            return int(newest[0]["step"]) if newest else 0
        names = [worker] if worker else self._trainers
        return sum(read_health(health_path(self.config, name)).steps for name in names)


# --- the process of the supervisor ---------------------------------------------------------------


def main() -> None:
    """What the supervisor's process does: run the fleet of a directory until a signal ends it."""
    with suppress(KeyboardInterrupt):
        _supervise(Path(sys.argv[1]), json.loads(sys.argv[2]))


def _supervise(logdir: Path, addresses: Mapping[str, str]) -> None:
    config = read_config(logdir)
    env = make_env(config.task, **config.env_options)
    spaces = env.obs_space, env.act_space
    env.close()
    launcher = partial(BehindProxies, addresses) if addresses else None
    with claim_directory(logdir, _say):
        write_spaces(config, *spaces)
        parts = factories(config, spaces=spaces)
        combined(**vars(parts), args=config, say=_say, make_launcher=launcher)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class BehindProxies:
    """A launcher whose workers find servers through proxies; everything else is another's."""

    def __init__(self, addresses: Mapping[str, str], logdir: Path, args: RunConfig) -> None:
        self._addresses = addresses
        self._inner: Launcher = find_launcher(args.launcher)(logdir, args)
        self.default_address = self._inner.default_address

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)

    def prepare(self, workers: Sequence[Worker]) -> None:
        self._inner.prepare([self._behind(worker) for worker in workers])

    def start(self, worker: Worker) -> RunningWorker:
        return self._inner.start(self._behind(worker))

    def log_file(self, worker: Worker) -> Path:
        return self._inner.log_file(worker)

    def _behind(self, worker: Worker) -> Worker:
        return replace(worker, function=partial(_run, self._addresses, worker))


def _run(addresses: Mapping[str, str], worker: Worker) -> None:
    use_book(_ProxyBook(book_in_use(), addresses, worker.name))
    worker.function()


@dataclass(frozen=True)
class _ProxyBook:
    """An address book in which servers are where their proxies listen. A server, which looks for
    its own predecessor, finds that one."""

    inner: AddressBook
    addresses: Mapping[str, str]
    worker: str

    def publish(self, logdir: Path, name: str, address: str) -> None:
        self.inner.publish(logdir, name, address)

    def find(self, logdir: Path, name: str) -> str:
        found = self.inner.find(logdir, name)
        mine = ("actor", "learner") if self.worker == "agent" else (self.worker,)
        return found if not found or name in mine else self.addresses.get(name, found)

    def remove(self, logdir: Path, name: str) -> None:
        self.inner.remove(logdir, name)

    def names(self, logdir: Path) -> list[str]:
        return self.inner.names(logdir)
