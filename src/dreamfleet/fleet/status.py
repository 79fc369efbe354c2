"""What a run is doing: one description, which every display draws.

The lines of a run without a terminal, its live display, `dreamfleet status`, `status --json` and
the web page show a `RunStatus`. While the run is under way it is what its supervisor wrote to
`status.json` (`StatusWriter`). Of a run by hand, of an older version, or that has ended, the same
is derived from the run's directory and its logger (`Watcher`).
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import psutil

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig, read_config
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.claim import BeatWatch
from dreamfleet.fleet.record import (
    Event,
    FleetRecord,
    MachineStatus,
    ProcessUsage,
    RunNumbers,
    Scores,
    WorkerStatus,
    read_record,
    supervisor_process,
    write_record,
)
from dreamfleet.fleet.stall import Evidence, hanging, idle_machines, late_after, why_still
from dreamfleet.formatting import clock, readable
from dreamfleet.metrics.outputs.jsonl import JsonlTail, last_rows
from dreamfleet.roles.addresses import find_server
from dreamfleet.roles.health import read_health
from dreamfleet.roles.logger import RECENT_EPISODES
from dreamfleet.transport import Client, Future, TransportError
from dreamfleet.transport.address import parse

log = logging.getLogger(__name__)

RunState = Literal["running", "ending", "evaluating", "ended", "failed", "killed", "unknown"]

_UNDER_WAY = ("running", "ending", "evaluating")
_SAME_IN_JSON = (
    *("state", "responding", "message", "waiting", "hanging", "env_failures", "start", "step"),
    *("share", "seconds", "seconds_left", "score", "eval_score", "steps_per_second", "updates"),
    *("updates_per_second", "replay_ratio", "checkpoint_age", "supervisor"),
)
_WRITE_SECONDS = 1.0
_STALE_SECONDS = 10.0  # after which a supervisor that does not write counts as stuck
_SAMPLE_SECONDS = 5.0  # between two samples of the processes by the supervisor
_RATE_SECONDS = 30.0
_ACTOR_RATE = r"actor(-\d+)?/steps_per_second$"
_FORECAST_SECONDS = 60.0
_ANSWER_SECONDS = 0.5
_UNANSWERED_SECONDS = 5.0
_TAIL_BYTES = 1 << 17  # the last line of metrics is shorter
_SCORE_BYTES = 4 << 20  # some 60,000 episodes, 0.05 s
_CURVE_POINTS = 64


@dataclass(frozen=True, kw_only=True)
class RunStatus(RunNumbers):
    """Everything that displays show of a run."""

    config: RunConfig
    state: RunState
    """`killed`: the supervisor is gone and could not say so. `unknown`: it is on another machine,
    and there is no sign of life."""
    workers: tuple[WorkerStatus, ...]
    events: tuple[Event, ...] = ()
    """The newest failures and restarts, in order."""

    @property
    def running(self) -> bool:
        return self.state in _UNDER_WAY

    @property
    def complete(self) -> bool:
        """Whether it has made all its steps."""
        return 0 < self.config.steps <= self.step

    @property
    def score(self) -> float | None:
        """The mean of recent training episodes."""
        told = self.metrics.get("score")
        if told is not None:
            return float(told)
        recent = self.scores.recent
        return sum(recent) / len(recent) if recent else None

    @property
    def eval_score(self) -> float | None:
        """The mean of recent evaluation episodes."""
        return self._number("eval_score")

    @property
    def updates(self) -> float | None:
        return self._number("learner/updates")

    @property
    def updates_per_second(self) -> float | None:
        return self._number("learner/updates_per_second")

    @property
    def replay_ratio(self) -> float | None:
        return self._number("learner/replay_ratio")

    @property
    def env_failures(self) -> int:
        """How often environments have failed since the agent was started."""
        return int(self._number("env/failures") or 0)

    @property
    def start(self) -> str:
        """What the agent started from; empty as long as it is not known."""
        return str(self.metrics.get("learner/start", ""))

    @property
    def share(self) -> float | None:
        """How much of the run is done, from 0 to 1; None if it has no end."""
        shares = [self.step / self.config.steps] if self.config.steps else []
        if self.config.duration and self.running:
            shares.append(self.seconds / self.config.duration)
        return min(1.0, max(shares)) if shares else None

    @property
    def message(self) -> str:
        """What matters beyond numbers; empty if all is well."""
        if self.state == "evaluating":
            return "Training is over, and the agent is being evaluated."
        if self.running:
            reasons = [self.hanging, self.waiting] if self.waiting else [self.hanging]
            text = "; ".join(filter(None, reasons))
            begin = "Waiting: " if self.waiting else ""
            return f"{begin}{text}." if text else ""
        if self.complete:
            return "The run has ended: it has made all its steps."
        if self.state == "unknown":
            return "The run is on another machine, and there is no sign of life."
        how = "The run is not under way"
        if self.state == "failed":
            errors = [f"{worker.name}: {worker.error}" for worker in self.workers if worker.error]
            how = f"The run has failed{f' ({errors[0]})' if errors else ''}"
        elif self.state == "killed":
            how = "The run was killed"
        return f"{how}. The same command resumes it."

    def line(self) -> str:
        """The numbers in one line."""
        fields = [f"step {readable(self.step)}"]
        if self.config.steps:
            fields[0] += f" of {readable(self.config.steps)}"
        numbers = (
            ("score {}", self.score),
            ("evaluation {}", self.eval_score),
            ("updates {}", self.updates),
            ("{} updates/s", self.updates_per_second),
            ("{} steps/s", self.steps_per_second),
            ("replay ratio {}", self.replay_ratio),
        )
        fields += [text.format(readable(each)) for text, each in numbers if each is not None]
        if there := [each for each in self.machines if each.state == "joined"]:
            envs = sum(each.envs + each.eval_envs for each in there)
            fields.append(f"{_count(len(there), 'machine')} joined ({_count(envs, 'environment')})")
        if away := sum(each.state == "away" for each in self.machines):
            fields.append(f"{_count(away, 'machine')} away")
        if self.env_failures:
            rate = readable(self._number("env/failures_per_1000_steps") or 0.0)
            fields.append(f"{self.env_failures} failures of environments ({rate} in 1,000 steps)")
        if self.checkpoint_age is not None:
            fields.append(f"saved {clock(self.checkpoint_age)} ago")
        if self.seconds_left is not None:
            fields.append(f"{clock(self.seconds_left)} left")
        return "  ".join(fields)

    def to_json(self) -> str:
        """One JSON object; numbers that are not finite are null."""
        plain = {
            "task": self.config.task,
            "logdir": str(self.config.logdir),
            **{name: getattr(self, name) for name in _SAME_IN_JSON},
            "steps": self.config.steps,
            "best_score": self.scores.best,
            "episodes": self.scores.count,
            "workers": [asdict(worker) for worker in self.workers],
            "machines": [asdict(machine) for machine in self.machines],
            "events": [asdict(event) for event in self.events],
            "metrics": dict(self.metrics),
        }
        return msgspec.json.encode(plain, enc_hook=float).decode()

    def _number(self, key: str) -> float | None:
        value = self.metrics.get(key)
        return None if value is None else float(value)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


class StatusLines:
    """Says what a watcher sees, as plain lines.

    Args:
        watcher: Looks at the run.
        say: Takes the lines.
        tell: Takes those that come once, and that no display shows; None for `say`.
    """

    def __init__(
        self,
        watcher: Watcher,
        say: Callable[[str], None],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._watcher, self._say, self._tell = watcher, say, tell or say
        self._start = self._memory = ""
        self._training_since: float | None = None
        self._forecast = False

    def show(self) -> None:
        """Look once, and say it."""
        try:
            status = self._watcher.look(patience=1.0)
        except OSError as error:  # what cannot be shown must not end the run
            log.warning("The run cannot be looked at: %s", error)
            return
        if status is None:
            return
        if status.start and status.start != self._start:
            self._start = status.start
            self._say(f"Agent: {status.start}")
        memory = str(status.metrics.get("learner/memory", ""))
        if memory and memory != self._memory:
            self._memory = memory
            self._tell(f"Memory for training: {memory}")
        if status.updates and status.running and not self._forecast:
            now = time.monotonic()
            self._training_since = self._training_since or now
            moves = status.steps_per_second > 0 and not status.complete
            if moves and now - self._training_since >= _FORECAST_SECONDS:
                self._forecast = True
                self._tell(_forecast(status))
        if status.responding:  # what is known without the logger is old
            self._say(status.line())
        if status.message:
            self._say(status.message)


def _forecast(status: RunStatus) -> str:
    """What is known after some training, in a sentence."""
    used = [worker.usage for worker in status.workers] + [status.supervisor]
    memory = sum(usage.memory for usage in used if usage is not None)
    left = status.seconds_left
    togo = f"{clock(left)} to go at " if left is not None else ""
    return (
        f"After the first minute of training: {togo}{readable(status.steps_per_second)} steps/s; "
        f"its processes on this machine use {readable(memory)}B of memory."
    )


class Watcher:
    """Looks at a run again and again.

    Args:
        logdir: The run's directory.
        score_bytes: Of `scores.jsonl`, at most, that one look reads. The first looks at a long file
            know a part of its episodes; without a limit the first look takes longer.
        sample_seconds: Between two samples of what processes use.
    """

    def __init__(
        self, logdir: Path, score_bytes: float = _SCORE_BYTES, sample_seconds: float = 0.0
    ) -> None:
        self._logdir = logdir
        self._config = _ConfigReader(logdir)
        self._scores = _ScoresReader(logdir / "scores.jsonl", score_bytes)
        self._logger: _LoggerQuestions | None = None
        self._progress = _Progress()
        self._beat = BeatWatch(logdir)
        self._processes = _Processes(sample_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._logger is not None:
            self._logger.close()

    def look(self, patience: float = _ANSWER_SECONDS) -> RunStatus | None:
        """What the run is doing; None as long as there is no configuration in its directory.

        Args:
            patience: Seconds to wait for a sign of life from another machine, or for the logger of
                a run whose supervisor does not write. A later answer comes with the next look.
        """
        record = read_record(self._logdir)
        if record is None or record.run is None or not self._holds(record, patience):
            return self.derive(record, patience)
        config, _ = self._config.read()
        if config is None:
            return None
        return RunStatus(
            config=config,
            state=record.state,
            workers=record.workers,
            events=record.events,
            **vars(record.run),
        )

    def _holds(self, record: FleetRecord, patience: float) -> bool:
        """Whether what the supervisor wrote is still true."""
        if record.state not in _UNDER_WAY:
            return False
        if record.host != socket.gethostname():
            return self._beat.beats(patience)
        fresh = abs(time.time() - record.written) < _STALE_SECONDS
        return fresh and supervisor_process(record) is not None

    def derive(
        self,
        record: FleetRecord | None,
        patience: float,
        machines: tuple[MachineStatus, ...] | None = None,
    ) -> RunStatus | None:
        """The same from the run's directory, its logger and its processes. Machines that have
        joined are only known to the supervisor."""
        config, changed = self._config.read()
        if config is None:
            return None
        metrics, responding = self._ask(config, changed, record, patience)
        state = run_state(record, responding)
        running = state in _UNDER_WAY
        scores = self._scores.read()
        # A logger that was just started does not know the step yet.
        step = int(metrics.get("step", 0)) or max(
            self._scores.last_step, _last_logged_step(self._logdir / "metrics.jsonl")
        )
        now = time.time()
        self._progress.add(time.monotonic(), step, metrics)
        rate = self._progress.rate
        seconds = now - record.started if record and running else 0.0
        left = running and state != "evaluating"
        saved = Checkpoint(config.checkpoints).saved_at() if running else None
        status = RunStatus(
            config=config,
            state=state,
            responding=responding,
            step=step,
            scores=scores,
            metrics=metrics,
            steps_per_second=rate,
            seconds=seconds,
            seconds_left=_time_left(config, step, rate, seconds) if left else None,
            waiting="",
            checkpoint_age=None if saved is None else max(0.0, now - saved),
            workers=self._workers(record, running, now),
            supervisor=self._processes.usage(record) if record and running else None,
            machines=_left(record) if machines is None else machines,
            events=record.events if record else (),
        )
        if record is None or state != "running":
            return status
        folder = self._logdir / "workers"
        records = [read_health(folder / w.name) for w in record.workers if w.state == "running"]
        slow = hanging(records, config.env_timeout, now)
        return replace(
            status,
            waiting=self._waiting(status, record, now),
            hanging="; ".join(filter(None, [slow, *idle_machines(status.machines)])),
        )

    def _waiting(self, status: RunStatus, record: FleetRecord, now: float) -> str:
        """Why the run stands still; empty if it does not."""
        logger = None
        if not status.responding:
            asked = self._logger
            logger = f"the logger does not respond{asked.error}" if asked is not None else ""
        elif not self._progress.stands_still(status.config.log_every):
            return ""
        return why_still(
            Evidence(
                status.config,
                status.metrics,
                record.workers,
                status.machines,
                now,
                self._progress.still_for,
                status.complete,
                logger,
            )
        )

    def _ask(
        self, config: RunConfig, changed: bool, record: FleetRecord | None, patience: float
    ) -> tuple[dict[str, Any], bool]:
        """The newest metrics, and whether the logger responds."""
        if changed and self._logger is not None:
            self._logger.close()
            self._logger = None
        if self._logger is None:
            if not _can_ask(config, record):
                return {}, False
            self._logger = _LoggerQuestions(config)
        if record is not None and record.state in ("evaluating", "ended", "failed"):
            # The logger has ended.
            return self._logger.metrics, False
        self._logger.ask(patience)
        return self._logger.metrics, self._logger.responding

    def _workers(
        self, record: FleetRecord | None, running: bool, now: float
    ) -> tuple[WorkerStatus, ...]:
        if record is None:
            return ()
        if not running:
            return tuple(
                replace(worker, state="ended", pid=None, usage=None, seconds=0.0)
                for worker in record.workers
            )
        return tuple(
            replace(
                worker,
                seconds=max(0.0, now - worker.started) if worker.pid else 0.0,
                # A thread of the supervisor has no process of its own.
                usage=self._processes.usage(worker) if worker.pid != record.pid else None,
            )
            for worker in record.workers
        )


class StatusWriter:
    """Writes `status.json` once a second while the block runs, and at its end.

    Args:
        logdir: The run's directory.
        record: Returns the supervisor and its workers as they are now; None to write nothing.
        machines: Returns the machines that have joined.
    """

    def __init__(
        self,
        logdir: Path,
        record: Callable[[], FleetRecord | None],
        machines: Callable[[], tuple[MachineStatus, ...]] = tuple,
    ) -> None:
        self._logdir, self._record, self._machines = logdir, record, machines
        self._numbers: RunNumbers | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(_STALE_SECONDS)  # a shared directory may hang

    def _run(self) -> None:
        with Watcher(self._logdir, sample_seconds=_SAMPLE_SECONDS) as watcher:
            self._write(None)  # the workers, before the logger is asked
            while not self._over.wait(_WRITE_SECONDS):
                self._write(watcher)
        self._write(None)

    def _write(self, watcher: Watcher | None) -> None:
        try:
            record = self._record()
            if record is None:
                return
            status = None
            if watcher is not None:
                status = watcher.derive(record, _ANSWER_SECONDS, self._machines())
            if status is not None:
                names = RunNumbers.__dataclass_fields__
                self._numbers = RunNumbers(**{name: getattr(status, name) for name in names})
                record = replace(record, workers=status.workers)
            write_record(self._logdir, replace(record, written=time.time(), run=self._numbers))
        except Exception as error:  # such as a full disk, which must not end the run
            log.warning("The status of the run cannot be written: %s", error)


class _Processes:
    """What processes of this machine use, sampled now and then."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._found: dict[int, tuple[psutil.Process, float, ProcessUsage]] = {}

    def usage(self, of: WorkerStatus | FleetRecord) -> ProcessUsage | None:
        """None if it has no process on this machine."""
        pid, now = of.pid, time.monotonic()
        if pid is None or of.host != socket.gethostname():
            return None
        try:
            process, sampled, used = self._found.get(pid) or (psutil.Process(pid), -inf, None)
            if not process.is_running():
                process, sampled = psutil.Process(pid), -inf
            if used is None or now - sampled >= self._seconds:
                # Kept from sample to sample: the share of a CPU is that since the last one.
                used = ProcessUsage(process.cpu_percent() / 100, process.memory_info().rss)
                self._found[pid] = process, now, used
            return used
        except (psutil.Error, ValueError, OverflowError):
            self._found.pop(pid, None)
            return None


