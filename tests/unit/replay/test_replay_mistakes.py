"""What callers may hand to a replay, and what the system may refuse it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_model import InOrder, batch, step

from dreamfleet.errors import ConfigError
from dreamfleet.replay import Replay, ReplayError, SchemaError, StorageFullError
from dreamfleet.replay.storage.memory import Arena

BYTES = 16384
"""Size of a chunk of sixteen steps."""


def tags(numbers: range) -> tuple[dict[str, Any], list[int]]:
    """A batch of steps of stream 0."""
    return batch([step(number) for number in numbers]), [0] * len(numbers)


def test_it_warns_of_bounds_that_cut_the_capacity(caplog: pytest.LogCaptureFixture) -> None:
    with Replay(1, 200_000, chunk=2) as replay:
        replay.add(step(0))
    assert "about 120,000 sequences" in caplog.text
    caplog.clear()
    with Replay(1, 1000, chunk=16, max_bytes=100 * BYTES) as replay:
        for stream in range(40):
            replay.add(step(0, stream), stream)
        assert caplog.text == ""
        for stream in range(40, 80):
            replay.add(step(0, stream), stream)
        assert "fewer than two chunks" in caplog.text


def test_ages_start_anew_after_a_load() -> None:
    with Replay(1, 5000, online=False) as replay:
        replay.add_batch(*tags(range(2000)))
        replay.sample(2000)
        state = replay.save()
    with Replay(1, 5000, online=False) as replay:
        replay.add_batch(*tags(range(2000)))
        replay.load(state)
        replay.sample(10)
        assert replay.stats()["sample_age_mean"] > 100


def test_sources_and_numbers_of_batches() -> None:
    with Replay(1, 10) as replay:
        data, streams = tags(range(1))
        assert replay.add_batch(data, streams, 1, 0) == 1
        assert replay.add_batch(data, streams, np.int64(1), np.int64(0)) == 0  # type: ignore[arg-type]
        assert replay.add_batch(data, streams, "a", 0) == 1
        assert replay.add_batch(data, streams, np.str_("a"), 0) == 0
        with pytest.raises(ConfigError, match="counts from 0"):
            replay.add_batch(data, streams, "a", -1)


def test_a_forked_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from dreamfleet.replay import Replay
replay = Replay(1, 10, sys.argv[1])
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, b"x")
    os.read(0, 1)
    os._exit(0)
os.read(reader, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE
    ) as process:
        assert process.wait() == -signal.SIGKILL
        Replay(1, 10, tmp_path).close()
        process.communicate(b"x")


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_flags_are_bools(dtype: Any) -> None:
    with Replay(2, 10) as replay, pytest.raises(SchemaError, match="give it as bool"):
        replay.add({"is_first": dtype(0), "is_last": np.bool_(False)})


def test_bytes_in_another_order() -> None:
    with Replay(1, 10, selector=InOrder()) as replay:
        for value in (1, 2):
            replay.add_batch({"x": np.array([value], ">f4")}, [0])
        replay.add_batch({"x": np.array([3], "<f4")}, [0])
        assert replay.sample(3, "report")["x"].ravel().tolist() == [1, 2, 3]


def test_a_mapping_that_is_refused_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageFullError("The operating system refused.")

    with Replay(1, 10, tmp_path, chunk=4) as replay:
        replay.add_batch(*tags(range(4)))
        monkeypatch.setattr(Arena, "map_file", refuse)
        with pytest.raises(StorageFullError):
            replay.add(step(4))
        assert len(list(tmp_path.glob("*.chunk"))) == 1
    with Replay(1, 10, tmp_path) as replay:
        assert list(replay.skipped_files.values()) == [
            "cannot be mapped: The operating system refused."
        ]
    monkeypatch.undo()
    with Replay(1, 10, tmp_path) as replay:
        assert len(replay) == 4


def test_a_directory_that_was_removed(tmp_path: Path) -> None:
    replay = Replay(1, 10, tmp_path / "replay")
    shutil.rmtree(tmp_path / "replay")
    with pytest.raises(ReplayError, match="cannot be written to") as caught:
        replay.add(step(0))
    assert not isinstance(caught.value, StorageFullError)


def test_only_its_own_half_made_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.partial").write_text("mine")
    with Replay(1, 10, tmp_path) as replay:
        assert set(replay.skipped_files) == {"thesis.partial"}
    assert (tmp_path / "thesis.partial").read_text() == "mine"


def test_updates_that_would_be_cut_are_refused() -> None:
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
