"""Addresses as they are written, and what they mean.

ipc:///run/user/1000/x/replay   a socket file; its directory is, or is made, private (0700)
tcp://host:port, host:port      a port; anything but loopback needs keys
{auto}                          anywhere in the last part: a free port, file or name
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import ipaddress
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dreamfleet.transport.errors import AddressError, SecurityError

AUTO = "{auto}"
_PATH_LIMIT = 103  # bytes; the smallest limit on a socket file's path among the systems we know


@dataclass(frozen=True)
class Address:
    """A parsed address; `text` is what a client may use to connect."""

    kind: str
    host: str = ""
    port: int = 0
    path: Path = Path()

    @property
    def text(self) -> str:
        if self.kind == "tcp":
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"tcp://{host}:{self.port or AUTO}"
        return f"ipc://{self.path}"

    @property
    def loopback(self) -> bool:
        if self.kind != "tcp":
            return True
        if self.named:
            return self.host == "localhost"
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def named(self) -> bool:
        """Whether the host is a name, and not a number."""
        if self.kind != "tcp":
            return False
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return True
        return False


def parse(text: str) -> Address:
    """Understand an address.

    Raises:
        AddressError: It cannot be understood; the message shows what an address looks like.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "tcp", text
    if scheme == "tcp":
        return _parse_tcp(text, rest)
    if scheme == "ipc" and rest:
        return _socket_file(Path(rest))
    raise AddressError(_examples(text))


def resolve(text: str) -> str:
    """Replace `{auto}` now, for servers that others must know before they are started.

    A port found this way is free at the moment of asking; a socket file's name is unique.
    """
    address = parse(text)
    if address.kind == "tcp" and address.port == 0:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind(("" if address.host in ("*", "0.0.0.0") else address.host, 0))
            port = probe.getsockname()[1]
        return Address("tcp", address.host, port).text
    return address.text


def endpoints(address: Address) -> list[str]:
    """What libzmq may be told to connect to. A name stands for one or several numbers, and the
    server may listen at any of them; for none if the name is unknown."""
    if not address.named or address.host == "*":  # which stands for every number
        return [address.text]
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found.sort(key=lambda info: info[0] != socket.AF_INET)  # where most servers listen
    hosts = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    return [Address("tcp", host, address.port).text for host in hosts]


def prepare(address: Address) -> None:
    """Make a private directory for a socket file, and refuse one that others can enter.

    Raises:
        SecurityError: The directory is open to others, or another user's.
        AddressError: Another server is alive at this address.
    """
    if address.kind == "tcp":
        return
    directory = address.path.parent
    if _MADE_UP.fullmatch(directory.name):
        _remove_stale()
        _hold(directory)
    else:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(directory.stat()):
        raise SecurityError(
            f"The directory {directory} of a socket file must be yours alone: run 'chmod 700 "
            f"{directory}', name another directory, or use ipc://{AUTO}."
        )
    # A server replaces the file of a dead one; it must not steal a living server's address.
    if not is_unused(address.path):
        raise AddressError(f"Another server is already running at {address.text}.")


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def is_unused(path: Path) -> bool:
    """Whether no server listens at a socket file, or it does not exist."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a server that is stopped has no room for more at some time
        return probe.connect_ex(str(path)) in (errno.ECONNREFUSED, errno.ENOENT)


def file_identity(address: Address) -> tuple[int, int] | None:
    """Which file a server's socket is, so that it never removes its successor's."""
    try:
        status = address.path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def clean_up(address: Address, identity: tuple[int, int] | None) -> None:
    """Remove the socket file if it is still the one, and its directory if we made it up."""
    if address.kind == "tcp":
        return
    if file_identity(address) == identity:
        address.path.unlink(missing_ok=True)
    directory = address.path.parent
    if (held := _held.pop(directory, None)) is not None:
        with suppress(OSError):  # it holds other files
            directory.rmdir()
        os.close(held)


# --- directories that are made up ----------------------------------------------------------------

_PREFIX = "dreamfleet-"
_TOKEN = secrets.token_hex(4)
_AS_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MADE_UP = re.compile(_PREFIX + r"\d+-[0-9a-f]{8}-[0-9a-f]{12}")
_held: dict[Path, int] = {}  # those of this process, and the open files that lock them


def _private_directory(name: str) -> Path:
    """A directory for one address of this process. No two share one, so that each is free to
    remove its own."""
    digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    return Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getpid():07}-{_TOKEN}-{digest}"


def _hold(directory: Path) -> None:
    """Make a directory, and lock it for as long as this process lives."""
    while directory not in _held:
        directory.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # it was taken for a dead one's, and removed
            descriptor = os.open(directory, _AS_DIRECTORY)
            with suppress(OSError):  # where nothing can be locked, nothing is removed
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:
                _held[directory] = descriptor
            else:
                os.close(descriptor)


def remove_socket_files() -> None:
    """Remove the socket files in directories that this process made up, because it is about to end
    without closing its servers."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.getpid():07}-{_TOKEN}-*"):
        shutil.rmtree(directory, ignore_errors=True)


@atexit.register
def _leave_nothing() -> None:
    """An exception, such as Ctrl-C, may come between making a directory and who would remove it."""
    if _held:
        remove_socket_files()


@cache  # once in a process is enough
def _remove_stale() -> None:
    """Remove the directories that killed processes have left behind.

    A living process holds a lock, and answers. A process id says nothing about another container,
    or about another machine with the same temporary directory.
    """
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _MADE_UP.fullmatch(entry.name):
                with suppress(OSError):  # in use, not ours, or just removed by another one
                    _remove_if_stale(Path(entry.path))


def _remove_if_stale(directory: Path) -> None:
    descriptor = os.open(directory, _AS_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_private(os.fstat(descriptor)):
            return
        for entry in list(os.scandir(descriptor)):
            mode = entry.stat(follow_symlinks=False).st_mode
            # Versions before this one hold no lock.
            if stat.S_ISSOCK(mode) and is_unused(directory / entry.name):
                os.unlink(entry.name, dir_fd=descriptor)
        directory.rmdir()
    finally:
        os.close(descriptor)


def _socket_file(path: Path) -> Address:
    if AUTO in path.name:
        name = path.name.replace(AUTO, secrets.token_hex(6))
        path = (_private_directory(name) if path.parent == Path() else path.parent) / name
    path = path.absolute()
    if len(os.fsencode(path)) > _PATH_LIMIT:
        fix = f"use a shorter directory, or ipc://{AUTO}"
        if _MADE_UP.fullmatch(path.parent.name):
            fix = f"set TMPDIR to a shorter path than {path.parent.parent}"
        raise AddressError(
            f"The socket file {path} has too long a path (at most {_PATH_LIMIT} bytes): {fix}."
        )
    return Address("ipc", path=path)


def _parse_tcp(text: str, rest: str) -> Address:
    host, separator, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or "/" in rest or len(rest.split()) > 1:
        raise AddressError(_examples(text))
    if port == AUTO:
        return Address("tcp", host)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise AddressError(f"{text!r} needs a port from 1 to 65535, or {AUTO} for a free one.")
    return Address("tcp", host, int(port))


def _examples(text: str) -> str:
    return (
        f"{text!r} is not an address; write ipc:///directory/file, tcp://host:port or host:port, "
        f"with {AUTO} for a free port or file."
    )