def _left(record: FleetRecord | None) -> tuple[MachineStatus, ...]:
    """The machines of a run whose supervisor does not answer for them any more."""
    known = record.run.machines if record and record.run else ()
    return tuple(replace(each, state="left", steps_per_second=0.0) for each in known)


def run_state(record: FleetRecord | None, responding: bool = False) -> RunState:
    """What a record says of a run, and whether its supervisor is alive."""
    if record is None:
        return "ended"
    if record.state in ("ended", "failed") or supervisor_process(record) is not None:
        return record.state
    if record.host == socket.gethostname():
        return "killed"
    return record.state if responding else "unknown"


def _can_ask(config: RunConfig, record: FleetRecord | None) -> bool:
    """Roles that are threads of one process may listen where no other process can reach them."""
    inside = record is not None and record.pid == os.getpid()
    return inside or parse(config.logger_addr).kind != "inproc"


class _LoggerQuestions:
    """Asks the logger how the run is doing, without waiting for long."""

    def __init__(self, config: RunConfig) -> None:
        self._client = Client(find_server(config, "logger"), "watcher", keys=config.run_keys)
        self._question: Future | None = None
        self._asked = 0.0
        self.metrics: dict[str, Any] = {}
        self.responding = False
        self.error = ""

    def ask(self, patience: float) -> None:
        """A question that was not answered yet is not asked again."""
        try:
            if self._question is None:
                self._question, self._asked = self._client.status(), time.monotonic()
            if self._question.wait(patience):
                question, self._question = self._question, None
                self.metrics, self.responding, self.error = question.result(), True, ""
            elif time.monotonic() - self._asked > _UNANSWERED_SECONDS:
                self.responding = False
        except TransportError as error:
            self._question, self.responding = None, False
            self.error = f": {str(error).rstrip('.')}"

    def close(self) -> None:
        self._client.close(0.0)  # a question that was not sent is dropped


