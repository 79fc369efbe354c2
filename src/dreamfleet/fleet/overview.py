"""What a run is doing, seen from outside: from its directory, its logger and its processes.

Whoever looks needs nothing but the run's directory, so a second terminal sees the same as the one
that started the run.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from dreamfleet.blueprint import read_config
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.record import read_record, supervisor_process
from dreamfleet.transport import Client, Future, TransportError

_TITLE = "dreamfleet "
_SERIAL = "all roles"
_RATE_SECONDS = 30.0
_ANSWER_SECONDS = 0.5
# Bytes that hold a line of metrics at the least.
_TAIL = 1 << 17


@dataclass(frozen=True)
class RoleStatus:
    """One process of the fleet; one without a pid is not there at the moment."""

    name: str
    pid: int | None = None
    cpu: float = 0.0
    """Cores it keeps busy."""
    memory: int = 0
    """Bytes."""
    seconds: float = 0.0
    """Since it was started."""
    restarts: int = 0
    """Seen by whoever watches."""


@dataclass(frozen=True)
class RunStatus:
    """Everything a person is shown of a run."""

    config: RunConfig
    running: bool
    """Whether whoever started the run is there."""
    answers: bool
    """Whether the logger has told something."""
    step: int
    scores: tuple[float, ...]
    """Of all episodes, in order."""
    metrics: Mapping[str, Any]
    """The newest of every key."""
    steps_per_second: float
    seconds: float
    """Since the run was started."""
    seconds_left: float | None
    roles: tuple[RoleStatus, ...]

    @property
    def score(self) -> float | None:
        """The mean of recent episodes."""
        told = self.metrics.get("score")
        if told is not None:
            return float(told)
        recent = self.scores[-20:]
        return sum(recent) / len(recent) if recent else None


class Watcher:
    """Looks at a run again and again.

    Args:
        logdir: The run's directory; it may be started later.
    """

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self._config: RunConfig | None = None
        self._written = 0
        self._client: Client | None = None
        self._asked: Future | None = None
        self._metrics: dict[str, Any] = {}
        self._answers = False
        self._scores = _ScoresReader(logdir / "scores.jsonl")
        self._steps: deque[tuple[float, int]] = deque()
        self._processes: dict[int, psutil.Process] = {}
        self._pids: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._client is not None:
            self._client.close()

    def look(self, patience: float = _ANSWER_SECONDS) -> RunStatus | None:
        """What the run is doing; None as long as there is no configuration in its directory.

        Args:
            patience: Seconds to wait for the logger; an answer that is late comes with the next
                look.
        """
        config = self._read_config()
        if config is None:
            return None
        self._ask(config, patience)
        supervisor = _supervisor(self._logdir)
        scores = tuple(self._scores.read())
        if self._answers:
            step = int(self._metrics["step"])
        else:
            step = max(self._scores.last_step, _last_logged_step(self._logdir / "metrics.jsonl"))
        rate = self._rate(step)
        seconds = time.time() - supervisor.create_time() if supervisor else 0.0
        return RunStatus(
            config=config,
            running=supervisor is not None,
            answers=self._answers,
            step=step,
            scores=scores,
            metrics=self._metrics,
            steps_per_second=rate,
            seconds=seconds,
            seconds_left=_time_left(config, step, rate, seconds) if supervisor else None,
            roles=self._roles(config, supervisor),
        )

    def _read_config(self) -> RunConfig | None:
        """Again when it was written again: a run that is resumed listens at other addresses."""
        path = self._logdir / "config.json"
        try:
            written = path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if written != self._written:
            with suppress(ConfigError):
                self._config = read_config(self._logdir)
                self._written = written
                if self._client is not None:
                    self._client.close()
                self._client, self._asked = None, None
        return self._config

    def _ask(self, config: RunConfig, patience: float) -> None:
        """A question that was not answered yet is not asked again."""
        try:
            if self._client is None:
                self._client = Client(config.logger_addr, "watcher", keys=config.run_keys)
            if self._asked is None:
                self._asked = self._client.status()
            if self._asked.wait(patience):
                asked, self._asked = self._asked, None
                self._metrics, self._answers = asked.result(), True
        except TransportError:
            self._asked = None
            self._answers = False

    def _rate(self, step: int) -> float:
        """Steps a second over the last while; what the actor told, before there is one."""
        now = time.monotonic()
        self._steps.append((now, step))
        while now - self._steps[0][0] > _RATE_SECONDS:
            self._steps.popleft()
        then, before = self._steps[0]
        if now - then < 1.0:
            return float(self._metrics.get("actor/steps_per_second", 0.0))
        return max(0.0, (step - before) / (now - then))

    def _roles(
        self, config: RunConfig, supervisor: psutil.Process | None
    ) -> tuple[RoleStatus, ...]:
        if config.launcher == "serial":  # they are threads of the process that was started
            found = {_SERIAL: supervisor} if supervisor is not None else {}
        else:
            found = dict(_children(supervisor))
        names = dict.fromkeys([*role_names(config), *found])
        roles = []
        for name in names:
            pids = self._pids.setdefault(name, [])
            process = found.get(name)
            if process is not None and process.pid not in pids:
                pids.append(process.pid)
            restarts = max(0, len(pids) - 1)
            roles.append(self._role(name, process, restarts))
        return tuple(roles)

    def _role(self, name: str, process: psutil.Process | None, restarts: int) -> RoleStatus:
        if process is None:
            return RoleStatus(name, restarts=restarts)
        # Kept from look to look, because the processor's share is that since the last question.
        process = self._processes.setdefault(process.pid, process)
        try:
            return RoleStatus(
                name,
                process.pid,
                process.cpu_percent() / 100,
                process.memory_info().rss,
                time.time() - process.create_time(),
                restarts,
            )
        except psutil.Error:
            return RoleStatus(name, restarts=restarts)


class _ScoresReader:
    """The scores of a file that grows, each line read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._scores: list[float] = []
        self.last_step = 0

    def read(self) -> list[float]:
        if not self._path.is_file():
            return self._scores
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    self.last_step = int(row["step"])
                    self._scores.append(float(row["episode/score"]))
        return self._scores


