"""Who may connect, and what each may call: the run key, keys for roles, and the check of both.

One secret per run. From it, both sides derive a CURVE key pair for the server and one for the
clients, so a client proves that it knows the secret, the server proves it too, and everything
between them is encrypted. Without the secret a connection ends in the handshake.

A role key opens less. It holds the servers' public key and a secret of its own, from which neither
the run key nor another role's follows. A server knows the role keys that are derived from the run
key; of others, such as invitations, it asks a function (`Identify`). What a key stands for
is libzmq's "User-Id" of every message of its connection, so each call is checked without a lookup
in anything that a client sent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from dreamfleet.files import atomic_write
from dreamfleet.transport.errors import SecurityError

log = logging.getLogger(__name__)

RUN = "run"
"""The role of the run key, which may call everything."""
_SIZE = 32
_ROLE = re.compile(r"[a-z][a-z0-9-]{0,31}")
_NAME = re.compile(r"[\w.@+-][\w.@+ -]{0,99}")


class Identity(NamedTuple):
    """What a key stands for: a role and, for an invitation, the name by which it is revoked."""

    role: str
    name: str = ""

    def check(self) -> Identity:
        """Itself, if both can be the name of something."""
        if not _ROLE.fullmatch(self.role) or (self.name and not _NAME.fullmatch(self.name)):
            raise SecurityError(
                f"{self.role!r:.100} and {self.name!r:.200} cannot be a role and a name: use at "
                "most 32 and 100 letters, digits, '-' and in names also '.', '_', '@', '+' and "
                "blanks."
            )
        return self


class Caller(NamedTuple):
    """Who makes a call."""

    role: str
    name: str
    address: str
    """The number of its machine, or of its process if it is on the same machine."""
    connection: bytes
    """Tells its connection from all others of the server."""

    def __str__(self) -> str:
        return f"{self.name!r} at {self.address}" if self.name else self.address


Identify = Callable[[bytes], Identity | None]
"""What the public key (32 bytes) of a client stands for; None if it is unknown."""
Revoked = Callable[[], Collection[str]]
"""The names that are revoked now. Asked every second, so it has to be quick."""


@dataclass(frozen=True)
class Keys:
    """The run key. Its holder may call everything, so it is kept in a file only its owner can
    read."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != _SIZE:
            raise SecurityError(f"A run key has {_SIZE} bytes, not {len(self.secret)}.")

    @classmethod
    def generate(cls) -> Keys:
        return cls(secrets.token_bytes(_SIZE))

    @classmethod
    def from_text(cls, text: str) -> Keys:
        try:
            return cls(bytes.fromhex(text.strip()))
        except ValueError:
            raise SecurityError(f"A run key is written as {2 * _SIZE} hex digits.") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Keys:
        """Read the file of a run key, refusing one that others can read."""
        return cls.from_text(_read(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a key file that only its owner can read; an existing one is replaced whole."""
        atomic_write(Path(path), self.secret.hex() + "\n", mode=0o600)

    def for_role(self, role: str) -> RoleKey:
        """The key that opens what this role may call. The same one each time."""
        Identity(role).check()
        secret = hashlib.blake2b(
            role.encode(), key=self.secret, digest_size=_SIZE, person=b"dreamfleet-role"
        ).digest()
        return self._key(role, secret)

    def invite(self, role: str) -> RoleKey:
        """Another key for this role; servers ask `Identify` what its `public` stands for."""
        return self._key(role, secrets.token_bytes(_SIZE))

    def identity(self, public: bytes, roles: Collection[str]) -> Identity | None:
        """What the public key of a client stands for, if it belongs to the run key or is derived
        from it for one of these roles."""
        if secrets.compare_digest(public, self._client.public):
            return Identity(RUN)
        for role in roles:
            if secrets.compare_digest(public, _public_of(self, role)):
                return Identity(role)
        return None

    @cached_property
    def _server(self) -> tuple[bytes, bytes]:
        """Public and secret."""
        secret = z85.encode(self._derive(b"serve"))
        return zmq.curve_public(secret), secret

    @cached_property
    def _client(self) -> RoleKey:
        return self._key(RUN, self._derive(b"clien"))

    def _derive(self, use: bytes) -> bytes:
        person = b"dreamfleet-" + use
        return hashlib.blake2b(self.secret, digest_size=_SIZE, person=person).digest()

    def _key(self, role: str, secret: bytes) -> RoleKey:
        return RoleKey(role, z85.decode(self._server[0]), secret)

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before it is bound, accept encrypted connections only."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._server

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before it connects, prove the key and demand proof."""
        self._client.protect_client(socket)


@lru_cache(maxsize=64)
def _public_of(keys: Keys, role: str) -> bytes:
    return keys.for_role(role).public


@dataclass(frozen=True)
class RoleKey:
    """What a client holds that may call what its role may, and nothing else.

    Args:
        role: Which role; for its owner to read, because a server goes by the key.
        server: The public key of the run's servers.
        secret: The client's own secret key.
    """

    role: str
    server: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        Identity(self.role).check()
        if len(self.server) != _SIZE or len(self.secret) != _SIZE:
            raise SecurityError(f"A role key holds two keys of {_SIZE} bytes.")

    @cached_property
    def public(self) -> bytes:
        """The client's public key, by which a server knows it."""
        return z85.decode(zmq.curve_public(z85.encode(self.secret)))

    @cached_property
    def text(self) -> str:
        """The key in letters, digits, '.', '-' and '_', which any URL may hold."""
        data = base64.urlsafe_b64encode(self.server + self.secret).decode().rstrip("=")
        return f"{self.role}.{data}"

    @classmethod
    def from_text(cls, text: str) -> RoleKey:
        role, _, data = text.strip().partition(".")
        try:
            keys = base64.b64decode(data + "=" * (-len(data) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            keys = b""
        if len(keys) != 2 * _SIZE:
            raise SecurityError(
                "Not a role key, which is a role's name, a dot and 86 characters: copy all of it."
            )
        return cls(role, keys[:_SIZE], keys[_SIZE:])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a key file that only its owner can read; an existing one is replaced whole."""
        atomic_write(Path(path), self.text + "\n", mode=0o600)

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before it connects, prove the key and demand proof."""
        socket.curve_serverkey = z85.encode(self.server)
        socket.curve_secretkey = z85.encode(self.secret)
        socket.curve_publickey = z85.encode(self.public)


def load_key(path: str | os.PathLike[str]) -> Keys | RoleKey:
    """Read a key file, of the run or of a role, refusing one that others can read."""
    text = _read(path)
    return RoleKey.from_text(text) if "." in text else Keys.from_text(text)


def _read(path: str | os.PathLike[str]) -> str:
    path = Path(path)
    try:
        mode, text = path.stat().st_mode, path.read_bytes()
    except OSError as problem:
        raise SecurityError(f"Cannot read the key {path}: {problem.strerror}.") from None
    if mode & 0o077:
        raise SecurityError(f"Others can read the key {path}: run 'chmod 600 {path}'.")
    return text.decode("ascii", "replace")


class Authenticator:
    """Answers libzmq's question, once per connection, whether a client's key is a right one.

    libzmq asks over a fixed in-process address of the server's context (the ZAP protocol). The
    server's own thread answers, so no further thread is needed.

    Args:
        context: The server's.
        keys: The run key.
        roles: The roles that may call some method of the server. Other keys do not even connect.
        identify: What other keys stand for.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Keys,
        roles: Collection[str],
        identify: Identify | None,
    ) -> None:
        self._keys, self._roles, self._identify = keys, roles, identify
        self.identities: dict[str, Identity] = {}
        """What the User-Id of a message stands for."""
        self.revoked: frozenset[str] = frozenset()
        """Names that do not connect."""
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> bool:
        """Answer one question; whether the client was admitted."""
        version, request, _domain, _address, _identity, mechanism, *credentials = (
            self.socket.recv_multipart()
        )
        found = self._find(credentials[0]) if mechanism == b"CURVE" and credentials else None
        code, text, user = b"400", b"wrong key", ""
        if found is not None:
            code, text, user = b"200", b"OK", f"{found.role}/{found.name}"
            self.identities[user] = found
        self.socket.send_multipart([version, request, code, text, user.encode(), b""])
        return found is not None

    def _find(self, public: bytes) -> Identity | None:
        found = self._keys.identity(public, self._roles)
        if found is None and self._identify is not None:
            try:
                found = self._identify(public)
                if found is not None and found.check().role == RUN:
                    raise SecurityError(
                        "A named key has the role of the run, which only the run key may have."
                    )
            except Exception:
                log.exception("A client is refused, because its key cannot be looked up.")
                return None
            if found and (found.role not in self._roles or found.name in self.revoked):
                return None
        return found
