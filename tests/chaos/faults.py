"""How each kind of fault is done to a fleet, and when the fleet has recovered from it."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Self

import psutil

from benchmarks.malformed import METHODS, NONSENSE, connections, stranger
from chaos.fleet import STOPPED_BY_SIGNAL, Fleet, cut
from chaos.schedule import SUPERVISOR, Fault, Way
from dreamfleet.errors import DreamfleetError
from dreamfleet.roles.health import read_health
from dreamfleet.transport import Client, Disconnected, Keys, RemoteError, Timeout, TransportError

_POLL_SECONDS = 0.005
_RECOVERY_SECONDS = 120.0  # after which a fleet counts as not recovered
_MOMENT_SECONDS = 12.0  # to wait for the moment of a fault
_CALL_SECONDS = 5.0
_CONNECTIONS = 8  # of an attack
_HOW: dict[Way, int] = {"up": socket.SHUT_RD, "down": socket.SHUT_WR, "both": socket.SHUT_RDWR}


class ChaosError(DreamfleetError):
    """The fleet did not recover from a fault, or has ended by itself."""


class Recovery(NamedTuple):
    """How long something was away."""

    role: str
    """Of a worker that has ended; or `stopped`, `network`, `disk`, `supervisor`."""
    seconds: float


@dataclass
class Outcome:
    """What came of a fault."""

    fault: Fault
    detail: str = ""
    at: float = 0.0
    """Seconds since the first fault."""
    recoveries: list[Recovery] = field(default_factory=list)
    collateral: list[str] = field(default_factory=list)
    """Workers that were restarted although the fault did not hit them."""
    cut: dict[str, int] = field(default_factory=dict)
    """Connections that were shut down, by the kind of their socket."""
    sent: int = 0
    """Requests of an attack."""
    accepted: list[str] = field(default_factory=list)
    """Those that were carried out."""

    def __str__(self) -> str:
        text = f"{self.fault} ({self.detail})" if self.detail else str(self.fault)
        times = ", ".join(f"{role} {seconds:.2f} s" for role, seconds in self.recoveries)
        return f"{text}: {times or f'{self.sent} requests'}"


class Injector:
    """Does faults to a fleet, one after the other."""

    def __init__(self, fleet: Fleet, disk: Disk, seed: int) -> None:
        self._fleet, self._disk = fleet, disk
        self._rng = random.Random(seed)
        self.ended: Counter[str] = Counter()
        """How often a process of each role was ended."""
        self._hit: set[str] = set()  # workers that the present fault has ended
        self._pids: dict[str, int] = {}  # that got the last signals
        self._disk_was_full = False  # at the fault before
        self.orphans: list[float] = []
        """Seconds for which workers outlived a killed supervisor."""

    def do(self, fault: Fault) -> Outcome:
        """Do a fault to the fleet; returns when the fleet has recovered from it.

        Raises:
            ChaosError: It has not.
        """
        self._await_all()
        before = self._fleet.workers()
        self._hit = set()
        outcome = Outcome(fault)
        getattr(self, f"_{fault.kind}")(fault, outcome)
        self._await_all()
        # A worker may end a moment after the disk was full, which is not the next fault's doing.
        disk_was_full, self._disk_was_full = self._disk_was_full, fault.kind == "fill"
        if fault.kind != "fill" and SUPERVISOR not in self._hit and not disk_was_full:
            after = self._fleet.workers()
            changed = [name for name in before if after[name].pid != before[name].pid]
            outcome.collateral = sorted(set(changed) - self._hit)
        return outcome

    # --- processes -------------------------------------------------------------------------------

    def _kill(self, fault: Fault, outcome: Outcome) -> None:
        if fault.targets == (SUPERVISOR,):
            self._end_fleet(signal.SIGKILL, outcome)
            return
        self._await_moment(fault, outcome)
        now = time.monotonic()
        self._send_all(fault.targets, signal.SIGKILL)
        self._await_recovery(dict.fromkeys(fault.targets, now), outcome)

    def _terminate(self, fault: Fault, outcome: Outcome) -> None:
        if fault.targets == (SUPERVISOR,):
            self._end_fleet(signal.SIGTERM, outcome)
            return
        ended = {}
        for name, pid in self._send_all(fault.targets, signal.SIGTERM).items():
            self._await(partial(_is_gone, pid), f"{name} to end")
            ended[name] = time.monotonic()
        self._await_recovery(ended, outcome)

    def _stop(self, fault: Fault, outcome: Outcome) -> None:
        pids = self._send_all(fault.targets, signal.SIGSTOP)
        self._hit.clear()  # they do not end
        time.sleep(fault.seconds)
        for pid in pids.values():
            with suppress(psutil.Error):
                psutil.Process(pid).resume()
        self._await_steps("stopped", outcome)

    def _send_all(self, names: Iterable[str], number: signal.Signals) -> dict[str, int]:
        pids = {}
        for name in names:
            self._hit.add(name)
            self.ended[_role(name)] += number != signal.SIGSTOP
            self._await(partial(self._fleet.pid, name), f"{name} to run")
            if pid := self._fleet.signal(name, number):
                pids[name] = self._pids[name] = pid
        return pids

    def _end_fleet(self, how: signal.Signals, outcome: Outcome) -> None:
        begin = time.monotonic()
        self._hit.add(SUPERVISOR)
        self.ended[SUPERVISOR] += 1
        code = self._fleet.end(how)
        lived = self._fleet.wait_until_gone()
        if how == signal.SIGKILL:
            self.orphans.append(lived)
        elif code != STOPPED_BY_SIGNAL:
            raise ChaosError(f"The supervisor ended with code {code} when it was asked to end.")
        self._fleet.start()
        self._await_steps(SUPERVISOR, outcome, begin)

    def _await_moment(self, fault: Fault, outcome: Outcome) -> None:
        """Wait for the moment of a kill, which need not come: there may be nothing to compile."""
        name, moment = fault.targets[0], fault.moment
        if moment in ("restart", "compile"):
            pids = self._send_all([name], signal.SIGKILL)
            self._await(
                lambda: self._fleet.pid(name) not in (None, *pids.values()), f"{name} to start"
            )
        came = True
        if moment == "restart":
            time.sleep(fault.seconds)
        elif moment == "compile":
            came = self._came(self._compiles)
        elif moment == "save":
            folder = self._fleet.logdir / "ckpt" / name
            came = self._came(lambda: any(folder.glob(".writing-*")))
        outcome.detail = "" if came else f"there was no {moment}"

    def _came(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + _MOMENT_SECONDS
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS / 25)
        return True

    def _compiles(self) -> bool:
        agent = read_health(self._fleet.config.logdir / "workers" / "agent")
        return "is compiling" in agent.waiting

    # --- connections and the disk ----------------------------------------------------------------

    def _cut(self, fault: Fault, outcome: Outcome) -> None:
        (name,) = fault.targets
        pid, address = self._fleet.pid(name), self._fleet.address(name)
        if not pid or not address:
            outcome.detail = "it serves no other process"
            return
        try:
            kinds = cut(pid, address, _HOW[fault.way])
        except PermissionError:
            outcome.detail = "connections of another process cannot be cut here"
            return
        outcome.cut = dict(Counter(kind.name for kind in kinds))
        outcome.detail = f"{len(kinds)} connections"
        self._await_steps("network", outcome)

    def _lose(self, fault: Fault, outcome: Outcome) -> None:
        """Let requests arrive at a stopped server, and cut its connections before it reads them: it
        carries them out, and their replies are lost."""
        (name,) = fault.targets
        if (pid := self._fleet.signal(name, signal.SIGSTOP)) is None:
            return
        try:
            time.sleep(fault.seconds)
            with suppress(PermissionError):
                kinds = cut(pid, self._fleet.address(name), socket.SHUT_WR)
                outcome.cut = dict(Counter(kind.name for kind in kinds))
        finally:
            with suppress(psutil.Error):
                psutil.Process(pid).resume()
        self._await_steps("network", outcome)

    def _attack(self, fault: Fault, outcome: Outcome) -> None:
        address = self._fleet.address(fault.targets[0])
        if not address:  # threads of one process
            outcome.detail = "it serves no other process"
            return
        outcome.sent, outcome.accepted = attack(self._rng, address, self._fleet.keys(address))

    def _fill(self, fault: Fault, outcome: Outcome) -> None:
        self.ended["disk"] += 1  # which may end any worker
        self._disk.fill(self._fleet.processes())
        time.sleep(fault.seconds)
        self._disk.free(self._fleet.processes())
        self._await_steps("disk", outcome)

    # --- recovery --------------------------------------------------------------------------------

    def _await_steps(self, role: str, outcome: Outcome, begin: float | None = None) -> None:
        """Until training environments have made more steps than those that were on their way."""
        begin = time.monotonic() if begin is None else begin
        enough = self._fleet.steps() + 4 * self._fleet.config.envs
        self._await(lambda: self._fleet.steps() > enough, f"steps after {outcome.fault}")
        outcome.recoveries.append(Recovery(role, time.monotonic() - begin))

    def _await_recovery(self, ended: dict[str, float], outcome: Outcome) -> None:
        """Until workers that have ended work again: servers accept a client, environments make
        steps, and all others run."""
        steps = {name: self._fleet.steps(name) for name in ended if name.startswith("env")}
        waiting, end = dict(ended), time.monotonic() + _RECOVERY_SECONDS

        def works(name: str) -> bool:
            if self._fleet.pid(name) in (None, self._pids.get(name)):
                return False
            if name in steps:
                return self._fleet.steps(name) > steps[name]
            return not (address := self._fleet.address(name)) or self._answers(address)

        while waiting:
            for name, since in list(waiting.items()):
                if works(name):
                    outcome.recoveries.append(Recovery(_role(name), time.monotonic() - since))
                    del waiting[name]
            self._check(end, f"{' and '.join(waiting)} to work again")
            time.sleep(_POLL_SECONDS)
        self._await_steps("network", Outcome(outcome.fault))

    def _answers(self, address: str) -> bool:
        with suppress(TransportError), Client(address, keys=self._fleet.keys(address)) as client:
            client.connect(0.5)
            return True
        return False

    def _await_all(self) -> None:
        """Until every worker runs."""

        def all_run() -> bool:
            return {*self._fleet.names(), SUPERVISOR} == self._fleet.workers().keys()

        self._await(all_run, "every worker to run")

    def _await(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + _RECOVERY_SECONDS
        while not condition():
            self._check(end, what)
            time.sleep(_POLL_SECONDS)

    def _check(self, end: float, what: str) -> None:
        if self._fleet.ended:
            raise ChaosError("The run has ended by itself.")
        if time.monotonic() > end:
            workers = self._fleet.workers().keys() - {SUPERVISOR}
            for name in workers if self._fleet.config.launcher != "serial" else ():
                self._fleet.signal(name, signal.SIGABRT)  # so that its log shows where it was
            raise ChaosError(f"Waited {_RECOVERY_SECONDS:.0f} s for {what}.")


def attack(rng: random.Random, address: str, keys: Keys | None) -> tuple[int, list[str]]:
    """Send a server what it has to refuse; returns how much, and what was carried out."""
    sent, accepted = 0, list[str]()
    for _ in range(_CONNECTIONS):
        for connection in connections(address, _CALL_SECONDS):
            sent += 1
            with suppress(OSError):
                data = stranger(rng)
                whole = connection.type == socket.SOCK_STREAM
                connection.sendall(data if whole else data[:100_000])  # as a packet
                connection.settimeout(0.05)
                connection.recv(1 << 16)
    if keys:
        sent += 1
        with Client(address, "stranger", keys=Keys.generate()) as client, suppress(Disconnected):
            client.connect(0.5)
            accepted.append("a connection with another key")
    for _ in range(_CONNECTIONS):
        # A server closes a connection after ten mistakes.
        with Client(address, "chaos", keys=keys, patience=_CALL_SECONDS) as client:
            for _ in range(rng.randint(1, 12)):
                method = rng.choice(METHODS)
                arguments = tuple(rng.choice(NONSENSE) for _ in range(rng.randint(1, 6)))
                sent += 1
                with suppress(RemoteError, Disconnected, Timeout):
                    client.call(method, *arguments).result(_CALL_SECONDS)
                    accepted.append(f"{method}{arguments!r:.200}")
    return sent, accepted


def _role(worker: str) -> str:
    return worker.split("-")[0]


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


# --- the disk ------------------------------------------------------------------------------------

_NEW_NAMESPACE = 0x00020000
_REMOUNT, _RECURSIVE, _PRIVATE = 32, 16384, 1 << 18
_DETACH = 2


class Disk:
    """A directory whose disk can be filled, a context manager.

    It is a tmpfs in a mount namespace of this process, which no other process sees, and which ends
    with this one. It is filled by making it as small as what it holds. Without the privilege to
    mount, the fleet's processes may not extend files instead (RLIMIT_FSIZE).
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self.kind: Literal["tmpfs", "limit"] = "limit"
        """How it is filled."""

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        if self._mount():
            self.kind = "tmpfs"
        return self

    def __exit__(self, *_: object) -> None:
        if self.kind == "tmpfs":
            ctypes.CDLL(None).umount2(os.fsencode(self._folder), _DETACH)

    def _mount(self) -> bool:
        if sys.platform != "linux":
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_NAMESPACE) != 0:
            return False
        # What is mounted from here on stays in this namespace.
        if libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None) != 0:
            return False
        return _mount_tmpfs(self._folder, 0, self._size)

    def fill(self, processes: Iterable[psutil.Process]) -> None:
        """Let every write fail."""
        if self.kind == "tmpfs":
            used = shutil.disk_usage(self._folder).used
            _mount_tmpfs(self._folder, _REMOUNT, max(used, resource.getpagesize()))
        else:
            _limit(processes, 0)

    def free(self, processes: Iterable[psutil.Process]) -> None:
        """Make room again."""
        if self.kind == "tmpfs":
            _mount_tmpfs(self._folder, _REMOUNT, self._size)
        else:
            _limit(processes, resource.RLIM_INFINITY)


def _mount_tmpfs(folder: Path, flags: int, size: int) -> bool:
    options = f"size={size}".encode()
    result: int = ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options)
    return result == 0


def _limit(processes: Iterable[psutil.Process], size: int) -> None:
    for process in processes:
        with suppress(psutil.Error, OSError):
            _, most = process.rlimit(resource.RLIMIT_FSIZE)
            process.rlimit(resource.RLIMIT_FSIZE, (size, most))
