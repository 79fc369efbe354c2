"""Launchers: who starts and ends the workers of a fleet, and what they are given.

A launcher is one file in this folder that implements `Launcher`. The supervisor decides when to
restart, when to give up, and in which order to stop. `tests/contract/test_launchers.py` is what a
launcher has to pass.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from dreamfleet.config import Resources, RunConfig
from dreamfleet.errors import ConfigError, did_you_mean
from dreamfleet.roles.health import HealthRecord
from dreamfleet.roles.runtime import STOPPED

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables for processes whose numpy work is small: a pool of threads in each would fight over the
cores."""

KILLED = -int(signal.SIGKILL)
"""The exit code of a worker that was killed or lost."""

Role = Literal["agent", "actor", "evaluator", "env", "replay", "logger"]


@dataclass(frozen=True)
class RestartPolicy:
    """What happens when a worker ends without having been asked to."""

    on_failure: Literal["restart", "stop"] = "restart"
    """Start it again after a delay that doubles each time, or end the run."""
    max_restarts: int = 10
    """Restarts without progress in between after which the run ends all the same."""


@dataclass(frozen=True)
class Worker:
    """One process of a run, or whatever a launcher makes of it."""

    name: str
    """Unique in the run; names its log file and its errors."""
    role: Role
    function: Callable[[], Any]
    """What it runs; returns when the worker has done its work or was asked to stop."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of the supervisor."""
    resources: Resources = field(default_factory=Resources)
    """A launcher that places workers on machines goes by it."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    ends_run: bool = False
    """Whether the run is over when this worker's function has returned."""
    apart: bool = False
    """Whether it goes to another machine than its like, where a launcher has several."""
    health: Path | Callable[[], HealthRecord] | None = None
    """Its health record, or what reads it; None if it keeps none."""


class RunningWorker(Protocol):
    """A worker that was started; a restart makes a new one."""

    @property
    def pid(self) -> int:
        """The process it runs in; 0 while it waits for a machine."""

    @property
    def host(self) -> str:
        """The machine it runs on."""

    @property
    def error(self) -> BaseException | None:
        """What it raised, where the launcher can know it, or what became of its machine."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code, or None if it still runs after `timeout` seconds. 0 if its function has
        returned, negative for the signal that killed it, `roles.runtime.STOPPED` if it stopped
        because it was asked to."""

    def terminate(self) -> None:
        """Ask it to stop; it may save first."""

    def kill(self) -> None:
        """End it at once, with everything it has started."""

    def output(self) -> str:
        """The end of what it wrote since it was started: its traceback, if it raised."""


class ReportedWorker:
    """A `RunningWorker` whose end is reported, by a thread or another machine. One that is asked to
    stop, or killed, counts as ended at once, unless a subclass knows better."""

    def __init__(self, host: str = "") -> None:
        self.pid, self.host = 0, host
        self.error: BaseException | None = None
        self._code, self._ended = 0, threading.Event()

    def end(self, code: int) -> None:
        """Report its end; only the first report counts."""
        if not self._ended.is_set():
            self._code = code
            self._ended.set()

    def wait(self, timeout: float | None = None) -> int | None:
        return self._code if self._ended.wait(timeout) else None

    def terminate(self) -> None:
        self.end(STOPPED)

    def kill(self) -> None:
        self.end(KILLED)

    def output(self) -> str:
        return "".join(traceback.format_exception(self.error)).rstrip() if self.error else ""


class Node(Protocol):
    """Starts workers, and ends them."""

    def start(self, worker: Worker) -> RunningWorker:
        """Start a worker that does not run."""

    def log_file(self, worker: Worker) -> Path:
        """Where its output goes."""


class JoinedNode(Node, Protocol):
    """A machine that has joined. The failures of its workers are counted together, and too many of
    them end its part of the run."""

    name: str

    def dismiss(self, why: str) -> None:
        """Send the machine away."""


class Launcher(Node, Protocol):
    """The node of a run's own workers. Used as a context manager around the whole run."""

    default_address: str
    """Where a server listens if the settings leave it open."""

    def __init__(self, logdir: Path, args: RunConfig | None = None) -> None:
        """A launcher for a run in this directory, with the settings of `args`, if there are any."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def prepare(self, workers: Sequence[Worker]) -> None:
        """Called once, before anything is started: whatever cannot be sent fails here."""


LAUNCHERS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""The names of all launchers: a file in this folder is one, and has it as `LAUNCHER`."""


def find_launcher(name: str) -> type[Launcher]:
    """The launcher of this name."""
    if name not in LAUNCHERS:
        hint = did_you_mean(name, LAUNCHERS, f"choose from {', '.join(LAUNCHERS)}.")
        raise ConfigError(f"There is no launcher {name!r}: {hint}")
    launcher: type[Launcher] = importlib.import_module(f"{__name__}.{name}").LAUNCHER
    return launcher
