"""A replay that is slow and obvious, to compare the real one with: lists of steps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from dreamfleet.replay import Draw, Selector


def step(tag: int, stream: int = 0, first: bool = False, last: bool = False) -> dict[str, Any]:
    """A step whose every value follows from its tag."""
    return {
        "tag": np.int64(tag),
        "stream": np.int32(stream),
        "vector": np.arange(tag, tag + 3, dtype=np.float32),
        "state": np.full((2, 2), tag, np.float32),
        "is_first": np.bool_(first),
        "is_last": np.bool_(last),
    }


def batch(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: np.stack([s[key] for s in steps]) for key in steps[0]}


def tags(numbers: range) -> tuple[dict[str, Any], list[int]]:
    """A batch of steps of stream 0, and their streams."""
    return batch([step(number) for number in numbers]), [0] * len(numbers)


class InOrder(Selector):
    """Lists the living items from the oldest to the newest."""

    def draw(self, request: Draw) -> Any:
        return request.low + np.arange(request.count) % (request.high - request.low)


class ModelReplay:
    """Tags of steps by stream, and items in the order they were completed."""

    def __init__(self, length: int, capacity: int) -> None:
        self.length = length
        self.capacity = capacity
        self.streams: dict[Any, list[int]] = defaultdict(list)
        self.items: list[tuple[int, ...]] = []
        self.online: list[tuple[int, ...]] = []
        self._windows_from: dict[Any, int] = {}

    def add(self, tag: int, stream: Any) -> None:
        steps = self.streams[stream]
        steps.append(tag)
        if len(steps) >= self.length:
            item = tuple(steps[-self.length :])
            self.items.append(item)
            if (len(steps) - self._windows_from.get(stream, 1)) % self.length == 0:
                self.online.append(item)
        if len(self.items) > self.capacity:
            gone = self.items.pop(0)
            if self.online and self.online[0] == gone:
                self.online.pop(0)

    def restart(self) -> None:
        """What was fresh is so no more; online windows begin with the next steps."""
        self.online = []
        self._windows_from = {stream: len(steps) for stream, steps in self.streams.items()}


def check_sequences(data: dict[str, Any], length: int) -> list[tuple[int, ...]]:
    """Check that a sampled batch is made of whole steps of one stream each; returns the tags."""
    assert data["tag"].shape[1] == length
    assert all(array.flags.c_contiguous for array in data.values())
    np.testing.assert_array_equal(data["vector"], data["tag"][..., None] + np.arange(3))
    assert (data["stream"] == data["stream"][:, :1]).all()
    assert data["is_first"][:, 0].all()
    return [tuple(row) for row in data["tag"].tolist()]


def all_items(replay: Any) -> list[tuple[int, ...]]:
    """Every living item in order; needs the selector `InOrder`."""
    return check_sequences(replay.sample(len(replay), "report"), replay.length)
