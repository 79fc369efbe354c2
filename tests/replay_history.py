"""A fixed history of batches, and an audit of what a replay holds of it.

Batch k of the history holds some streams, several of them twice; the tag of a step says its stream
and its place in the stream. What a replay must hold after k batches therefore follows from k alone.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from replay_model import InOrder, batch, check_sequences, step

from dreamfleet.replay import Replay

LENGTH, CAPACITY, CHUNK, STREAMS = 5, 150, 8, 4
WRITER = "writer"


def streams_of(number: int) -> list[int]:
    """Which streams batch `number` holds steps of: from one to seven rows, some streams twice."""
    return [(number * 7 + 3 * row) % STREAMS for row in range(1 + number % 7)]


class History:
    """Batches, made one after the other, and the items that exist after each."""

    def __init__(self) -> None:
        self.batches: list[tuple[dict[str, Any], list[int]]] = []
        self._items: list[tuple[int, ...]] = []
        self._counts = [0]
        self._steps: dict[int, list[int]] = defaultdict(list)

    def batch(self, number: int) -> tuple[dict[str, Any], list[int]]:
        while len(self.batches) <= number:
            streams = streams_of(len(self.batches))
            rows = []
            for stream in streams:
                steps = self._steps[stream]
                steps.append(len(steps) * STREAMS + stream)
                rows.append(step(steps[-1], stream, first=len(steps) % 9 == 1))
                if len(steps) >= LENGTH:
                    self._items.append(tuple(steps[-LENGTH:]))
            self.batches.append((batch(rows), streams))
            self._counts.append(len(self._items))
        return self.batches[number]

    def items(self, batches: int) -> list[tuple[int, ...]]:
        """What the replay holds after so many batches, in order."""
        if batches:
            self.batch(batches - 1)
        return self._items[: self._counts[batches]][-CAPACITY:]


def open_replay(directory: Path) -> Replay:
    return Replay(LENGTH, CAPACITY, directory, chunk=CHUNK, selector=InOrder())


def add(replay: Replay, history: History, number: int) -> int:
    steps, streams = history.batch(number)
    return replay.add_batch(steps, streams, WRITER, number)


def write_history(directory: Path, batches: int) -> History:
    """A directory that holds the first batches."""
    history = History()
    with open_replay(directory) as replay:
        for number in range(batches):
            add(replay, history, number)
    return history


def audit(replay: Replay, history: History, acknowledged: int) -> int:
    """Check that the replay holds the acknowledged batches, perhaps one more, and nothing else.

    Returns how many batches it holds. The next one is sent first, as its sender would: it must be
    new or be recognised, and either way be there exactly once afterwards.
    """
    before = len(replay)
    items = check_sequences(replay.sample(before, "report"), LENGTH) if before else []
    options = [history.items(acknowledged), history.items(acknowledged + 1)]
    assert items in options, f"holds neither {acknowledged} nor {acknowledged + 1} batches"
    for held in (acknowledged, acknowledged + 1):
        rows = add(replay, history, held)
        assert rows in (0, len(streams_of(held)))
    items = check_sequences(replay.sample(len(replay), "report"), LENGTH) if len(replay) else []
    assert items == history.items(acknowledged + 2)
    return acknowledged + 2
