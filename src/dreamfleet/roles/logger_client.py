"""What other roles know of the logger."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.roles.addresses import find_server
from dreamfleet.transport import Client, Closed, Future

log = logging.getLogger(__name__)

_NUMBERED = ("tran", "gone", "add")


class LoggerClient(Client):
    """A client of the logger. It numbers its messages: one whose reply was lost is sent again, and
    taken once. Calls of a client that was closed, because the run ends without the logger, fail
    when their result is asked for."""

    def __init__(self, args: RunConfig, name: str, maxinflight: int = 16) -> None:
        super().__init__(find_server(args, "logger"), name, maxinflight, keys=args.run_keys)
        self._source, self._messages = uuid.uuid4().hex, 0
        self._in_order = threading.Lock()
        self._answered = (-1.0, 0.0)  # replies, and when the last one was seen

    def call(self, method: str, /, *args: Any) -> Future:
        try:
            if method not in _NUMBERED:
                return super().call(method, *args)
            with self._in_order:
                self._messages += 1
                return super().call(method, *args, self._source, self._messages)
        except Closed as error:
            future = Future(self, method)
            future._fail(error)
            return future

    @property
    def behind(self) -> bool:
        """Whether another message would wait for answers, as with a logger that is away; metrics
        are not worth that."""
        with suppress(Closed):
            self.wait_any((), 0.0)  # what it has answered is not in flight any more
        return len(self._pending) >= self._maxinflight

    def give_up_if_silent(self, seconds: float) -> None:
        """Hang up if calls wait for an answer, and none came since this was first asked, nor for so
        many seconds."""
        try:
            self.wait_any((), 0.0)
        except Closed:
            return
        stats, now = self.stats(), time.monotonic()
        if not stats["inflight"] or stats["replies"] != self._answered[0]:
            self._answered = stats["replies"], now
        elif now - self._answered[1] > seconds:
            log.warning(
                "The logger has not answered for %g s: the run ends without it, and %d messages "
                "with metrics are lost.",
                *(seconds, stats["inflight"]),
            )
            self.close(0.0)


def video_env(args: RunConfig) -> int:
    """The environment whose episodes are recorded as videos; the actor sends no other's frames. It
    is the run's first one, or the first one of those that join."""
    return args.all_envs if args.bind and args.remote_envs else 0
