"""What a server needs of a place where it listens; `local` and `remote` have one each."""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

from dreamfleet.transport.address import Address
from dreamfleet.transport.codec import Buffer
from dreamfleet.transport.security import Caller, Identity
from dreamfleet.transport.slab import Memory

FOREVER = float("inf")
Poller: TypeAlias = "select.epoll | select.poll"


class Origin(ABC):
    """Where a message came from."""

    __slots__ = ("identity", "peer")

    def __init__(self, peer: bytes, identity: Identity) -> None:
        self.peer = peer
        """Tells the connection from all others of the server."""
        self.identity = identity

    @property
    @abstractmethod
    def address(self) -> str:
        """The number of its machine, or of its process if it is on the same machine."""

    @property
    def caller(self) -> Caller:
        return Caller(*self.identity, self.address, self.peer)


class Listener(ABC):
    """Takes connections, receives messages and sends answers. Touched under the loop's lock."""

    address: Address
    """Where clients connect."""
    refused = 0
    """Connections that were refused for their key."""
    ended = 0
    """Connections that were ended, for what they did."""

    @property
    @abstractmethod
    def due(self) -> float:
        """When `on_due` wants to be called."""

    @abstractmethod
    def register(self, poller: Poller) -> None:
        """Have the poller watch everything that may become readable."""

    @abstractmethod
    def notice(self, descriptor: int, events: int) -> None:
        """The poller reports a descriptor, of this listener or another one."""

    @abstractmethod
    def receive(self) -> tuple[Origin, list[Any]] | None:
        """The next message, if there is one. Connections have their turns."""

    @abstractmethod
    def send(self, peer: bytes, frames: list[Buffer]) -> bool:
        """Send a message; False if the peer has gone or does not read."""

    def memory(self, peer: bytes, size: int) -> Memory | None:  # noqa: ARG002 - of local peers only
        """Memory whose content `send` does not copy, if there is some."""
        return None

    @abstractmethod
    def connected(self, peer: bytes) -> bool:
        """Whether a peer is connected."""

    @abstractmethod
    def hang_up(self, origin: Origin) -> None:
        """End the connection of a peer, if it is there."""

    def on_due(self) -> None:
        """Look after connections."""
        return

    def readable(self) -> bool:
        """Whether a message waits that the poller may not report."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""
