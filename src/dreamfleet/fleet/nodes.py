"""Machines that join a run: each is a node that asks the run's supervisor what to start.

A machine asks every second what to run (`poll`), with a random token, and reports the health of its
workers and how they ended. One that the run does not know, because it is new, was lost, or the run
was resumed, joins with that. The answer lists workers as plain data, and where the actors listen.

Environments are fenced by incarnations (`dreamfleet.roles.fences`), so a machine that comes back
after its ids were given to another one cannot act in them any more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from dreamfleet import __version__
from dreamfleet.config import RunConfig
from dreamfleet.errors import DreamfleetError
from dreamfleet.fleet.launchers import ReportedWorker, RestartPolicy, Worker
from dreamfleet.fleet.preflight import step_bytes
from dreamfleet.fleet.record import MachineStatus
from dreamfleet.fleet.supervisor import Supervisor
from dreamfleet.metrics.timing import Rate
from dreamfleet.roles.addresses import (
    listen_address,
    published_address,
    server_name,
)
from dreamfleet.roles.episodes import groups_of
from dreamfleet.roles.fences import Fence, Fences, read_fences, write_fences
from dreamfleet.roles.health import HealthRecord, Number
from dreamfleet.roles.invitations import ROLE, Invited
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.roles.runtime import STOPPED
from dreamfleet.roles.spaces_file import SPACES_FILE, read_spaces
from dreamfleet.settings import Mark
from dreamfleet.transport import Caller, Server, TransportError
from dreamfleet.transport.address import AUTO, parse

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Between two questions of a machine."""
LOST_SECONDS = 60.0
"""After which others may get the ids of a machine that is not heard of."""
MAX_ENVS = 1 << 17
OUTPUT_LENGTH = 8000
_AWAY_SECONDS = 4.0
_RATE_SECONDS = 20.0
_KEPT_MACHINES = 16  # of those that have left
_GOODBYE_SECONDS = 3.0
_TEXTS = ("error", "traceback", "waiting")  # of a health record, which a terminal shows
_LOGGED = 2  # messages to the logger at a time
Name = Annotated[str, Meta(min_length=1, max_length=100)]
Line = Annotated[str, Meta(max_length=1000)]
WorkerName = Annotated[str, Meta(pattern=r"\A(env|eval)-[0-9]{1,6}\Z")]
"""A file of the machine that runs it has this name, which the run chooses."""
_Key = tuple[str, str]
"""The invitation and the token of a machine."""


class Refused(DreamfleetError):
    """A machine asks for what it cannot have; the message is shown there."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a machine offers, and what it knows of the run."""

    version: Name
    digest: Line
    """Of the settings that it knows; empty if it knows none."""
    host: Name
    envs: Annotated[int, Meta(ge=0, le=MAX_ENVS)]
    eval_envs: Annotated[int, Meta(ge=0, le=MAX_ENVS)]
    envs_per_process: Annotated[int, Meta(ge=1, le=MAX_ENVS)]


class WorkerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker is doing on its machine."""

    incarnation: Number
    pid: Number = 0
    code: Annotated[int, Meta(ge=-255, le=255)] | None = None
    """How it ended; None if it runs."""
    output: Annotated[str, Meta(max_length=OUTPUT_LENGTH)] = ""
    """The end of its log, if it ended."""
    health: HealthRecord = HealthRecord()


class MachineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a machine is doing."""

    workers: Annotated[dict[Name, WorkerReport], Meta(max_length=MAX_ENVS)] = {}
    why: Line = ""
    """Why it makes no steps."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is to run now."""

    over: str
    """How the run ended; empty if it has not."""
    digest: str
    """Of the run's `config` and `spaces`, which a machine is told that knows others."""
    addresses: dict[str, str]
    config: str = ""
    spaces: str = ""
    name: str = ""
    """Of the machine; empty if it has not joined."""
    dismissed: str = ""
    """Why the run does not want this machine any more."""
    workers: dict[WorkerName, Fence] = {}
    """The environments of each worker that is to run, with its incarnation."""


class MachineWorker(ReportedWorker):
    """A worker of a joined machine; each start makes a new one. Without an incarnation it was not
    started yet. An environment has nothing to save, so it counts as ended when it is to stop; its
    machine hears of it with its next question."""

    def __init__(self, host: str, fence: Fence, health: HealthRecord | None = None) -> None:
        super().__init__(host)
        self.fence, self.health = fence, health or HealthRecord()
        self._output = ""
        if not fence.incarnation:
            self.end(STOPPED)

    def output(self) -> str:
        return self._output

    def take(self, report: WorkerReport) -> None:
        said: dict[str, Any] = {name: _printable(getattr(report.health, name)) for name in _TEXTS}
        self.pid, self.health = report.pid, replace(report.health, **said)
        if report.code is not None:
            self._output = _printable(report.output)
            self.end(report.code)


