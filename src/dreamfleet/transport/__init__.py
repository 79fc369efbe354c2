"""Calls between processes: fast, encrypted where they leave the machine, and hard to kill.

A `Server` offers functions, a `Client` calls them and gets a `Future`; a `BatchServer` answers
many callers with one computation. Read `wire` for what travels, `codec` for how values become
bytes, then `server` and `client`; `local` and `remote` carry the bytes.
"""

from dreamfleet.transport.address import resolve
from dreamfleet.transport.batching import BatchServer
from dreamfleet.transport.client import Client, Future
from dreamfleet.transport.codec import Block
from dreamfleet.transport.errors import (
    AddressError,
    ArgumentError,
    Closed,
    CodecError,
    Disconnected,
    MessageError,
    Occupied,
    RemoteError,
    SecurityError,
    Timeout,
    TransportError,
    Unanswered,
)
from dreamfleet.transport.security import Caller, Identity, Keys, RoleKey, load_key
from dreamfleet.transport.server import Server, answer_memory
from dreamfleet.transport.slab import renew, shared_arrays

__all__ = [
    "AddressError",
    "ArgumentError",
    "BatchServer",
    "Block",
    "Caller",
    "Client",
    "Closed",
    "CodecError",
    "Disconnected",
    "Future",
    "Identity",
    "Keys",
    "MessageError",
    "Occupied",
    "RemoteError",
    "RoleKey",
    "SecurityError",
    "Server",
    "Timeout",
    "TransportError",
    "Unanswered",
    "answer_memory",
    "load_key",
    "renew",
    "resolve",
    "shared_arrays",
]
