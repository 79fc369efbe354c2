"""What follows a batch, off the path of its answer.

A batch is answered first. What is left to do with it (passing transitions on, for example) is
called its info and waits in a `PostQueue`, whose thread gives infos to a function in the order in
which the batches were made. A call of that function usually sends a message, and the message and
the waking of a thread cost more than the rows in it, so infos that follow each other quickly share
one call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dreamfleet.transport.errors import Timeout

log = logging.getLogger(__name__)

PostFn = Callable[[list[Any]], None]


class PostQueue:
    """Calls a function with the infos of batches: in order, one call at a time, on one thread.

    Methods marked with "(lock)" are called while the server's lock is held.

    Args:
        name: Shown in errors and logs, and the name of the thread.
        postfn: Gets a list of infos.
        lock: The server's lock.
        gather: Seconds that the oldest info waits for more to share its call.
        post_rows: Rows that end this wait, and the most rows of a call with more than one info.
            No batch is started while twice as many are outstanding.
        on_error: Told every error of `postfn`.
        on_room: Called (lock) when the backlog is no longer full, so batches may be started.
    """

    def __init__(
        self,
        name: str,
        postfn: PostFn,
        lock: threading.Lock,
        gather: float,
        post_rows: int,
        on_error: Callable[[BaseException], None] | None,
        on_room: Callable[[], None],
    ) -> None:
        self.name = name
        self.errors = 0
        self.rows = 0  # outstanding: of batches that were started and not yet passed on
        self._postfn, self._on_error, self._on_room = postfn, on_error, on_room
        self._gather, self._post_rows = gather, post_rows
        self._changed = threading.Condition(lock)
        self._started = 0  # the number that the next batch gets
        self._next = 0  # the number of the batch whose info is next
        # Batches that have ended before an earlier one, by number.
        self._finished: dict[int, tuple[int, list[Any]]] = {}
        self._waiting: deque[tuple[float, int, Any]] = deque()  # since when, rows, info
        self._waiting_rows = 0
        self._calls = 0
        self._closing = self._dropped = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    @property
    def full(self) -> bool:
        """(lock) Whether too much is outstanding to start another batch."""
        return self.rows >= 2 * self._post_rows

    def reserve(self, rows: int) -> int:
        """(lock) Count a batch that is started; returns its place in the order."""
        self.rows += rows
        self._started += 1
        return self._started - 1

    def put(self, number: int, rows: int, info: list[Any]) -> None:
        """(lock) Take the info of a batch, or an empty list if its work has failed."""
        if number != self._next:  # batches may end in another order than they were made
            self._finished[number] = rows, info
            return
        self._append(rows, info)
        self._next += 1
        while self._finished and self._next in self._finished:
            self._append(*self._finished.pop(self._next))
            self._next += 1

    def close(self, seconds: float) -> None:
        """Pass on what is left; with 0 seconds, drop it.

        Raises:
            Timeout: No call has ended for so many seconds. What is left is dropped.
        """
        with self._changed:
            for number in sorted(self._finished):  # what held them up will not end any more
                self._append(*self._finished.pop(number))
            self._closing = True
            if seconds <= 0:
                self._drop()
            self._changed.notify()
        if self._dropped or self.thread is threading.current_thread():
            return
        calls = -1
        while self.thread.is_alive():
            if calls == self._calls:
                with self._changed:
                    rows = self.rows
                    self._drop()
                raise Timeout(
                    f"{self.name} has passed nothing on for {seconds:g} s; {rows} rows are dropped."
                )
            calls = self._calls
            self.thread.join(seconds)

    def _append(self, rows: int, info: list[Any]) -> None:
        if self._closing or not info:
            self.rows -= rows
            return
        missing = self._post_rows - self._waiting_rows
        self._waiting.append((time.monotonic(), rows, info[0]))
        self._waiting_rows += rows
        # In between, the thread is busy or sleeps until the oldest has waited long enough.
        if len(self._waiting) == 1 or 0 < missing <= rows:
            self._changed.notify()

    def _drop(self) -> None:
        self._dropped = True
        self.rows -= self._waiting_rows
        self._waiting.clear()
        self._waiting_rows = 0

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while batches := self._next_batches():
            failed = False
            try:
                self._postfn([info for _, _, info in batches])
            except BaseException as error:  # whatever it is, it must not take the thread along
                failed = True
                self._report(error)
            with self._changed:
                held_back = self.full
                self.rows -= sum(rows for _, rows, _ in batches)
                self.errors += failed
                self._calls += 1
                if held_back and not self.full:
                    self._on_room()

    def _next_batches(self) -> list[tuple[float, int, Any]]:
        """What shares the next call; nothing at the end."""
        with self._changed:
            while self._waiting_rows < self._post_rows and not self._closing:
                if not self._waiting:
                    self._changed.wait()
                elif (left := self._waiting[0][0] + self._gather - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    break
            batches = []
            rows = 0
            while self._waiting and (not rows or rows + self._waiting[0][1] <= self._post_rows):
                batches.append(self._waiting.popleft())
                rows += batches[-1][1]
            self._waiting_rows -= rows
            return batches

    def _report(self, error: BaseException) -> None:
        if self._dropped:  # the server was closed without waiting for this call
            log.debug("%s failed after the end.", self.name, exc_info=error)
            return
        log.error("%s failed.", self.name, exc_info=error)
        if self._on_error:
            try:
                self._on_error(error)
            except Exception:
                log.exception("%s: reporting the failure failed.", self.name)
