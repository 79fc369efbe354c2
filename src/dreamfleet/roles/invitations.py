"""Invitations: the lines by which other machines join a run.

An invitation is a key with a name. The line holds the key, which lets a machine join the run with
environments, and opens nothing else. Invitations lie in the folder `invitations` of the run's
directory, a file each, so that they can be made and revoked while the run goes on.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dreamfleet.errors import ConfigError
from dreamfleet.files import atomic_write, read_json
from dreamfleet.transport import Identity, Keys, RoleKey, TransportError
from dreamfleet.transport.address import Address

FOLDER = "invitations"
ROLE = "env"
"""The role of a machine that holds an invitation."""
FIRST = "first"
"""The name of the invitation that a run makes by itself."""
_SCHEME = "dreamfleet"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_PLACE_FILE = "place"


@dataclass(frozen=True)
class Invitation:
    """One key, and what became of it."""

    name: str
    key: str
    made: float
    """Unix time."""
    revoked: bool = False


@dataclass(frozen=True)
class Place:
    """Where machines join: what stands in the line, and the ports that have to be open."""

    host: str
    port: int
    ports: dict[str, int]
    """The ports of the other servers that a joined machine calls, by role."""


def url(place: Place, invitation: Invitation) -> str:
    """What is typed on the other machine."""
    address = Address("tcp", place.host, place.port)
    return f"{address.text.replace(address.kind, _SCHEME, 1)}/#{invitation.key}"


def join_line(place: Place, invitation: Invitation) -> str:
    """The command that is typed on the other machine."""
    return f"dreamfleet join '{url(place, invitation)}'"


def ports_line(place: Place) -> str:
    """What a firewall has to let through."""
    ports = ", ".join(map(str, (place.port, *place.ports.values())))
    return f"TCP ports to open on {place.host}: {ports}"


def first_invitation(logdir: Path, keys: Keys) -> Invitation:
    """The oldest invitation that is still good; made if there is none."""
    known = invitations(logdir)
    good = [each for each in known if not each.revoked]
    if good:
        return good[0]
    taken = {each.name for each in known}
    names = (FIRST if number == 1 else f"{FIRST}-{number}" for number in count(1))
    return invite(logdir, next(name for name in names if name not in taken), keys)


def read_url(text: str) -> tuple[Address, RoleKey]:
    """The address and the key that a line holds."""
    shape = f"'{_SCHEME}://HOST:PORT/#KEY'"
    text = text.strip().strip("'\"")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme != _SCHEME or not host or not port or parts.path not in ("", "/"):
        raise ConfigError(
            f"{text.partition('#')[0]!r} is not the address of a run: copy the whole {shape} that "
            "'dreamfleet train --bind' printed, with its quotes."
        )
    if not parts.fragment:
        raise ConfigError(
            f"The address has no key after its '#': copy the whole {shape}, with its quotes."
        )
    try:
        return Address("tcp", host, port), RoleKey.from_text(parts.fragment)
    except TransportError:
        raise ConfigError(
            f"The key after the '#' is damaged: copy the whole {shape}, with its quotes."
        ) from None


def invite(logdir: Path, name: str, keys: Keys) -> Invitation:
    """Make an invitation of a name that is not taken."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name an invitation: use up to 40 letters, digits, - and _."
        )
    if any(each.name == name for each in invitations(logdir)):
        raise ConfigError(
            f"The name {name!r} is or was used for an invitation: choose another name."
        )
    invitation = Invitation(name, keys.invite(ROLE).text, time.time())
    _write(logdir, invitation)
    return invitation


def revoke(logdir: Path, name: str) -> Invitation:
    """Make an invitation invalid."""
    found = {each.name: each for each in invitations(logdir)}
    if name not in found:
        known = ", ".join(found) or "none"
        raise ConfigError(f"There is no invitation {name!r}; those of {logdir} are: {known}.")
    _write(logdir, replace(found[name], revoked=True))
    return replace(found[name], revoked=True)


def invitations(logdir: Path) -> list[Invitation]:
    """All invitations of a run, in the order in which they were made."""
    found = [
        invitation
        for path in sorted((logdir / FOLDER).glob("*.json"))
        if (invitation := read_json(path, Invitation)) is not None
    ]
    return sorted(found, key=lambda each: each.made)


def find_url(text: str) -> str:
    """The address that is meant: what was typed, or what stands in the file or in the run's
    directory of that name."""
    path = Path(text)
    if f"{_SCHEME}://" in text or not text.strip() or not path.exists():
        return text
    if path.is_dir():
        place = read_place(path)
        good = [each for each in invitations(path) if not each.revoked]
        if place is None or not good:
            raise ConfigError(
                f"The run in {path} cannot be joined: start it with --bind 0.0.0.0, or look at its "
                f"invitations with 'dreamfleet invite {path}'."
            )
        return url(place, good[0])
    try:
        found = re.search(rf"{_SCHEME}://[^\s'\"]+", path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    return found[0] if found else text


class Invited:
    """Who holds the invitations of a run, for its servers. Cheap to ask: files are read again only
    when one was added or replaced."""

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        # The files, and what they say; all at once, because several threads ask.
        self._known: tuple[set[tuple[str, int]], dict[bytes, Invitation]] = (set(), {})

    def identify(self, public: bytes) -> Identity | None:
        """What a public key stands for; None for a stranger's."""
        found = self._read().get(public)
        return None if found is None or found.revoked else Identity(ROLE, found.name)

    def revoked(self) -> frozenset[str]:
        """The names of invitations that are not good any more."""
        return frozenset(each.name for each in self._read().values() if each.revoked)

    def hooks(self) -> dict[str, Any]:
        """The arguments of a server that admits those who are invited."""
        return {"identify": self.identify, "revoked": self.revoked}

    def _read(self) -> dict[bytes, Invitation]:
        """All invitations by their public keys."""
        try:  # a file that was replaced has another inode
            files = {(each.name, each.inode()) for each in os.scandir(self._logdir / FOLDER)}
        except OSError:
            return self._known[1]
        if files != self._known[0]:
            found = {}
            for each in invitations(self._logdir):
                with suppress(TransportError):  # a damaged file is no invitation
                    found[RoleKey.from_text(each.key).public] = each
            self._known = files, found
        return self._known[1]


def write_place(logdir: Path, place: Place) -> None:
    """Keep where machines join: a resume of the run listens there again."""
    atomic_write(_folder(logdir) / _PLACE_FILE, msgspec.json.encode(place))


def read_place(logdir: Path) -> Place | None:
    """Where machines could join last; None if they never could."""
    return read_json(logdir / FOLDER / _PLACE_FILE, Place)


def _write(logdir: Path, invitation: Invitation) -> None:
    path = _folder(logdir) / f"{invitation.name}.json"
    atomic_write(path, msgspec.json.encode(invitation), mode=0o600)


def _folder(logdir: Path) -> Path:
    folder = logdir / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
