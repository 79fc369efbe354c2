"""Several hosts that learn together: who they are, and where their agents vote.

Every host runs a whole fleet under a supervisor of its own, in a directory of its own (host 0 in
the run's directory, host 1 in its `hosts/1`). Supervisors watch each other in the run's directory
(`dreamfleet.fleet.hosts`), where each has a file about itself. Agents vote before each update
(`scaling.sync`) at the `Rendezvous`, which host 0 serves.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import atomic_write, read_json
from dreamfleet.roles.addresses import Registry
from dreamfleet.transport import AddressError, Keys, RoleKey, Server, load_key
from dreamfleet.transport.address import Address, parse

How = Literal["", "done", "stopped", "failed"]
"""How a host has left; empty while it is there."""

HOSTS = "hosts"
"""In the run's directory, and in its registry."""
LOST_SECONDS = 15.0
"""After which a host that is not heard of is lost."""
_KEPT = 64  # rounds that are over, for calls that are repeated


class HostError(DreamfleetError):
    """Another host was lost or has failed, and the run ended because of it."""


# --- who this is ---------------------------------------------------------------------------------


def this_host(config: RunConfig, environ: Mapping[str, str] = os.environ) -> RunConfig:
    """The run as this host knows it: with its number and its directory."""
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
        logdir=config.logdir / HOSTS / str(config.host_index),
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
        raise ConfigError(f"coordinator={coordinator} is not an address: write HOST:PORT.")
    return found


@dataclass(frozen=True)
class Member:
    """What a host says of itself to the others."""

    token: str
    """Another one after each start: an agent of an earlier start, which was stopped and goes on,
    does not vote."""
    name: str
    settings: dict[str, str]
    """Those that have to be the same on all hosts."""
    met: tuple[str, ...] = ()
    """The tokens of all hosts, as far as this one has met them."""
    how: How = ""
    why: str = ""


def write_member(config: RunConfig, member: Member) -> None:
    """Tell the others about this host."""
    atomic_write(_member_file(config, config.host_index), msgspec.json.encode(member))


def read_member(config: RunConfig, index: int) -> Member | None:
    """What a host has said last."""
    return read_json(_member_file(config, index), Member)


def _member_file(config: RunConfig, index: int) -> Path:
    return config.run_dir / HOSTS / f"member-{index}.json"


def host_folder(config: RunConfig, index: int) -> Path:
    """The directory of a host."""
    return config.run_dir / HOSTS / str(index) if index else config.run_dir


# --- where agents vote ---------------------------------------------------------------------------


def rendezvous_address(config: RunConfig) -> str:
    """Where agents vote; empty while host 0 has not said it."""
    if config.coordinator:
        return f"tcp://{config.coordinator}"
    return Registry(config.run_dir).find(HOSTS)


def run_key(config: RunConfig) -> Keys | RoleKey:
    """What opens the rendezvous."""
    return load_key(_keys_file(config))


def _keys_file(config: RunConfig) -> Path:
    return Path(config.keys) if config.keys else config.run_dir / "keys"


class Rendezvous:
    """The votes of the agents of `count` hosts. Any thread may call it."""

    def __init__(self, count: int, member: Callable[[int], Member | None]) -> None:
        self._count, self._member = count, member
        self._changed = threading.Condition()
        self._tokens: dict[int, str] = {}
        self._rounds: dict[str, dict[int, Any]] = {}
        self._end = ""

    def gather(
        self, key: str, index: int, token: str, said: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """What all hosts say under this key, once all have said it."""
        with self._changed:
            self._check(index, token)
            votes = self._rounds.setdefault(key, {})
            votes.setdefault(index, said)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(votes) == self._count or self._end)
            if len(votes) < self._count:
                raise HostError(self._end)
            over = [each for each, said in self._rounds.items() if len(said) == self._count]
            for each in over[:-_KEPT]:
                del self._rounds[each]
            return [votes[each] for each in range(self._count)]

    def missing(self, key: str) -> list[int]:
        """The hosts that have said nothing under this key yet."""
        with self._changed:
            votes = self._rounds.get(key, {})
            return [index for index in range(self._count) if index not in votes]

    def end(self, sentence: str) -> None:
        """End all waits, because of this."""
        with self._changed:
            self._end = self._end or sentence
            self._changed.notify_all()

    def _check(self, index: int, token: str) -> None:
        if self._tokens.get(index) != token:
            member = self._member(index)
            if member is None or member.token != token or not 0 <= index < self._count:
                raise HostError(
                    f"Host {index} was away for so long that the run has been resumed without it"
                )
            self._tokens[index] = token


@contextmanager
def served_rendezvous(config: RunConfig) -> Iterator[Rendezvous]:
    """The rendezvous on host 0, which agents find while the block runs."""
    path = _keys_file(config)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        Keys.generate().save(path)
    listen = "tcp://0.0.0.0:{auto}"
    if config.coordinator:
        wanted = _parsed(config.coordinator)
        # A name may stand for another address here than elsewhere.
        listen = wanted.text if wanted.loopback else f"tcp://0.0.0.0:{wanted.port}"
    rendezvous = Rendezvous(config.hosts, partial(read_member, config))
    server = Server(listen, "hosts", keys=Keys.load(path))
    # Every host in a round, and every host in that of a checkpoint.
    server.bind("gather", rendezvous.gather, workers=2 * config.hosts, repeatable=True)
    server.bind("missing", rendezvous.missing, repeatable=True)
    server.start(block=False)
    try:
        if not config.coordinator:
            here = Address("tcp", socket.gethostname(), parse(server.address).port)
            Registry(config.run_dir).publish(HOSTS, here.text)
        yield rendezvous
    finally:
        Registry(config.run_dir).remove(HOSTS)
        rendezvous.end("The run is over.")
        server.close()
