"""Adding, sampling and updating at once: no sequence and no state is ever half written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dreamfleet.replay import Prioritized, Replay

LENGTH, WIDTH = 6, 3000
STREAMS, ROUNDS, TURNS = 3, 700, 20


def steps(tag: int) -> dict[str, np.ndarray]:
    """One wide step for each stream; every value says the tag."""
    tags = np.full(STREAMS, tag, np.int64)
    return {
        "tag": tags,
        "stream": np.arange(STREAMS),
        "wide": np.repeat(tags[:, None], WIDTH, 1).astype(np.float32),
        "state": np.zeros((STREAMS, WIDTH), np.float32),
    }


@pytest.mark.parametrize("storage", ["disk", "memory"])
def test_no_sequence_is_half_written(storage: str, tmp_path: Path) -> None:
    """The replay is so small that chunks are evicted all the time, while others sample."""
    directory = tmp_path if storage == "disk" else None
    replay = Replay(LENGTH, 150, directory, chunk=16, selector=Prioritized())
    for tag in range(LENGTH):
        replay.add_batch(steps(tag), np.arange(STREAMS))
    failures: list[BaseException] = []
    written = threading.Event()
    counts = {"samples": 0, "updates": 0}

    def write() -> None:
        # Until the others have had their turns, however busy the machine is.
        tag = LENGTH
        while not written.is_set() and (tag < ROUNDS or min(counts.values()) < TURNS):
            replay.add_batch(steps(tag), np.arange(STREAMS), "writer", tag)
            tag += 1
        counts["rounds"] = tag
        written.set()

    def sample() -> None:
        while not written.is_set():
            data = replay.sample(8)
            counts["samples"] += 1
            first = data["tag"][:, :1]
            np.testing.assert_array_equal(data["tag"], first + np.arange(LENGTH))
            assert (data["stream"] == data["stream"][:, :1]).all()
            assert (data["wide"] == data["tag"][..., None]).all()
            assert (data["state"] == data["state"][..., :1]).all(), "a state was half written"

    def update() -> None:
        value = 0
        while not written.is_set():
            data = replay.sample(4, "report")
            value += 1
            replay.update(
                {
                    "stepid": data["stepid"],
                    "state": np.full((4, LENGTH, WIDTH), value, np.float32),
                    "priority": np.full((4, LENGTH), value % 5, np.float32),
                }
            )
            counts["updates"] += 1

    def guarded(target: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                target()
            except BaseException as error:
                failures.append(error)
                written.set()

        return run

    threads = [threading.Thread(target=guarded(t)) for t in (write, sample, sample, update)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert replay.stats()["inserts"] == STREAMS * counts["rounds"]
    replay.close()


def test_two_writers_of_different_streams() -> None:
    replay = Replay(4, 10_000, chunk=32)

    def write(stream: int) -> None:
        for tag in range(500):
            replay.add({"tag": np.int64(stream * 1000 + tag)}, stream)

    threads = [threading.Thread(target=write, args=(stream,)) for stream in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replay) == 4 * 497
    tags = replay.sample(1000, "eval")["tag"]
    np.testing.assert_array_equal(tags, tags[:, :1] + np.arange(4))