class _Progress:
    """How fast a run makes steps, and whether it stands still."""

    def __init__(self) -> None:
        self._now = 0.0
        self._steps: deque[tuple[float, int]] = deque()
        self._step = 0
        self._step_since = self._updates_since = float("-inf")
        self._updates: float | None = None
        self._moved = False
        self._metrics: Mapping[str, Any] = {}

    def add(self, now: float, step: int, metrics: Mapping[str, Any]) -> None:
        first = self._step_since == float("-inf")
        updates = metrics.get("learner/updates")
        if first or step != self._step:
            self._moved = not first
            self._step_since = now
        if first or updates != self._updates or not self._step:  # the first steps come first
            self._updates_since = now
        if step < self._step or not step:  # what was before the first step does not count
            self._steps.clear()
        self._steps.append((now, step))
        while now - self._steps[0][0] > _RATE_SECONDS:
            self._steps.popleft()
        self._now, self._step, self._updates, self._metrics = now, step, updates, metrics

    @property
    def rate(self) -> float:
        """Steps a second over the last while; before that is known, what the actor reported."""
        then, before = self._steps[0]
        if str(self._metrics.get("learner/state", "")).startswith("compiling"):
            return 0.0  # whatever was reported before
        if self._now - then < 1.0:
            rates = [v for k, v in self._metrics.items() if re.match(_ACTOR_RATE, k)]
            return float(sum(rates))
        return (self._step - before) / (self._now - then)

    @property
    def still_for(self) -> float:
        """Seconds since the last step or the last update, whichever is longer ago."""
        return self._now - min(self._step_since, self._updates_since)

    def stands_still(self, log_every: float) -> bool:
        """Whether there were no steps, or no updates, for a while.

        Steps are reported at once, or, without environments, every `log_every` seconds. Updates are
        reported every `log_every` seconds, and start long after the first steps.
        """
        without_steps = self._now - self._step_since
        if without_steps > 1.5 * log_every:
            return True
        if not self._moved and self.rate == 0:  # nothing else is known at the first looks
            return True
        silence = float(self._metrics.get("learner/silence", 0.0))
        return max(silence, self._now - self._updates_since) > late_after(log_every)


