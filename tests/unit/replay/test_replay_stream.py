"""Streams: batches with a context, cut from sampled windows."""

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


@pytest.mark.parametrize("steps", [3, 7], ids=["whole window", "first part of a window"])
def test_a_batch_is_the_context_and_the_steps_after_it(steps: int) -> None:
    stream = Stream(windows(steps), length=2, context=1)
    batches = [next(stream) for _ in range(2)]
    assert [b["time"].tolist() for b in batches] == [
        [[0, 1, 2], [500, 501, 502]],
        [[1000, 1001, 1002], [1500, 1501, 1502]],
    ]
    assert batches[0].keys() == {"time", "image"}
    assert all(array.flags.c_contiguous for b in batches for array in b.values())


def test_windows_that_are_too_short_are_refused() -> None:
    stream = Stream(windows(6), length=6, context=1)
    with pytest.raises(ConfigError, match="length=7"):
        next(stream)
    with pytest.raises(ConfigError, match="length >= 1"):
        Stream(windows(6), length=0)
    assert Stream(windows(6), 64, context=1).window == 65


def test_a_stream_from_a_replay() -> None:
    replay = Replay(5, 100)
    for tag in range(30):
        replay.add(step(tag))
    batch = next(Stream(partial(replay.sample, 4, mode="train"), length=2, context=1))
    assert batch["stepid"].shape == (4, 3, 20)
    # The forced first step lies in the context.
    assert batch["is_first"].tolist() == [[True, False, False]] * 4