@dataclass(eq=False)
class Machine:
    """A machine that has joined: a node of the supervisor."""

    name: str
    invitation: str
    workers: dict[str, MachineWorker]
    """By what they are called there; the supervisor calls them MACHINE/NAME."""
    start_worker: Callable[[Machine, str], MachineWorker]
    joined: float
    """On the clock of `JoinedNodes`, as all times here."""
    heard: float
    left: str | None = None
    """Why it has left, if it has."""
    dismissed: str = ""
    """Why the run does not want it any more."""
    why: str = ""
    rate: Rate = field(default_factory=partial(Rate, _RATE_SECONDS))

    def start(self, worker: Worker) -> MachineWorker:
        return self.start_worker(self, worker.name.removeprefix(f"{self.name}/"))

    def log_file(self, worker: Worker) -> Path:
        return Path(f"{self.name}:logs") / f"{worker.name.removeprefix(f'{self.name}/')}.log"

    def dismiss(self, why: str) -> None:
        self.dismissed = why
        self.end()

    def plan(self, run: RunConfig) -> list[Worker]:
        """Its workers, for the supervisor."""

        def health(name: str) -> HealthRecord:
            found = self.workers[name].health
            # NaN elsewhere ends the run only if it is set to.
            return replace(found, not_finite=found.not_finite and run.on_nan == "stop")

        policy = RestartPolicy(run.on_failure, run.max_restarts)
        kind = partial(Worker, role="env", function=int, restart=policy)
        return [kind(f"{self.name}/{each}", health=partial(health, each)) for each in self.workers]

    def orders(self) -> dict[str, Fence]:
        """What is to run there."""
        return {name: each.fence for name, each in self.workers.items() if each.wait(0) is None}

    def take(self, report: MachineReport, now: float) -> None:
        self.heard, self.why = now, _printable(report.why)
        for name, worker in self.workers.items():
            told = report.workers.get(name)
            if told is not None and told.incarnation == worker.fence.incarnation:
                worker.take(told)
        self.rate.add(now, self.steps)

    def end(self) -> None:
        for worker in self.workers.values():
            worker.terminate()

    def count(self, *, is_eval: bool) -> int:
        fences = (each.fence for each in self.workers.values())
        return sum(len(each.ids) for each in fences if each.is_eval == is_eval)

    @property
    def steps(self) -> int:
        return sum(each.health.steps for each in self.workers.values())

    def status(self, now: float) -> MachineStatus:
        records = [each.health for each in self.workers.values()]
        failed = max(records, key=lambda each: each.failures)
        away = now - self.heard > _AWAY_SECONDS
        gone = self.left is not None
        return MachineStatus(
            name=self.name,
            state="left" if gone else "away" if away else "joined",
            envs=self.count(is_eval=False),
            eval_envs=self.count(is_eval=True),
            seconds=now - (self.heard if gone else self.joined),
            silence=now - self.heard,
            steps=self.steps,
            steps_per_second=0.0 if gone else self.rate.value,
            failures=sum(each.failures for each in records),
            error=self.left or self.why or _printable(failed.error),
        )


