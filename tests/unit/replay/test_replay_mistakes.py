"""Mistakes of callers, and values that look like mistakes and are not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_model import InOrder, step, tags

from dreamfleet.errors import ConfigError
from dreamfleet.replay import Replay, ReplayError, SchemaError, StorageFullError


def test_sources_and_numbers_of_batches() -> None:
    with Replay(1, 10) as replay:
        data, streams = tags(range(1))
        assert replay.add_batch(data, streams, 1, 0) == 1
        assert replay.add_batch(data, streams, np.int64(1), np.int64(0)) == 0  # type: ignore[arg-type]
        assert replay.add_batch(data, streams, "a", 0) == 1
        assert replay.add_batch(data, streams, np.str_("a"), 0) == 0
        with pytest.raises(ConfigError, match="counts from 0"):
            replay.add_batch(data, streams, "a", -1)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_flags_that_are_not_bools_are_refused(dtype: Any) -> None:
    with Replay(2, 10) as replay, pytest.raises(SchemaError, match="give it as bool"):
        replay.add({"is_first": dtype(0), "is_last": np.bool_(False)})


def test_big_endian_values_are_converted() -> None:
    with Replay(1, 10, selector=InOrder()) as replay:
        for value in (1, 2):
            replay.add_batch({"x": np.array([value], ">f4")}, [0])
        replay.add_batch({"x": np.array([3], "<f4")}, [0])
        assert replay.sample(3, "report")["x"].ravel().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "name",
    [10**4000, 1 << 63, -(1 << 63) - 1, np.uint64(1 << 63), "\U0001f600" * 100],
    ids=range(5),
)
def test_stream_names_that_are_too_long_are_refused(name: Any) -> None:
    with Replay(1, 10) as replay, pytest.raises(SchemaError, match="cannot name a stream"):
        replay.add(step(0), name)


def test_a_removed_directory_is_an_error(tmp_path: Path) -> None:
    replay = Replay(1, 10, tmp_path / "replay")
    shutil.rmtree(tmp_path / "replay")
    with pytest.raises(ReplayError, match="cannot be written to") as caught:
        replay.add(step(0))
    assert not isinstance(caught.value, StorageFullError)


def test_updates_that_would_lose_precision_are_refused() -> None:
    with Replay(1, 10) as replay:
        replay.add({"n": np.int32(1)})
        stepid = replay.sample(1)["stepid"]
        with pytest.raises(SchemaError, match="would be cut to int32"):
            replay.update({"stepid": stepid, "n": np.array([[2.7]])})
        assert replay.update({"stepid": stepid, "n": np.array([[2]])}) == 1


def test_an_update_of_steps_that_were_not_written_yet_is_skipped() -> None:
    """A stepid that is ahead of its stream names a place in a chunk, and nothing in it."""
    with Replay(2, 100, chunk=8) as replay:
        for tag in range(4):
            replay.add(step(tag))
        stepid = replay.sample(1, "eval")["stepid"].copy()
        stepid[..., 16:] = np.array([3, 4], ">u4").view(np.uint8).reshape(1, 2, 4)
        states = np.full((1, 2, 2, 2), -1, np.float32)
        assert replay.update({"stepid": stepid, "state": states}) == 0
        assert replay.stats()["skipped_updates"] == 2
        replay.add(step(4))
        assert (replay.sample(50, "eval")["state"] >= 0).all()
