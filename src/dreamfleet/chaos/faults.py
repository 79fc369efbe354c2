"""How each kind of fault is done to a fleet, and when the fleet has recovered from it."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
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

from dreamfleet.chaos.fleet import SUPERVISOR, Fleet
from dreamfleet.chaos.hostile import attack
from dreamfleet.chaos.network import PARTS, Line, Network, Part
from dreamfleet.chaos.schedule import Fault, Moment
from dreamfleet.errors import DreamfleetError
from dreamfleet.roles.addresses import DirectoryBook
from dreamfleet.transport import Client, Keys, TransportError

_LOOK = 0.005  # seconds between two looks at something that is awaited
_LONG = 120.0  # seconds after which what is awaited will not come
_MOMENT = 12.0  # seconds to wait for the moment of a fault


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
    """What else there is to say, such as the method whose reply was lost."""
    at: float = 0.0
    """Seconds since the first fault."""
    recoveries: list[Recovery] = field(default_factory=list)
    collateral: list[str] = field(default_factory=list)
    """Workers that were started again although nothing was done to them."""
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

    def __init__(self, fleet: Fleet, network: Network, disk: Disk, seed: int) -> None:
        self._fleet, self._network, self._disk = fleet, network, disk
        self._rng = random.Random(seed)
        self.ended: Counter[str] = Counter()
        """How often a process of each role was ended."""
        self._hit: set[str] = set()  # workers that the present fault has ended
        self._in_rounds: set[str] = set()  # workers that work now and then
        if (config := fleet.config).eval_every:
            evaluating = range(config.envs, config.all_envs)
            self._in_rounds = {"evaluator", *(f"env-{number}" for number in evaluating)}
        self._pids: dict[str, int] = {}  # that got the last signals
        self._turns: Counter[tuple[str, str, Part]] = Counter()
        self._lost: Counter[tuple[str, str, Part]] = Counter()
        self.orphans: list[float] = []
        """Seconds for which processes lived on after their supervisor was killed."""

    @property
    def calls(self) -> dict[str, int]:
        """Calls of the fleet so far, and how many of them went around libzmq."""
        lines = self._network.lines.values()
        made = sum(line.methods.total() for line in lines)
        return {"made": made, "direct": sum(line.direct for line in lines)}

    @property
    def lost(self) -> dict[str, int]:
        """What of which calls was lost, and how often."""
        return {" ".join(key): count for key, count in sorted(self._lost.items())}

    def do(self, fault: Fault) -> Outcome:
        """Do a fault to the fleet; returns when the fleet has recovered from it.

        Raises:
            ChaosError: It has not.
        """
        self._wait_for_all()
        before = self._fleet.workers()
        self._hit = set()
        outcome = Outcome(fault)
        getattr(self, f"_{fault.kind.replace('-', '_')}")(fault, outcome)
        self._wait_for_all()
        if fault.kind != "fill" and SUPERVISOR not in self._hit:
            after = self._fleet.workers()
            changed = [name for name in before if after[name].pid != before[name].pid]
            outcome.collateral = sorted(set(changed) - self._hit)
        return outcome

    # --- processes -------------------------------------------------------------------------------

    def _kill(self, fault: Fault, outcome: Outcome) -> None:
        if fault.targets == (SUPERVISOR,):
            self._end_fleet(signal.SIGKILL, outcome)
            return
        self._await_moment(fault.targets[0], fault.moment, fault.seconds, outcome)
        now = time.monotonic()
        self._send_all(fault.targets, signal.SIGKILL)
        self._await_recovery(dict.fromkeys(fault.targets, now), outcome)

    def _terminate(self, fault: Fault, outcome: Outcome) -> None:
        if fault.targets == (SUPERVISOR,):
            self._end_fleet(signal.SIGTERM, outcome)
            return
        ended = {}
        pids = self._send_all(fault.targets, signal.SIGTERM)
        for name, pid in pids.items():
            self._await(partial(_is_gone, pid), f"{name} to end")
            ended[name] = time.monotonic()
        self._await_recovery(ended, outcome)

    def _stop(self, fault: Fault, outcome: Outcome) -> None:
        pids = self._send_all(fault.targets, signal.SIGSTOP)
        self._hit.clear()  # nobody ends
        time.sleep(fault.seconds)
        worked = {name: self._work(name) for name in pids}
        for pid in pids.values():
            with suppress(psutil.Error):
                psutil.Process(pid).resume()
        begin = time.monotonic()
        for name, before in worked.items():
            if name in self._in_rounds:
                continue
            works = partial(self._works, name, before)
            self._await(works, f"{name} to work again after a stop")
            outcome.recoveries.append(Recovery("stopped", time.monotonic() - begin))

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
        elif code:
            raise ChaosError(f"The supervisor ended with code {code} when it was asked to end.")
        steps = self._fleet.steps()
        self._fleet.start()
        self._await(lambda: self._fleet.steps() > steps, "steps after a new start of the fleet")
        outcome.recoveries.append(Recovery(SUPERVISOR, time.monotonic() - begin))

    def _await_moment(self, name: str, moment: Moment, seconds: float, outcome: Outcome) -> None:
        """Wait for the moment of a signal, which need not come: there may be nothing to compile."""
        if moment in ("restart", "compile"):
            pids = self._send_all([name], signal.SIGKILL)
            self._await(
                lambda: self._fleet.pid(name) not in (None, *pids.values()), f"{name} to start"
            )
        came = True
        if moment == "restart":
            time.sleep(seconds)
        elif moment == "compile":
            came = self._came(self._compiles)
        elif moment == "save":
            folder = self._fleet.config.logdir / "ckpt" / name
            came = self._came(lambda: any(folder.glob(".writing-*")))
        outcome.detail = "" if came else f"there was no {moment}"

    def _came(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + _MOMENT
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK / 25)
        return True

    def _compiles(self) -> bool:
        with suppress(TransportError):
            address = DirectoryBook().find(self._fleet.config.logdir, "logger")
            with Client(address, "chaos", keys=self._keys(address), patience=1.0) as client:
                status = client.call("status").result(1.0)
                return str(status.get("learner/state", "")).startswith("compiling")
        return False

    # --- the network -----------------------------------------------------------------------------

    def _line(self, fault: Fault) -> Line:
        return self._network.lines[fault.targets[0]]

    def _cut(self, fault: Fault, outcome: Outcome) -> None:
        line = self._line(fault)
        now = time.monotonic()
        line.proxy.cut()
        self._await_reply(line, now, outcome)

    def _half_cut(self, fault: Fault, outcome: Outcome) -> None:
        line = self._line(fault)
        now = time.monotonic()
        line.proxy.half_cut("up" if fault.way == "up" else "down")
        self._await_reply(line, now, outcome)

    def _stall(self, fault: Fault, outcome: Outcome) -> None:
        line = self._line(fault)
        line.proxy.stall(("up", "down") if fault.way == "both" else (fault.way,))
        time.sleep(fault.seconds)
        replies, now = line.replies, time.monotonic()
        line.proxy.resume()
        self._await(lambda: line.replies > replies, f"a reply of {line.name} after a stall")
        outcome.recoveries.append(Recovery("network", time.monotonic() - now))

    def _refuse(self, fault: Fault, outcome: Outcome) -> None:
        line = self._line(fault)
        line.proxy.refuse()
        line.proxy.cut()
        time.sleep(fault.seconds)
        now = time.monotonic()
        line.proxy.refuse(False)
        self._await_reply(line, now, outcome)

    def _lose(self, _: Fault, outcome: Outcome) -> None:
        """Lose a part of a call: of all calls that were seen, the one of which it was least; that
        of stored steps first."""
        lines = sorted(self._network.lines.values(), key=lambda each: "replay" not in each.name)
        line, method, part = min(
            (
                (line, method, part)
                for line in lines
                for method in sorted(line.methods)
                for part in PARTS
            ),
            key=lambda each: self._turns[each[0].name, *each[1:]],
        )
        worker = "agent" if line.name in ("actor", "learner") else line.name
        loss = line.lose(method, part, lambda: self._fleet.signal(worker, signal.SIGKILL))
        # What is called seldom is called by an agent that saves, or by one that starts.
        if not loss.happened.wait(self._fleet.config.save_every + 1):
            self._send_all(["agent"], signal.SIGKILL)
        came = loss.happened.wait(_MOMENT)
        line.keep()
        self._turns[line.name, method, part] += 1  # also if it did not come: the next one's turn
        outcome.detail = f"{part} of {method}" if came else f"there was no call of {method}"
        if not came:
            return
        self._lost[line.name, method, part] += 1
        if part == "server":
            self._hit.add(worker)
            self.ended[_role(worker)] += 1
            self._await_recovery({worker: loss.at}, outcome)
        else:
            self._await_reply(line, loss.at, outcome)

    def _await_reply(self, line: Line, since: float, outcome: Outcome) -> None:
        self._await(
            lambda: line.first_reply(since) is not None,
            f"a reply of {line.name} over a new connection",
        )
        at = line.first_reply(since)
        assert at is not None
        outcome.recoveries.append(Recovery("network", at - since))

    # --- requests, and the disk ------------------------------------------------------------------

    def _attack(self, fault: Fault, outcome: Outcome) -> None:
        server = fault.targets[0]
        address = DirectoryBook().find(self._fleet.config.logdir, server)
        line = self._network.lines.get(server)
        methods = sorted(line.methods) if line else ["act", "add", "add_batch", "status"]
        if not address or address.startswith("inproc:"):  # threads of one process have none
            outcome.detail = "there is no server"
            return
        done = attack(self._rng, address, methods, self._keys(address))
        outcome.sent, outcome.accepted = done.sent, done.accepted

    def _keys(self, address: str) -> Keys | None:
        path = self._fleet.config.logdir / "keys"
        return Keys.load(path) if address.startswith("tcp:") else None

    def _fill(self, fault: Fault, outcome: Outcome) -> None:
        self.ended["disk"] += 1  # which may end anybody
        self._disk.fill(self._fleet.processes())
        time.sleep(fault.seconds)
        self._disk.free(self._fleet.processes())
        begin, steps = time.monotonic(), self._fleet.steps()
        # More than those that were on their way: what is made next has to be stored.
        most = steps + 4 * self._fleet.config.envs
        self._await(lambda: self._fleet.steps() > most, "steps when there is room again")
        outcome.recoveries.append(Recovery("disk", time.monotonic() - begin))

    # --- recovery --------------------------------------------------------------------------------

    def _works(self, name: str, before: int) -> bool:
        return self._work(name) > before

    def _work(self, name: str) -> int:
        """A number that rises with the work of a worker."""
        line = self._network.lines.get(_server(name))
        return line.replies if line else self._fleet.steps(name)

    def _await_recovery(self, ended: dict[str, float], outcome: Outcome) -> None:
        """Wait until workers that have ended do their work again: servers have answered a call over
        a new connection, environments have made a step. What only works in rounds runs again."""
        steps = {name: self._fleet.steps(name) for name in ended if name.startswith("env")}

        def recovered(name: str, since: float) -> float | None:
            if name in self._in_rounds:
                again = self._fleet.pid(name) not in (None, self._pids.get(name))
                return time.monotonic() if again else None
            if name in steps:
                return time.monotonic() if self._fleet.steps(name) > steps[name] else None
            return self._network.lines[_server(name)].first_reply(since)

        waiting = dict(ended)
        end = time.monotonic() + _LONG
        while waiting:
            for name, since in list(waiting.items()):
                if (at := recovered(name, since)) is not None:
                    outcome.recoveries.append(Recovery(_role(name), at - since))
                    del waiting[name]
            self._check(end, f"{' and '.join(waiting)} to work again")
            time.sleep(_LOOK)

    def _wait_for_all(self) -> None:
        """Until every worker runs."""

        def all_run() -> bool:
            workers = self._fleet.workers()
            return {*self._fleet.restarts(), SUPERVISOR} == workers.keys()

        self._await(all_run, "every worker to run")

    def _await(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + _LONG
        while not condition():
            self._check(end, what)
            time.sleep(_LOOK)

    def _check(self, end: float, what: str) -> None:
        if self._fleet.ended:
            raise ChaosError("The run has ended by itself.")
        if time.monotonic() > end:
            workers = self._fleet.workers().keys() - {SUPERVISOR}
            for name in workers if self._fleet.config.launcher != "serial" else ():
                self._fleet.signal(name, signal.SIGABRT)  # so that its log shows where it was
            raise ChaosError(f"This did not come for {_LONG:.0f} s: {what}.")


def _role(worker: str) -> str:
    return worker.split("-")[0]


def _server(worker: str) -> str:
    return "actor" if worker == "agent" else worker


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
    """A disk that can be filled, a context manager: a small file system of the run's own, where the
    machine allows one.

    It is a tmpfs in a mount namespace of this process, so nobody else sees it and it is gone with
    the process. It is filled by making it as small as what it holds. Without the privilege to
    mount, no process of the fleet may write a file beyond its first bytes instead (RLIMIT_FSIZE).
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
        """Let nobody write anything more."""
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
