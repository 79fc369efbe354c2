"""The coordinator: whom machines ask that join a run, and who hands out environment ids.

It is a server in the supervisor's process. A machine asks what the run is (`describe`), takes ids
for its environments (`join`), says every second that it is there (`beat`), and gives the ids back
(`leave`). With each answer it hears where the actor and the evaluator listen at that moment; it
needs neither the run's directory nor a clock that agrees with another.

An id belongs to one machine at a time. The machine holds it on a lease: one that is not heard of
for `LEASE_SECONDS` has lost its ids, and others may get them. The machine itself ends its
environments earlier (`HOLD_SECONDS`), so that two of the same id never act.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

import dreamfleet
from dreamfleet.clock import LocalClock
from dreamfleet.config import JOINED, JOINED_EVAL, RunConfig
from dreamfleet.errors import DreamfleetError
from dreamfleet.fleet.preflight import step_bytes
from dreamfleet.roles.addresses import (
    RoleName,
    listen_address,
    published_address,
    server_name,
)
from dreamfleet.roles.episodes import MOST_JOINED
from dreamfleet.roles.invitations import ROLE, hooks_of, invited
from dreamfleet.roles.logger import LoggerClient
from dreamfleet.roles.machines import (
    MachineRecord,
    read_machines,
    write_machines,
)
from dreamfleet.roles.spaces_file import SPACES_FILE, read_spaces
from dreamfleet.settings import Mark
from dreamfleet.transport import Caller, Server, TransportError
from dreamfleet.transport.address import AUTO, parse

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Between two signs of life of a machine."""
LEASE_SECONDS = 60.0
"""After which a machine that is not heard of has lost its ids."""
HOLD_SECONDS = 45.0
"""After which a machine that hears nothing ends its environments."""
MOST_MACHINES = 4096
MOST_ENVS = 1 << 17
_AWAY_SECONDS = 4.0
_RATE_SECONDS = 20.0
_WRITE_SECONDS = 2.0
_KEEP_LEFT = 16
_GOODBYE_SECONDS = 3.0

Name = Annotated[str, Meta(min_length=1, max_length=100)]
Number = Annotated[int, Meta(ge=0, le=1 << 60)]
Line = Annotated[str, Meta(max_length=1000)]


class Refused(DreamfleetError):
    """What a machine asks for cannot be; the message is for the person in front of it."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a machine asks for when it joins."""

    version: Name
    host: Name
    envs: Annotated[int, Meta(ge=0, le=MOST_ENVS)]
    eval_envs: Annotated[int, Meta(ge=0, le=MOST_ENVS)]
    envs_per_process: Annotated[int, Meta(ge=1, le=MOST_ENVS)]


class MachineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a machine is doing."""

    steps: Number = 0
    failures: Number = 0
    error: Line = ""


@dataclass
class Lease:
    """The ids of one machine."""

    machine: MachineRecord
    heard: float
    """On the clock of `Leases`."""
    generation: int
    steps: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def ids(self) -> tuple[int, ...]:
        return self.machine.envs + self.machine.eval_envs


class Leases:
    """Which ids belong to which machine. Not thread-safe."""

    def __init__(
        self,
        most_train: int = MOST_ENVS,
        most_eval: int = MOST_ENVS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = {JOINED: most_train, JOINED_EVAL: most_eval}
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._left: deque[MachineRecord] = deque(maxlen=_KEEP_LEFT)
        # Not from the start again: after a resume environments would play the same episodes.
        self._generation = secrets.randbits(31)

    def __len__(self) -> int:
        return len(self._leases)

    def restore(self, machines: Iterable[MachineRecord]) -> None:
        """Keep the ids of machines that a coordinator before this one knew."""
        for each in machines:
            if each.holder and len(self._leases) < MOST_MACHINES:
                away = replace(each, state="away", steps_per_second=0.0)
                self._leases[each.holder] = Lease(away, self._clock(), self._next())
            else:
                self._left.append(replace(each, state="left", holder=""))

    def join(self, asked: Asked, caller: Caller) -> tuple[str, Lease]:
        """New ids for a machine; returns what it proves itself with, and its lease.

        Raises:
            Refused: There are too many machines, or environments.
        """
        self.expire()
        if len(self._leases) >= MOST_MACHINES:
            raise Refused(f"{MOST_MACHINES} machines have joined this run, which are the most.")
        token = secrets.token_urlsafe(24)
        machine = MachineRecord(
            name=self._unused_name(asked.host),
            state="joined",
            envs=self._free_ids(JOINED, asked.envs),
            eval_envs=self._free_ids(JOINED_EVAL, asked.eval_envs),
            envs_per_process=asked.envs_per_process,
            joined=time.time(),
            heard=time.time(),
            invitation=caller.name,
            address=caller.address,
            holder=_digest(token),
        )
        lease = Lease(machine, self._clock(), self._next())
        self._leases[machine.holder] = lease
        return token, lease

    def beat(self, token: str, report: MachineReport) -> Lease | None:
        """A sign of life; None if the machine has lost its ids."""
        self.expire()
        lease = self._leases.get(_digest(token))
        if lease is not None:
            now = self._clock()
            lease.heard = now
            self._take(lease, report, now)
        return lease

    def leave(self, token: str, error: str = "") -> Lease | None:
        """Give the ids of a machine back; None if it had none."""
        lease = self._leases.pop(_digest(token), None)
        if lease is not None:
            self._note_left(lease.machine, error or lease.machine.error)
        return lease

    def revoke(self, invitations: Collection[str]) -> None:
        """Take back the ids of machines whose invitation is not good any more."""
        for holder, lease in list(self._leases.items()):
            if lease.machine.invitation in invitations:
                del self._leases[holder]
                why = f"its invitation {lease.machine.invitation!r} was revoked"
                self._note_left(lease.machine, why)

    def expire(self) -> None:
        """Take back the ids of machines that are not heard of any more."""
        now = self._clock()
        for holder, lease in list(self._leases.items()):
            if now - lease.heard > LEASE_SECONDS:
                del self._leases[holder]
                silence = f"was not heard of for {LEASE_SECONDS:g} s"
                self._note_left(lease.machine, silence)
                log.warning("%s %s: others may get its ids", lease.machine.name, silence)

    def machines(self) -> list[MachineRecord]:
        """Everybody who is there, or was a while ago."""
        self.expire()
        now, there = self._clock(), []
        for lease in sorted(self._leases.values(), key=lambda lease: lease.machine.joined):
            away = now - lease.heard > _AWAY_SECONDS
            there.append(replace(lease.machine, state="away") if away else lease.machine)
        return [*there, *self._left]

    def _take(self, lease: Lease, report: MachineReport, now: float) -> None:
        steps = lease.steps
        if steps and report.steps < steps[-1][1]:  # it has started again
            steps.clear()
        steps.append((now, report.steps))
        while now - steps[0][0] > _RATE_SECONDS:
            steps.popleft()
        since, before = steps[0]
        seconds = now - since
        lease.machine = replace(
            lease.machine,
            state="joined",
            heard=time.time(),
            steps=report.steps,
            steps_per_second=(report.steps - before) / seconds if seconds > 0 else 0.0,
            failures=report.failures,
            error=report.error,
        )

    def _note_left(self, machine: MachineRecord, error: str) -> None:
        gone = replace(machine, state="left", error=error, holder="", steps_per_second=0.0)
        self._left.append(replace(gone, heard=time.time()))

    def _free_ids(self, first: int, wanted: int) -> tuple[int, ...]:
        """The lowest ids that nobody has: the streams of the replay stay few."""
        used = {envid for lease in self._leases.values() for envid in lease.ids}
        there = sum(first <= envid < first + MOST_ENVS for envid in used)
        if there + wanted > self._most[first]:
            kind = "evaluation" if first == JOINED_EVAL else "training"
            raise Refused(
                f"{wanted} more {kind} environments are too many: {there} have joined, and there "
                f"is room for {self._most[first]} in the run's replay."
            )
        return tuple(islice((envid for envid in count(first) if envid not in used), wanted))

    def _unused_name(self, host: str) -> str:
        name = "".join(letter if letter.isprintable() else "?" for letter in host)
        taken = {lease.machine.name for lease in self._leases.values()}
        names = (name if number == 1 else f"{name} ({number})" for number in count(1))
        return next(each for each in names if each not in taken)

    def _next(self) -> int:
        self._generation += 1
        return self._generation


def _digest(token: str) -> str:
    return hashlib.blake2b(token.encode(), digest_size=16).hexdigest()


class Coordinator:
    """Serves machines that join, until the block ends."""

    def __init__(
        self, run: RunConfig, address: str, on_failure: Callable[[str], None] = log.error
    ) -> None:
        self._run, self._on_failure = run, on_failure
        self._lock = threading.Lock()
        self._chunk_bytes = _chunk_bytes(run)
        room = _room(run, self._chunk_bytes)
        self._leases = Leases(room, MOST_JOINED if run.eval_every else MOST_ENVS)
        self._leases.restore(read_machines(run.logdir))
        self._description, self._host = _description(run), parse(address).host
        self._over = ""
        self._written = ""
        self._stop = threading.Event()
        self._invited = invited(run)
        hooks = hooks_of(self._invited)
        self._server = Server(address, "coordinator", keys=run.server_keys, **hooks)
        # Nothing is doubled by a resend: ids that nobody uses expire.
        may: dict[str, Any] = {"repeatable": True, "roles": (ROLE,)}
        self._server.bind("join", self.join, pass_caller=True, **may)
        for name in ("describe", "beat", "leave"):
            self._server.bind(name, getattr(self, name), **may)
        self._thread = threading.Thread(target=self._keep, name="coordinator", daemon=True)

    @property
    def address(self) -> str:
        return self._server.address

    def __enter__(self) -> Self:
        self._server.start(block=False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._server.close()
        with self._lock:
            self._write()

    def end(self, why: str) -> None:
        """The run is over: tell every machine, and wait a moment until all have heard it."""
        with self._lock:
            self._over = why
        deadline = time.monotonic() + _GOODBYE_SECONDS
        while time.monotonic() < deadline and self._present():
            self._stop.wait(0.05)

    def _present(self) -> bool:
        with self._lock:
            return any(each.state == "joined" for each in self._leases.machines())

    # --- what machines call ----------------------------------------------------------------------

    def describe(self, version: Any) -> dict[str, Any]:
        """What the run is, for a machine with this version of Dreamfleet."""
        _check_version(_checked(version, Name))
        return {"version": dreamfleet.__version__, **self._description, **self._now()}

    def join(self, caller: Caller, asked: Any) -> dict[str, Any]:
        """Ids for the environments of a machine."""
        request = _checked(asked, Asked)
        _check_version(request.version)
        if not request.envs + request.eval_envs:
            raise Refused("A machine joins with one environment at least.")
        most = self._run.envs_per_process
        if request.envs_per_process > most:
            raise Refused(
                f"The policy of this run is made for {most} environments of a process at most: "
                f"use --envs-per-process {most} or less."
            )
        self._check_disk(request.envs + request.eval_envs)
        with self._lock:
            if self._over:
                raise Refused(self._over)
            token, lease = self._leases.join(request, caller)
            self._write()
        log.info("%s has joined with environments %s", lease.machine.name, lease.ids)
        return {
            "token": token,
            "name": lease.machine.name,
            "envs": list(lease.machine.envs),
            "eval_envs": list(lease.machine.eval_envs),
            "generation": lease.generation,
            "digest": self._description["digest"],
            **self._now(),
        }

    def _check_disk(self, envs: int) -> None:
        """The replay reserves its files for each environment, and a full disk would end the run."""
        if self._run.remote_replay or not self._chunk_bytes:
            return
        free = shutil.disk_usage(self._run.logdir).free
        if 2 * envs * self._chunk_bytes > free:
            most = free // (2 * self._chunk_bytes)
            raise Refused(
                f"The disk of the run has room for {most} more environments, not {envs}: join with "
                "fewer, or make room there."
            )

    def beat(self, token: Any, report: Any) -> dict[str, Any]:
        """A sign of life, and how the machine is doing."""
        proof, told = _checked(token, Name), _checked(report, MachineReport)
        with self._lock:
            lease = self._leases.beat(proof, told)
            if self._over and lease is not None:
                self._leases.leave(proof)
        known = lease is not None
        return {"known": known, "digest": self._description["digest"], **self._now()}

    def leave(self, token: Any, error: Any, not_finite: Any = False) -> None:
        """A machine leaves; with an error, because something failed there, such as NaN."""
        proof, why, nan = _checked(token, Name), _checked(error, Line), _checked(not_finite, bool)
        with self._lock:
            lease, over = self._leases.leave(proof, why), self._over
            self._write()
        if lease is None:
            return
        log.info("%s has left%s", lease.machine.name, f": {why}" if why else "")
        # A run that is over is not failed by what its end does to others.
        ends_run = self._run.on_failure == "stop" or (nan and self._run.on_nan == "stop")
        if why and ends_run and not over:
            self._on_failure(f"The joined machine {lease.machine.name} failed: {why}")

    def _now(self) -> dict[str, Any]:
        return {"over": self._over, "addresses": addresses(self._run, self._host)}

    # --- what is kept ----------------------------------------------------------------------------

    def _keep(self) -> None:
        """Write who is there, and tell the logger."""
        should_log, run = LocalClock(self._run.log_every), self._run
        logger = LoggerClient(run, "coordinator", 2)
        try:
            while not self._stop.wait(min(_WRITE_SECONDS, run.log_every)):
                with self._lock:
                    if self._invited:
                        self._leases.revoke(self._invited.revoked())
                    self._write()
                    machines = self._leases.machines()
                if should_log() and logger.stats()["inflight"] < 2:
                    with suppress(TransportError):  # it is restarting, and the next ones follow
                        logger.call("add", -1, metrics(machines))
        finally:
            logger.close(flush=0.0)

    def _write(self) -> None:
        machines = self._leases.machines()
        content = repr(machines)
        if content == self._written:
            return
        try:
            write_machines(self._run.logdir, machines)
            self._written = content
        except OSError as error:  # a full disk must not keep machines from joining
            log.warning("The list of machines cannot be written: %s", error)


def metrics(machines: Iterable[MachineRecord]) -> dict[str, float]:
    """What the logger is told of machines that have joined."""
    there = [each for each in machines if each.state != "left"]
    return {
        "machines/joined": float(sum(each.state == "joined" for each in there)),
        "machines/away": float(sum(each.state == "away" for each in there)),
        "machines/environments": float(sum(len(m.envs) + len(m.eval_envs) for m in there)),
        "machines/steps_per_second": sum(each.steps_per_second for each in there),
        "machines/failures": float(sum(each.failures for each in there)),
    }


def addresses(run: RunConfig, host: str) -> dict[str, str]:
    """Where the roles listen that joined machines call. A host of `*` stands for the one by which
    the machine has reached the coordinator, which listens at `host`."""
    called: list[tuple[RoleName, int]] = [("actor", index) for index in range(run.actors)]
    if run.eval_every:
        called.append(("evaluator", 0))
    found = {}
    for role, index in called:
        listen = listen_address(run, role, index)
        address = published_address(run.logdir, role, index) if AUTO in listen else listen
        if not address:
            continue
        parsed = parse(address)
        if parsed.kind == "tcp":
            here = parsed.host in ("*", "0.0.0.0", "::", host)
            text = f"tcp://*:{parsed.port}" if here else parsed.text
            found[server_name(role, index)] = text
    return found


def _room(run: RunConfig, chunk_bytes: int) -> int:
    """Training environments that may join: each has a stream in the replay, and one at least has
    to become long enough to learn from."""
    most = run.replay.capacity // run.window
    if run.replay.max_bytes and chunk_bytes:
        most = min(most, run.replay.max_bytes // (2 * chunk_bytes))
    return max(0, min(MOST_ENVS, most - run.envs))


def _chunk_bytes(run: RunConfig) -> int:
    """Bytes that the replay reserves at once for an environment; 0 if that is not known."""
    spaces = read_spaces(run, run.logdir)
    return step_bytes(run, *spaces) * run.replay.chunk if spaces else 0


def _description(run: RunConfig) -> dict[str, Any]:
    plain = json.loads(run.to_json())
    # No others are told: some hold secrets, and one that changes is no reason to make the
    # environments again.
    told = {each.path: plain[each.path] for each in run.settings(mark=Mark.JOINED)}
    # How many the run has itself is checked there. Environments need nothing of the agent, whose
    # code may be the person's own.
    text = json.dumps({**told, "envs": max(run.envs, run.actors), "agent": "random"})
    try:
        spaces = (Path(run.logdir) / SPACES_FILE).read_text()
    except OSError:
        spaces = ""
    digest = hashlib.blake2b((text + spaces).encode(), digest_size=16).hexdigest()
    return {"config": text, "spaces": spaces, "digest": digest}


def _check_version(version: str) -> None:
    if version != dreamfleet.__version__:
        raise Refused(
            f"The run has Dreamfleet {dreamfleet.__version__} and this machine {version}: install "
            f"{dreamfleet.__version__} here (pip install dreamfleet=={dreamfleet.__version__})."
        )


def _checked(value: Any, kind: Any) -> Any:
    """A value from the network.

    Raises:
        Refused: It is something else.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
        raise Refused(f"This is no valid request: {error}.") from None
