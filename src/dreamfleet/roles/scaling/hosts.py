"""Several hosts that learn together: who they are, and how supervisors watch each other.

Every host runs a whole fleet under a supervisor of its own, in a directory of its own (host 0 in
the run's directory, host 1 in its `hosts/1`). The supervisor of host 0 serves the `Rendezvous`.
Supervisors report there every second. A host that is silent or has failed ends the run on all
hosts, with a sentence that names it. Agents vote there before each update (`scaling.sync`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import atomic_write
from dreamfleet.roles.addresses import DirectoryBook
from dreamfleet.settings import Mark
from dreamfleet.transport import (
    AddressError,
    Client,
    Keys,
    RoleKey,
    Server,
    TransportError,
    load_key,
)
from dreamfleet.transport.address import Address, parse

Say = Callable[[str], None]
How = Literal["", "done", "stopped", "failed"]
"""How a host has left; empty while it is there."""

_NAME = "hosts"  # in the registry of the run
BEAT_SECONDS = 1.0
"""Between two signs of life of a host."""
LOST_SECONDS = 15.0
"""After which a host that is not heard of is lost."""
_SILENCE = f"nothing was heard of it for {LOST_SECONDS:g} s"
_CALL_SECONDS = 5.0
_GOODBYE_SECONDS = 30.0
_TOLD_SECONDS = 3.0
_KEPT = 64  # rounds that are over, for calls that are repeated


class HostError(DreamfleetError):
    """Another host was lost or has failed, and the run ended because of it."""


# --- who this is ---------------------------------------------------------------------------------


def this_host(config: RunConfig, environ: Mapping[str, str] = os.environ) -> RunConfig:
    """The run as this host knows it: with its number and its directory.

    Raises:
        ConfigError: The settings do not tell who it is, and Slurm does not either.
    """
    if config.hosts == 1:
        return config
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if all(name in environ for name in names):
        tasks, index = (int(environ[name]) for name in names)
        if config.hosts not in (0, tasks):
            raise ConfigError(
                f"hosts={config.hosts}, and Slurm has started {tasks} tasks: start one task for "
                "each host, or set hosts=0."
            )
        config = replace(config, hosts=tasks, host_index=index)
    if config.hosts == 0:
        raise ConfigError(
            "hosts=0 takes the hosts from Slurm, which has not started this process, or from Ray: "
            "use srun, or launcher=ray, or set hosts and host_index."
        )
    if config.hosts > 1 and config.coordinator:
        _parsed(config.coordinator)
    if config.hosts == 1 or config.host_index == 0:
        return config
    return replace(
        config,
        logdir=config.logdir / "hosts" / str(config.host_index),
        # Host 0 evaluates.
        eval_every=0,
        eval_episodes=0,
        eval_envs=0 if config.eval_every else config.eval_envs,
    )


def _parsed(coordinator: str) -> Address:
    try:
        found = parse(f"tcp://{coordinator}")
    except AddressError:
        found = None
    if found is None or not found.port:
        raise ConfigError(f"coordinator={coordinator} is no address: write HOST:PORT.")
    return found


def rendezvous_address(config: RunConfig) -> str:
    """Where the hosts meet; empty while host 0 has not said it."""
    if config.coordinator:
        return f"tcp://{config.coordinator}"
    return DirectoryBook().find(config.run_dir, _NAME)


def _token_file(config: RunConfig) -> Path:
    """Holds what this host entered with, for its agent: an agent of an earlier start, which was
    stopped and goes on, has another one."""
    return config.run_dir / "hosts" / f"token-{config.host_index}"


def read_token(config: RunConfig) -> str:
    """What this host entered with."""
    return _token_file(config).read_text()


def run_key(config: RunConfig) -> Keys | RoleKey:
    """What opens the rendezvous."""
    return load_key(_keys_file(config))


def _keys_file(config: RunConfig) -> Path:
    return Path(config.keys) if config.keys else config.run_dir / "keys"


# --- the rendezvous on host 0 --------------------------------------------------------------------


@dataclass
class _Host:
    name: str
    token: str
    heard: float
    how: How = ""
    why: str = ""
    told: bool = False
    """Whether it knows how the run has ended."""


class End(NamedTuple):
    """How the run ends on all hosts."""

    how: How
    sentence: str = ""
    """Names the host that it is because of."""
    host: int = -1
    """That host."""


class Rendezvous:
    """What the server of host 0 knows of all hosts. Any thread may call it.

    Args:
        count: How many hosts there are.
        now: Seconds, rising.
    """

    def __init__(self, count: int, now: Callable[[], float] = time.monotonic) -> None:
        self._count, self._now = count, now
        self._changed = threading.Condition()
        self._hosts: dict[int, _Host] = {}
        self._settings: dict[str, Any] = {}
        self._rounds: dict[str, dict[int, Any]] = {}
        self._failure: tuple[float, int] | None = None
        self._end: End | None = None

    def enter(
        self, index: int, name: str, token: str, settings: dict[str, Any]
    ) -> tuple[str, list[int]]:
        """A host is there; returns why it cannot be used, and which hosts are missing."""
        with self._changed:
            if index == 0:
                self._settings = settings
            there = self._hosts.get(index)
            if there is not None and there.token != token:
                if self._now() - there.heard < LOST_SECONDS:
                    return f"Host {index} is there already, on {there.name}.", []
                there = None  # it was killed while it waited
            if problem := _difference(self._settings, settings, index):
                return problem, []
            if not 0 <= index < self._count:
                return f"There is no host {index} of {self._count}.", []
            self._hosts[index] = there or _Host(name, token, 0.0)
            self._hosts[index].heard = self._now()
            return "", [each for each in range(self._count) if each not in self._hosts]

    def beat(self, index: int, token: str, how: How = "", why: str = "") -> tuple[list[Any], bool]:
        """A host is there, or leaves. Returns how the run ends, if that is known, and whether all
        hosts have left."""
        with self._changed:
            host = self._hosts.get(index)
            if host is None or host.token != token:
                return [*End("failed", _too_late(index), index)], True
            host.heard = self._now()
            if how and not host.how:
                host.how, host.why = how, why
                if how == "failed" and self._failure is None:
                    self._failure = host.heard, index
            end = self._verdict() or End("")
            over = all(each.how for each in self._hosts.values())
            host.told = host.told or over or end.how == "failed"
            return [*end], over

    def told(self) -> bool:
        """Whether every host that is left knows how the run has ended."""
        with self._changed:
            now = self._now()
            return all(
                host.told or now - host.heard > _TOLD_SECONDS
                for index, host in self._hosts.items()
                if index
            )

    def gather(
        self, key: str, index: int, token: str, said: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """What all hosts say under this key, once all have said it."""
        with self._changed:
            host = self._hosts.get(index)
            if host is None or host.token != token:
                raise HostError(_too_late(index))
            votes = self._rounds.setdefault(key, {})
            votes.setdefault(index, said)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(votes) == self._count or self._end is not None)
            if len(votes) < self._count:
                assert self._end is not None
                raise HostError(self._end.sentence)
            over = [each for each, said in self._rounds.items() if len(said) == self._count]
            for each in over[:-_KEPT]:
                del self._rounds[each]
            return [votes[each] for each in range(self._count)]

    def missing(self, key: str) -> list[int]:
        """The hosts that have said nothing under this key yet."""
        with self._changed:
            votes = self._rounds.get(key, {})
            return [index for index in range(self._count) if index not in votes]

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._end = self._end or End("done", "The run is over.")
            self._changed.notify_all()

    def _verdict(self) -> End | None:
        """How the run ends, if a host is lost, has failed or was asked to stop.

        A host that is lost makes the others fail. So a failure counts when it is known that
        none is lost: all were heard of since.
        """
        if self._end is not None:
            return self._end
        now = self._now()
        there = {index: host for index, host in self._hosts.items() if not host.how}
        for index, host in there.items():
            if now - host.heard > LOST_SECONDS:
                host.how = "failed"
                return self._ended("failed", index, f"was lost: {_SILENCE}")
        if self._failure is not None:
            since, index = self._failure
            if all(host.heard > since + BEAT_SECONDS for host in there.values()):
                return self._ended("failed", index, f"has failed: {self._hosts[index].why}")
            return None
        for index, host in self._hosts.items():
            if host.how == "stopped":
                return self._ended("stopped", index, "was asked to stop")
        return None

    def _ended(self, how: How, index: int, what: str) -> End:
        self._end = End(how, f"Host {index} ({self._hosts[index].name}) {what}", index)
        self._changed.notify_all()
        return self._end


def _too_late(index: int) -> str:
    """What a host is told that was stopped for a while, and comes back to another run."""
    return f"Host {index} was away for so long that the run has been resumed without it"


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], index: int) -> str:
    """Why a host cannot learn together with host 0; empty if it can."""
    for name in sorted({*first, *other}):
        if first and first.get(name) != other.get(name):
            return (
                f"Host {index} has {name}={other.get(name)}, and host 0 has "
                f"{name}={first.get(name)}: start all hosts with the same settings."
            )
    return ""


def _shared_settings(config: RunConfig) -> dict[str, Any]:
    """What has to be the same on all hosts, as texts."""
    from dreamfleet import __version__  # every agent imports this file

    shared = {name: str(v) for name, v in config.flat(without=Mark.PER_HOST).items()}
    return {**shared, "version": __version__}


# --- a supervisor among others -------------------------------------------------------------------


class Membership:
    """This host's place among the others, as its supervisor has it."""

    def __init__(
        self, address: str, beat: Callable[[How, str], Any], rendezvous: Rendezvous | None = None
    ) -> None:
        self._address, self._ask, self._rendezvous = address, beat, rendezvous
        self._heard = time.monotonic()
        self._end = End("")
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._on_end: Callable[[End], None] | None = None

    def watch(self, on_end: Callable[[End], None]) -> None:
        """Say from now on that this host is there, and call the function, in a thread, when the
        run ends because of another one."""
        self._on_end = on_end
        threading.Thread(target=self._beat, name="hosts", daemon=True).start()

    def fail(self, why: str) -> None:
        """This host has failed, perhaps because of another one."""
        self._tell("failed", why)

    def leave(self, how: How, why: str = "") -> End:
        """This host ends; returns how the run ends on all hosts, once that is known."""
        deadline = time.monotonic() + _GOODBYE_SECONDS
        over = self._tell(how, why)
        while not (over or self._end.how == "failed" or self._lost()):
            if time.monotonic() > deadline:
                break
            time.sleep(BEAT_SECONDS / 4)
            over = self._tell(how, why)
        self._over.set()
        if self._rendezvous is not None:
            while not self._rendezvous.told() and time.monotonic() < deadline:
                time.sleep(BEAT_SECONDS / 4)
        return self._end

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            self._tell()
            if self._end.how and self._on_end:
                on_end, self._on_end = self._on_end, None
                on_end(self._end)

    def _tell(self, how: How = "", why: str = "") -> bool:
        """Say that this host is there, or how it leaves; returns whether all have left."""
        with self._lock:
            try:
                end, over = self._ask(how, _first_line(why))
            except TransportError:
                if self._lost() and not self._end.how and how in ("", "failed"):
                    self._end = End("failed", f"Host 0 ({self._address}) was lost: {_SILENCE}", 0)
                return False
            self._heard = time.monotonic()
            if not self._end.how:
                self._end = End(*end)
            return bool(over)

    def _lost(self) -> bool:
        """Whether host 0 is lost."""
        return time.monotonic() - self._heard > LOST_SECONDS