def _last_logged_step(path: Path) -> int:
    """Of the file's last whole line; 0 where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):
            if line.endswith(b"\n"):
                return int(json.loads(line)["step"])
    return 0


def role_names(config: RunConfig) -> list[str]:
    """The processes that a run has on the machine that starts it."""
    if config.launcher == "serial":
        return [_SERIAL]
    names = ["agent"]
    names += [] if config.remote_replay else ["replay"]
    names += ["logger"]
    if not config.remote_envs and not config.offline:
        every = config.envs_per_process
        names += [f"env-{first}" for first in range(0, config.envs, every)]
        names += [f"env-{first}" for first in range(config.envs, config.all_envs, every)]
    return names


def _supervisor(logdir: Path) -> psutil.Process | None:
    """Who runs the fleet; None if nobody does."""
    record = read_record(logdir)
    running = record is not None and record.state in ("running", "ending")
    return supervisor_process(record) if record is not None and running else None


def _children(supervisor: psutil.Process | None) -> Iterator[tuple[str, psutil.Process]]:
    if supervisor is None:
        return
    with suppress(psutil.Error):
        for child in supervisor.children():
            with suppress(psutil.Error):
                title = " ".join(child.cmdline()).strip()
                if title.startswith(_TITLE) and child.status() != psutil.STATUS_ZOMBIE:
                    yield title.removeprefix(_TITLE), child


def _time_left(config: RunConfig, step: int, rate: float, seconds: float) -> float | None:
    ends = []
    if config.duration:
        ends.append(config.duration - seconds)
    if config.steps and rate > 0:
        ends.append((config.steps - step) / rate)
    return max(0.0, min(ends)) if ends else None
