"""What other roles know of the logger."""

from __future__ import annotations

import threading
import uuid
from typing import Any

from dreamfleet.config import JOINED, RunConfig
from dreamfleet.roles.addresses import find_server
from dreamfleet.transport import Client, Future

_NUMBERED = ("tran", "gone", "add", "evaluated")


class LoggerClient(Client):
    """A client of the logger. It numbers its messages: one whose reply was lost is sent again, and
    taken once.

    Args:
        args: The run.
        name: Shown in errors and logs.
        maxinflight: Calls without a reply.
    """

    def __init__(self, args: RunConfig, name: str, maxinflight: int = 16) -> None:
        super().__init__(find_server(args, "logger"), name, maxinflight, keys=args.run_keys)
        self._source, self._messages = uuid.uuid4().hex, 0
        self._in_order = threading.Lock()

    def call(self, method: str, /, *args: Any) -> Future:
        if method not in _NUMBERED:
            return super().call(method, *args)
        with self._in_order:
            self._messages += 1
            return super().call(method, *args, self._source, self._messages)


def video_env(args: RunConfig) -> int:
    """The environment whose episodes are recorded as videos; the actor sends no other's frames. It
    is the run's first one, or the first one of those that join."""
    return JOINED if args.bind and args.remote_envs else 0
