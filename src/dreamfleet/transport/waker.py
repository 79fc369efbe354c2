"""Wake a thread that is blocked in a poll."""

from __future__ import annotations

import socket
import threading


class Waker:
    """A descriptor that becomes readable when another thread calls `wake`.

    Any number of calls before the sleeper gets up make one wake-up.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._awake = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with self._lock:
            if self._awake or self._writer.fileno() < 0:
                return
            self._awake = True
            self._writer.send(b"!")

    def clear(self) -> None:
        """The sleeper is up and will now look at everything there is."""
        with self._lock:
            if self._awake and self._reader.fileno() >= 0:
                self._awake = False
                self._reader.recv(16)

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._writer.close()
