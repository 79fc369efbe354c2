"""Who may connect: the run key, and the check that every connection passes.

One secret per run. From it, both sides derive a CURVE key pair for the server and one for the
clients, so a client proves that it knows the secret, the server proves it too, and everything
between them is encrypted. Without the secret a connection ends in the handshake.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import zmq
from zmq.utils import z85

from dreamfleet.files import atomic_write
from dreamfleet.transport.errors import SecurityError

_SIZE = 32


@dataclass(frozen=True)
class Keys:
    """The run key. Whoever has it may connect, so it is kept in a file only its owner can read."""

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
        """Read a key file, refusing one that others can read."""
        path = Path(path)
        try:
            mode, text = path.stat().st_mode, path.read_text()
        except OSError as problem:
            raise SecurityError(f"Cannot read the run key {path}: {problem.strerror}.") from None
        if mode & 0o077:
            raise SecurityError(f"Others can read the run key {path}: run 'chmod 600 {path}'.")
        return cls.from_text(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a key file that only its owner can read; an existing one is replaced whole."""
        atomic_write(Path(path), self.secret.hex() + "\n", mode=0o600)

    @cached_property
    def _server(self) -> tuple[bytes, bytes]:
        return self._pair(b"server")

    @cached_property
    def _client(self) -> tuple[bytes, bytes]:
        return self._pair(b"client")

    def _pair(self, role: bytes) -> tuple[bytes, bytes]:
        secret = z85.encode(
            hashlib.blake2b(
                self.secret, digest_size=_SIZE, person=b"dreamfleet-" + role[:5]
            ).digest()
        )
        return zmq.curve_public(secret), secret

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before it is bound, accept encrypted connections only."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._server

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before it connects, prove the key and demand proof."""
        socket.curve_serverkey = self._server[0]
        socket.curve_publickey, socket.curve_secretkey = self._client

    def admits(self, credential: bytes) -> bool:
        """Whether this is the public key of a client that knows the secret."""
        return secrets.compare_digest(credential, z85.decode(self._client[0]))


class Authenticator:
    """Answers libzmq's question, once per connection, whether a client's key is the right one.

    libzmq asks over a fixed in-process address of the server's context (the ZAP protocol). The
    server's own thread answers, so no further thread is needed.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._keys = keys
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> bool:
        """Answer one question; whether the client was admitted."""
        version, request, _domain, _address, _identity, mechanism, *credentials = (
            self.socket.recv_multipart()
        )
        admitted = mechanism == b"CURVE" and any(map(self._keys.admits, credentials[:1]))
        code, text = (b"200", b"OK") if admitted else (b"400", b"wrong key")
        self.socket.send_multipart([version, request, code, text, b"", b""])
        return admitted
