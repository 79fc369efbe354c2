"""How the roles of a run find each other.

A server publishes its address under its name once it listens; clients look it up at every attempt
to connect, because a role that was restarted may listen elsewhere. Addresses lie in the run's
directory, so this works between machines that share it. A joined machine shares none: the run's
supervisor tells it the addresses, and it keeps them in a directory of its own.

A role may have several servers. The first one has the role's name, the others are numbered:
`replay`, `replay-1`, and so on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write
from dreamfleet.transport.address import AUTO, is_unused, parse

RoleName = Literal["actor", "learner", "replay", "logger"]
SERVERS: tuple[RoleName, ...] = ("actor", "learner", "replay", "logger")
"""The roles that others connect to."""


def server_name(role: RoleName, index: int = 0) -> str:
    """The name of one of a role's servers: `replay`, `replay-1`, and so on."""
    return f"{role}-{index}" if index else role


class Registry:
    """Names and addresses, as files in a directory that those who look them up share."""

    def __init__(self, logdir: Path) -> None:
        self._folder = logdir / "addresses"

    def publish(self, name: str, address: str) -> None:
        atomic_write(self._folder / name, address)

    def find(self, name: str) -> str:
        """The newest address of a server; empty if there is none."""
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return ""

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # others are in it, or there is none
            self._folder.rmdir()

    def names(self) -> list[str]:
        """Every name with an address."""
        return [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []


HOST = "{host}"
"""In an address: this machine, by the name or number under which others reach it."""

_host = socket.gethostname()


def use_host(name: str) -> None:
    """Publish addresses under this name of this machine, from now on in this process."""
    global _host
    _host = name


def listen_address(args: RunConfig, role: RoleName, index: int = 0) -> str:
    """Where a server listens; `{auto}` in it stands for a free port or file.

    An address without it is that of the role's first server: the others follow with the next ports,
    or with files of that name and their number.
    """
    address: str = getattr(args, f"{role}_addr").replace(HOST, _host)
    if not index or AUTO in address:
        return address
    if address.startswith("ipc://"):
        return f"{address}-{index}"
    first = parse(address)
    return parse(replace(first, port=first.port + index).text).text


def publish_address(args: RunConfig, role: RoleName, address: str, index: int = 0) -> None:
    """Let others find a server whose address is known once it listens.

    A server that listens on all interfaces is published under this machine's name. The socket file
    of a predecessor that was killed is removed.
    """
    if AUTO not in listen_address(args, role):
        return
    parsed, name, registry = parse(address), server_name(role, index), Registry(args.logdir)
    if parsed.host in ("*", "0.0.0.0", "::"):
        address = replace(parsed, host=_host).text
    before = registry.find(name)
    registry.publish(name, address)
    if before != address:
        _remove_socket(before)


def find_server(args: RunConfig, role: RoleName, index: int = 0) -> str | Callable[[], str]:
    """The address of a server, for a `Client`; one that the settings leave open is looked up at
    every attempt to connect."""
    address = listen_address(args, role, index)
    return partial(published_address, args.logdir, role, index) if AUTO in address else address


def published_address(logdir: Path, role: RoleName, index: int = 0) -> str:
    """The newest published address of a server; empty if there is none."""
    return Registry(logdir).find(server_name(role, index))


def remove_addresses(logdir: Path, *, elsewhere: Collection[RoleName] = ()) -> None:
    """Forget where the servers of a run listened, and remove the socket files of killed ones. Roles
    that are started `elsewhere` are left alone: they may serve on."""
    registry = Registry(logdir)
    for name in registry.names():
        if name.startswith(tuple(elsewhere)):
            continue
        if not name.startswith("."):  # what a killed process did not finish to write
            _remove_socket(registry.find(name))
        registry.remove(name)


def _remove_socket(address: str) -> None:
    """Remove the socket file of a server that is gone."""
    if not address:
        return
    parsed = parse(address)
    if parsed.kind == "tcp" or not parsed.path.is_socket():
        return
    if is_unused(parsed.path):  # else it is another run's, whose directory was copied
        parsed.path.unlink(missing_ok=True)
    with suppress(OSError):  # not ours alone
        parsed.path.parent.rmdir()
