"""The answer to a call, which may not have come yet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dreamfleet.transport.errors import Timeout, TransportError

if TYPE_CHECKING:
    from dreamfleet.transport.client import Client


class Future:
    """The answer to one call.

    Waiting for it is what moves the connection: the waiting thread itself reads the socket, so an
    answer reaches it without passing through another thread.
    """

    __slots__ = ("_client", "_done", "_error", "_seen", "_value", "method", "request")

    def __init__(self, client: Client, method: str) -> None:
        self.method = method
        self.request: Any = None  # what the client keeps until the answer is here
        self._client = client
        self._done = False
        self._seen = False
        self._value: Any = None
        self._error: TransportError | None = None

    def done(self) -> bool:
        """Whether the answer is here. Does not wait."""
        if not self._done:
            self._client._progress(lambda: self._done, time.monotonic())
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the answer; False if it did not come within `timeout` seconds."""
        if not self._done:
            self._client._progress(lambda: self._done, self._client._deadline(timeout))
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        """The answer.

        Args:
            timeout: Seconds to wait; None takes the client's timeout.

        Raises:
            RemoteError: The method failed on the server.
            Disconnected: The server was lost, and the call could not be repeated.
            Timeout: The answer did not come in time. It may be asked for again.
        """
        if not self.wait(timeout):
            raise Timeout(self._client._why_waiting(self.method))
        self._seen = True
        if self._error is not None:
            raise self._error
        return self._value

    def _resolve(self, value: Any) -> None:
        self._value, self._done, self.request = value, True, None

    def _fail(self, error: TransportError) -> None:
        self._error, self._done, self.request = error, True, None

    def __del__(self) -> None:
        # Nobody can look at this answer any more: if it is an error, somebody must hear of it.
        if self._error is not None and not self._seen:
            self._client._unheard(self.method, self._error)