def _first_line(text: str) -> str:
    """How a host has failed, without the end of its log, which the others do not have."""
    line = next(iter(text.splitlines()), "").partition(". The end of ")[0]
    return line.rstrip(".")[:300]


@contextmanager
def joined(config: RunConfig, say: Say) -> Iterator[Membership | None]:
    """Meet the other hosts, and be one of them until the block ends; None if there are none.

    Raises:
        ConfigError: This host does not fit to the others.
    """
    if config.hosts == 1:
        yield None
        return
    token = os.urandom(8).hex()
    if config.host_index == 0:
        with _served(config) as rendezvous:
            _enter(config, token, rendezvous.enter, say)
            yield Membership("", partial(rendezvous.beat, 0, token), rendezvous)
        return
    _wait_for_keys(config, say)
    address = partial(rendezvous_address, config)
    with Client(address, "hosts", keys=run_key(config)) as client:

        def ask(method: str, *args: Any) -> Any:
            return client.call(method, *args).result(_CALL_SECONDS)

        _enter(config, token, partial(ask, "enter"), say)
        beat = partial(ask, "beat", config.host_index, token)
        yield Membership(parse(rendezvous_address(config)).host, beat)


@contextmanager
def _served(config: RunConfig) -> Iterator[Rendezvous]:
    """The rendezvous on host 0, which others find while the block runs."""
    path = _keys_file(config)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        Keys.generate().save(path)
    listen = "tcp://0.0.0.0:{auto}"
    if config.coordinator:
        wanted = _parsed(config.coordinator)
        # A name may stand for another address here than elsewhere.
        listen = wanted.text if wanted.loopback else f"tcp://0.0.0.0:{wanted.port}"
    rendezvous = Rendezvous(config.hosts)
    server = Server(listen, "hosts", keys=Keys.load(path))
    server.bind("enter", rendezvous.enter, repeatable=True)
    server.bind("beat", rendezvous.beat, repeatable=True)
    # Every host in a round, and every host in that of a checkpoint.
    server.bind("gather", rendezvous.gather, workers=2 * config.hosts, repeatable=True)
    server.bind("missing", rendezvous.missing, repeatable=True)
    server.start(block=False)
    try:
        if not config.coordinator:
            port = parse(server.address).port
            here = f"tcp://{socket.gethostname()}:{port}"
            DirectoryBook().publish(config.run_dir, _NAME, here)
        yield rendezvous
    finally:
        DirectoryBook().remove(config.run_dir, _NAME)
        rendezvous.close()
        server.close()


def _wait_for_keys(config: RunConfig, say: Say) -> None:
    path = _keys_file(config)
    if not path.exists():
        say(f"Host {config.host_index} waits for host 0, which makes the run's key {path}")
    while not path.exists():
        time.sleep(BEAT_SECONDS / 4)


def _enter(config: RunConfig, token: str, enter: Callable[..., Any], say: Say) -> None:
    """Return when all hosts are there."""
    said, me = "", f"Host {config.host_index} of {config.hosts}"
    mine = (config.host_index, socket.gethostname(), token, _shared_settings(config))
    while True:
        where = rendezvous_address(config) or "an address that it has not told"
        line = f"{me} waits for host 0, at {where}"
        try:
            problem, missing = enter(*mine)
            if problem:
                raise ConfigError(problem)
            if not missing:
                break
            names = ", ".join(str(index) for index in missing)
            line = (
                f"{me} waits for host {names}: start the same command there with its "
                "--host-index, or end this one and resume with fewer --hosts"
            )
        except TransportError:
            pass
        if line != said:
            said = line
            say(said)
        time.sleep(BEAT_SECONDS / 4)
    atomic_write(_token_file(config), token)
    say(f"All {config.hosts} hosts are there; this is host {config.host_index}")
