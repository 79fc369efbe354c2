"""What can go wrong between a client and a server.

TransportError
├── AddressError        an address that cannot be understood or used
├── SecurityError       a server open to the network, or a key that is not secret
├── CodecError          a value that cannot be sent; the message names its place
├── MessageError        bytes that are not one of our messages
├── ArgumentError       arguments that a method does not take
├── Occupied            what a call is about belongs to another connection
├── RemoteError         the server's method failed; holds the remote traceback
├── Unanswered          a server that is about to end leaves a call to its successor
├── Disconnected        the connection was lost, or no server answers at the address
├── Timeout             the answer did not come in the time allowed
└── Closed              the client or server was closed on this side
"""

from dreamfleet.errors import DreamfleetError


class TransportError(DreamfleetError):
    """Base of everything the transport raises."""


class AddressError(TransportError, ValueError):
    """An address that cannot be understood or used."""


class SecurityError(TransportError):
    """A server open to the network, or a run key that cannot be used or is not secret."""


class CodecError(TransportError, TypeError):
    """A value that cannot be sent."""


class MessageError(TransportError, ValueError):
    """Bytes that are not a valid message."""


class ArgumentError(TransportError, ValueError):
    """Arguments that a method does not take. Raised by checks on the server, before the call has
    touched anything; a client that makes many such calls loses its connection."""


class Occupied(TransportError):
    """What a call is about belongs to another connection, for now. Raised by checks on the server;
    it is no fault of the caller, and may be tried again."""


class RemoteError(TransportError):
    """The method failed on the server, which is still running."""

    def __init__(self, message: str, kind: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.traceback = traceback

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\nRemote traceback:\n{self.traceback}" if self.traceback else text


class Unanswered(TransportError):
    """Raised by a method of a server that is about to end: its caller gets no answer, and asks the
    successor if the method is repeatable."""


class Disconnected(TransportError, ConnectionError):
    """The connection was lost before the answer came. Whether the method ran is unknown."""


class Timeout(TransportError, TimeoutError):
    """The answer did not come in the time allowed. It may still come."""


class Closed(TransportError):
    """This side was closed."""
