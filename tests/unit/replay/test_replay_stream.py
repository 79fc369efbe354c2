"""Streams: consecutive batches with a context, saved and loaded anywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from replay_model import step

from dreamfleet.errors import ConfigError
from dreamfleet.replay import Replay, Stream


def windows(steps: int) -> Callable[[], dict[str, Any]]:
    """Windows of two rows; window n holds n * 1000 + time, and row 1 half more."""
    count = iter(range(1000))

    def source() -> dict[str, Any]:
        time = np.arange(steps) + 1000 * next(count)
        return {"time": np.stack([time, time + 500]), "image": np.ones((2, steps, 3), np.uint8)}

    return source


def test_consecutive_batches_overlap_by_the_context() -> None:
    stream = Stream(windows(7), length=2, consec=3, context=1)
    batches = [next(stream) for _ in range(4)]
    assert [b["time"][0].tolist() for b in batches] == [
        [0, 1, 2],
        [2, 3, 4],
        [4, 5, 6],
        [1000, 1001, 1002],
    ]
    assert [b["consec"].tolist() for b in batches] == [[[n] * 3] * 2 for n in (0, 1, 2, 0)]
    assert batches[0]["consec"].dtype == np.int32
    assert all(array.flags.c_contiguous for b in batches for array in b.values())


def test_a_report_uses_the_first_part_of_a_window() -> None:
    stream = Stream(windows(65), length=32, context=1)
    assert next(stream)["time"][1].tolist() == list(range(500, 533))
    assert next(stream)["time"][1].tolist() == list(range(1500, 1533))


@pytest.mark.parametrize("taken", range(7))
def test_a_stream_continues_where_it_was_saved(taken: int) -> None:
    source = windows(7)
    stream = Stream(source, length=2, consec=3, context=1)
    for _ in range(taken):
        next(stream)
    state = stream.save()
    assert all(isinstance(value, int | np.ndarray) for value in state.values())
    other = Stream(source, length=2, consec=3, context=1)
    other.load(state)
    expected = taken // 3 * 1000 + taken % 3 * 2
    assert next(other)["time"][0, 0] == expected


def test_windows_that_are_too_short() -> None:
    stream = Stream(windows(6), length=2, consec=3, context=1)
    with pytest.raises(ConfigError, match="length=7"):
        next(stream)
    with pytest.raises(ConfigError, match="length >= 1"):
        Stream(windows(6), length=0)
    assert Stream.window(64, 1, 1) == 65


def test_a_stream_from_a_replay() -> None:
    replay = Replay(Stream.window(2, 2, 1), 100)
    for tag in range(30):
        replay.add(step(tag))
    stream = Stream(partial(replay.sample, 4, mode="train"), length=2, consec=2, context=1)
    first, second = next(stream), next(stream)
    np.testing.assert_array_equal(first["tag"][:, -1], second["tag"][:, 0])
    assert first["stepid"].shape == (4, 3, 20)
    # The forced first step lies in the context of the first batch, and not in the second.
    assert first["is_first"][:, 0].all()
    assert not second["is_first"].any()


def test_a_window_with_more_parts_than_the_stream_has_now() -> None:
    stream = Stream(windows(9), length=2, consec=4, context=1)
    for _ in range(3):
        next(stream)
    other = Stream(windows(9), length=2, consec=2, context=1)
    other.load(stream.save())
    for part in (0, 1, 0):
        batch = next(other)
        assert batch["time"].shape[1] == 3
        assert (batch["consec"] == part).all()