class JoinedNodes:
    """Serves machines that join at an address, until the block ends."""

    def __init__(
        self,
        run: RunConfig,
        address: str,
        supervisor: Supervisor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._supervisor, self._clock = run, supervisor, clock
        self._lock = threading.RLock()
        self._nodes: dict[_Key, Machine] = {}
        self._left: deque[Machine] = deque(maxlen=_KEPT_MACHINES)
        try:
            self._newest = read_fences(run.logdir).newest
        except ValueError as error:
            self._newest = int(time.time())  # above all that count starts
            log.warning("%s", error)
        self._chunk_bytes = _chunk_bytes(run)
        self._description, self._host = _description(run), parse(address).host
        self._over = ""
        self._invited = Invited(run.logdir)
        self._server = Server(address, "nodes", keys=run.server_keys, **self._invited.hooks())
        for method in (self.poll, self.leave):  # nothing is doubled by a resend
            name = method.__name__
            self._server.bind(name, method, pass_caller=True, repeatable=True, roles=(ROLE,))
        with self._lock:
            self._write()  # nothing that a run before this one has started acts any more

    @property
    def address(self) -> str:
        return self._server.address

    def __enter__(self) -> Self:
        self._server.start(block=False)
        self._logger = LoggerClient(self._run, "nodes", _LOGGED)
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.close(flush=0.0)
        self._server.close()

    def end(self, why: str) -> None:
        """The run is over: wait a moment until every machine has heard it."""
        with self._lock:
            self._over = why
        deadline = time.monotonic() + _GOODBYE_SECONDS
        while time.monotonic() < deadline and any(m.state == "joined" for m in self.machines()):
            time.sleep(0.05)

    def log(self) -> None:
        """Tell the logger of the machines; called every `log_every` seconds."""
        if not self._logger.behind:
            with suppress(TransportError):  # it is restarting, and the next ones follow
                self._logger.call("add", -1, metrics(self.machines()))

    def machines(self) -> tuple[MachineStatus, ...]:
        """Those that have joined, then those that have left."""
        with self._lock:
            self._drop_gone()
            now = self._clock()
            return tuple(each.status(now) for each in (*self._nodes.values(), *self._left))

    # --- what machines call ----------------------------------------------------------------------

    def poll(self, caller: Caller, token: Name, asked: Asked, report: MachineReport) -> Any:
        """What a machine is to run now; one that is not known joins."""
        if asked.version != __version__:
            raise Refused(
                f"The run has Dreamfleet {__version__} and this machine {asked.version}: install "
                f"{__version__} here (pip install dreamfleet=={__version__})."
            )
        key, known = (caller.name, token), asked.digest == self._description["digest"]
        found = {"digest": asked.digest} if known else dict(self._description)
        with self._lock:
            self._drop_gone()
            node = self._nodes.get(key)
            if node is None and known and not self._over:
                node = self._nodes[key] = self._make_node(asked, caller.name)
                log.info("%s has joined with %s", node.name, _fences(node))
                self._supervisor.add(node, node.plan(self._run))
            if node is not None:
                node.take(report, self._clock())
                found |= {"name": node.name, "dismissed": node.dismissed, "workers": node.orders()}
                if self._over or node.dismissed:
                    self._drop(key, node.dismissed)
            told = addresses(self._run, self._host)
            return msgspec.to_builtins(Answer(over=self._over, addresses=told, **found))

    def leave(self, caller: Caller, token: Name) -> None:
        with self._lock:
            if (caller.name, token) in self._nodes:
                self._drop((caller.name, token), "")

    # --- environments ----------------------------------------------------------------------------

    def _make_node(self, asked: Asked, invitation: str) -> Machine:
        if invitation in self._invited.revoked():
            raise Refused("The key of this machine is not valid any more: it was revoked.")
        if not asked.envs + asked.eval_envs:
            raise Refused("A machine joins with one environment at least.")
        run, size = self._run, asked.envs_per_process
        if size > run.envs_per_process:
            most = run.envs_per_process
            raise Refused(
                f"A process of this run may have at most {most} environments: use "
                f"--envs-per-process {most} or less."
            )
        if run.eval_every and asked.eval_envs:
            raise Refused("This run plays its evaluations itself (eval_every): use --envs only.")
        name, ids, now = self._unused_name(asked.host), self._free_ids(asked), self._clock()
        workers: dict[str, MachineWorker] = {}
        for is_eval, own in ((False, ids[: asked.envs]), (True, ids[asked.envs :])):
            for mine in groups_of(own, size, run.actors):
                worker = MachineWorker(name, Fence(mine, is_eval, 0, invitation))
                workers[f"{'eval' if is_eval else 'env'}-{len(workers)}"] = worker
        return Machine(name, invitation, workers, self._start, now, now)

    def _start(self, node: Machine, name: str) -> MachineWorker:
        """Start a worker with the next incarnation, which may act from then on. If that cannot be
        recorded (`OSError`), the worker is not started."""
        with self._lock:
            self._newest += 1
            before = node.workers[name]
            fence = replace(before.fence, incarnation=self._newest)
            worker = node.workers[name] = MachineWorker(node.name, fence, before.health)
            try:
                self._write()
            except OSError:
                worker.kill()
                raise
            return worker

    def _write(self) -> None:
        """Record which environments may act."""
        started = (e for node in self._nodes.values() for e in _fences(node) if e.incarnation)
        write_fences(self._run.logdir, Fences(self._newest, tuple(started)))

    def _free_ids(self, asked: Asked) -> tuple[int, ...]:
        """The lowest ids that are free, after the run's own: the streams of the replay stay few."""
        wanted = asked.envs + asked.eval_envs
        fences = (each for node in self._nodes.values() for each in _fences(node))
        used = {envid for each in fences for envid in each.ids}
        if wanted > (room := self._room(len(used))):
            raise Refused(
                f"{wanted} more environments are too many: {len(used)} have joined, and the replay "
                f"and the disk of the run have room for {room} more."
            )
        free = (envid for envid in count(self._run.all_envs) if envid not in used)
        return tuple(islice(free, wanted))

    def _room(self, joined: int) -> int:
        """Environments that may still join: each has a stream in the replay, which reserves files,
        and one at least has to become long enough to learn from."""
        run, files = self._run, 2 * self._chunk_bytes
        room = min(MAX_ENVS, run.replay.capacity // run.window - run.envs) - joined
        if files and run.replay.max_bytes:
            room = min(room, run.replay.max_bytes // files - run.envs - joined)
        if files and not run.remote_replay:  # a full disk would end the run
            room = min(room, shutil.disk_usage(run.logdir).free // files)
        return max(0, room)

    def _unused_name(self, host: str) -> str:
        name = "".join(letter if letter.isprintable() else "?" for letter in host).replace("/", "-")
        taken = {node.name for node in self._nodes.values()}
        names = (name if number == 1 else f"{name} ({number})" for number in count(1))
        return next(each for each in names if each not in taken)

    # --- machines that leave ---------------------------------------------------------------------

    def _drop(self, key: _Key, why: str) -> None:
        node = self._nodes.pop(key)
        self._supervisor.remove(node)  # first: so the end of its workers is no failure
        node.end()
        node.left = why
        self._left.append(node)
        with suppress(OSError):  # what it may act in is decided when its ids are given to another
            self._write()
        log.info("%s has left%s", node.name, f": {why}" if why else "")

    def _drop_gone(self) -> None:
        """Drop machines that are lost or revoked."""
        now, revoked = self._clock(), self._invited.revoked()
        for key, node in list(self._nodes.items()):
            if node.invitation in revoked:
                self._drop(key, f"its invitation {node.invitation!r} was revoked")
            elif now - node.heard > LOST_SECONDS:
                self._drop(key, f"has been silent for {LOST_SECONDS:g} s")


def _fences(node: Machine) -> list[Fence]:
    return [each.fence for each in node.workers.values()]


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


def metrics(machines: Iterable[MachineStatus]) -> dict[str, float]:
    """What the logger is told of machines that have joined."""
    there = [each for each in machines if each.state != "left"]
    return {
        "machines/joined": float(sum(each.state == "joined" for each in there)),
        "machines/away": float(sum(each.state == "away" for each in there)),
        "machines/environments": float(sum(each.envs + each.eval_envs for each in there)),
        "machines/steps_per_second": sum(each.steps_per_second for each in there),
        "machines/failures": float(sum(each.failures for each in there)),
    }


def addresses(run: RunConfig, host: str) -> dict[str, str]:
    """Where the actors listen. A host of `*` stands for the one by which the machine has reached
    the run, which listens at `host`."""
    found = {}
    for index in range(run.actors):
        listen = listen_address(run, "actor", index)
        address = published_address(run.logdir, "actor", index) if AUTO in listen else listen
        if not address:
            continue
        parsed = parse(address)
        if parsed.kind == "tcp":
            here = parsed.host in ("*", "0.0.0.0", "::", host)
            text = f"tcp://*:{parsed.port}" if here else parsed.text
            found[server_name("actor", index)] = text
    return found


def _chunk_bytes(run: RunConfig) -> int:
    """Bytes that the replay reserves at once for an environment; 0 if that is not known."""
    spaces = read_spaces(run, run.logdir)
    return step_bytes(run, *spaces) * run.replay.chunk if spaces else 0


def _description(run: RunConfig) -> dict[str, Any]:
    plain = json.loads(run.to_json())
    # No others are sent: some hold secrets, and one that changes is no reason to make the
    # environments again.
    told = {each.path: plain[each.path] for each in run.settings(mark=Mark.JOINED)}
    # How many the run has itself is checked there. Environments need nothing of the agent, whose
    # code may be the user's own.
    text = json.dumps({**told, "envs": max(run.envs, run.actors), "agent": "random"})
    try:
        spaces = (Path(run.logdir) / SPACES_FILE).read_text()
    except OSError:
        spaces = ""
    digest = hashlib.blake2b((text + spaces).encode(), digest_size=16).hexdigest()
    return {"config": text, "spaces": spaces, "digest": digest}