class _ConfigReader:
    """The configuration, read again when it has changed: a resumed run has other addresses."""

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self._written = 0
        self._config: RunConfig | None = None

    def read(self) -> tuple[RunConfig | None, bool]:
        """The configuration, and whether it has changed."""
        try:
            written = (self._logdir / "config.json").stat().st_mtime_ns
        except OSError:
            return None, False
        changed = False
        if written != self._written:
            with suppress(ConfigError):
                self._config, self._written = read_config(self._logdir), written
                changed = True
        return self._config, changed


class _ScoreRow(msgspec.Struct):
    step: float
    score: float | None = msgspec.field(name="episode/score", default=None)


class _ScoresReader:
    """The scores of a file that grows. Each is read once, and none is kept."""

    def __init__(self, path: Path, most: float) -> None:
        self._lines = JsonlTail(path).lines
        self._most = most
        self._decode = msgspec.json.Decoder(_ScoreRow).decode
        self._count = 0
        self._best: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._curve: list[float] = []
        self._width = 1  # episodes of a point of the curve
        self._sum, self._summed = 0.0, 0  # of the next point
        self.last_step = 0

    def read(self) -> Scores:
        """What is known with the next lines."""
        for line in self._lines(self._most):
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                row = self._decode(line)
                self.last_step = max(self.last_step, int(row.step))
                if row.score is not None:
                    self._add(row.score)
        rest = [self._sum / self._summed] if self._summed else []
        return Scores(self._count, self._best, tuple(self._recent), (*self._curve, *rest))

    def _add(self, score: float) -> None:
        self._count += 1
        self._best = score if self._best is None else max(self._best, score)
        self._recent.append(score)
        self._sum, self._summed = self._sum + score, self._summed + 1
        if self._summed < self._width:
            return
        self._curve.append(self._sum / self._width)
        self._sum, self._summed = 0.0, 0
        if len(self._curve) == _CURVE_POINTS:
            pairs = zip(self._curve[::2], self._curve[1::2], strict=True)
            self._curve = [(first + second) / 2 for first, second in pairs]
            self._width *= 2


def _last_logged_step(path: Path) -> int:
    """Of the last complete line; 0 if there is none."""
    try:
        with path.open("rb") as file:
            rows = last_rows(file, _TAIL_BYTES)
    except FileNotFoundError:
        return 0
    for row in reversed(rows):
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            return int(row["step"])
    return 0


def _time_left(config: RunConfig, step: int, rate: float, seconds: float) -> float | None:
    if 0 < config.steps <= step:  # the last updates are made; their time is unknown
        return None
    ends = []
    if config.duration:
        ends.append(config.duration - seconds)
    if config.steps and rate > 0:
        ends.append((config.steps - step) / rate)
    return max(0.0, min(ends)) if ends else None
