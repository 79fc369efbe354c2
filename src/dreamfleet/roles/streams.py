"""Batches from a replay that is somewhere else."""

from __future__ import annotations

from collections import deque
from typing import Any

from dreamfleet.transport import Client, Future

LOOK_AHEAD = 2
"""Batches that are asked for before they are needed."""


class RemoteStream:
    """The batches of one of the replay's streams, asked for ahead of their use.

    Nothing is asked for before the first batch is wanted: what the replay has then is newer.
    """

    def __init__(self, client: Client, mode: str) -> None:
        self._client = client
        self._method = f"sample_batch_{mode}"
        self._asked: deque[Future] = deque()

    def take(self) -> dict[str, Any] | None:
        """The next batch; None if the replay has too little data for one."""
        while len(self._asked) < LOOK_AHEAD:
            self._ask()
        batch: dict[str, Any] = self._asked.popleft().result()
        if not batch:
            # Those asked for at the same time are as empty, and would be stale by the next time.
            self._asked.clear()
            return None
        self._ask()
        return batch

    def _ask(self) -> None:
        self._asked.append(self._client.call(self._method))
