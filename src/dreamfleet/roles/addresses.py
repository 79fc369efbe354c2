"""How the roles of a run find each other.

A server publishes its address under its role's name once it listens; clients look it up at every
attempt to connect, because a role that was restarted may listen elsewhere. Addresses lie in the
run's directory, so this works between machines that share it. A launcher whose machines share no
directory gives its workers another `AddressBook` with `use_book`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write
from dreamfleet.transport.address import AUTO, parse

RoleName = Literal["actor", "replay", "logger", "evaluator"]
SERVERS: tuple[RoleName, ...] = ("actor", "replay", "logger", "evaluator")
"""The roles that others connect to."""


class AddressBook(Protocol):
    """Where addresses are published."""

    def publish(self, logdir: Path, role: RoleName, address: str) -> None: ...

    def find(self, logdir: Path, role: RoleName) -> str:
        """The newest address of a role; empty if there is none."""

    def remove(self, logdir: Path, role: RoleName) -> None: ...


class DirectoryBook:
    """Addresses as files in the run's directory."""

    def publish(self, logdir: Path, role: RoleName, address: str) -> None:
        atomic_write(self._file(logdir, role), address)

    def find(self, logdir: Path, role: RoleName) -> str:
        try:
            return self._file(logdir, role).read_text()
        except FileNotFoundError:
            return ""

    def remove(self, logdir: Path, role: RoleName) -> None:
        path = self._file(logdir, role)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # others are in it, or there is none
            path.parent.rmdir()

    def _file(self, logdir: Path, role: RoleName) -> Path:
        return logdir / "addresses" / role


_book: AddressBook = DirectoryBook()


def use_book(book: AddressBook) -> None:
    """Publish and find addresses elsewhere, from now on in this process."""
    global _book
    _book = book


def listen_address(args: RunConfig, role: RoleName) -> str:
    """Where a role listens; `{auto}` in it stands for a free port or file."""
    address: str = getattr(args, f"{role}_addr")
    return address


def publish_address(args: RunConfig, role: RoleName, address: str) -> None:
    """Let others find a server whose address is known once it listens.

    A server that listens on all interfaces is published under this machine's name. The socket file
    of a predecessor that was killed is removed.
    """
    if AUTO not in listen_address(args, role):
        return
    parsed = parse(address)
    if parsed.host in ("*", "0.0.0.0", "::"):
        address = replace(parsed, host=socket.gethostname()).text
    before = _book.find(args.logdir, role)
    _book.publish(args.logdir, role, address)
    if before != address:
        _remove_socket(before)


def find_server(args: RunConfig, role: RoleName) -> str | Callable[[], str]:
    """The address of a role, for a `Client`; one that the settings leave open is looked up at every
    attempt to connect."""
    address = listen_address(args, role)
    return partial(published_address, args.logdir, role) if AUTO in address else address


def published_address(logdir: Path, role: RoleName) -> str:
    """The newest published address of a role; empty if there is none."""
    return _book.find(logdir, role)


def remove_addresses(logdir: Path) -> None:
    """Forget where the roles of a run listened, and remove the socket files of killed ones."""
    for role in SERVERS:
        _remove_socket(_book.find(logdir, role))
        _book.remove(logdir, role)


def _remove_socket(address: str) -> None:
    """Remove a socket file that nobody listens at any more."""
    if not address:
        return
    parsed = parse(address)
    if parsed.kind == "tcp" or not parsed.path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(parsed.path))
            return  # another run's, whose directory was copied
        except OSError:
            pass
    parsed.path.unlink(missing_ok=True)
    with suppress(OSError):  # not ours alone
        parsed.path.parent.rmdir()
