"""Who is copying sequences out right now."""

from __future__ import annotations

import threading


class Readers:
    """Lets samples copy without the replay's lock, while changes to stored bytes wait for them.

    `enter` and `wait_until_none` are called with the replay's lock held, so nobody can enter while
    somebody waits, and the wait is as long as one copy.
    """

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def enter(self) -> None:
        with self._changed:
            self._count += 1

    def leave(self) -> None:
        with self._changed:
            self._count -= 1
            if not self._count:
                self._changed.notify_all()

    def wait_until_none(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._count)
