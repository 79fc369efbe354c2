"""The contract of a replay, over every selector and both kinds of storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from replay_model import InOrder, ModelReplay, batch, check_sequences, step

from dreamfleet.replay import (
    Fractions,
    NotEnoughDataError,
    Prioritized,
    Recency,
    Replay,
    ReplayClosedError,
    ReplayConfig,
    SchemaError,
    Selector,
    Uniform,
    make_selector,
)

SELECTORS: dict[str, Callable[[], Selector]] = {
    "uniform": Uniform,
    "in-order": InOrder,
    "recency": Recency,
    "prioritized": Prioritized,
    "prioritized-finite": lambda: Prioritized(initial=1.0, zero_on_sample=False),
    "mixture": lambda: make_selector(ReplayConfig(fractions=Fractions(0.5, 0.2, 0.3))),
}


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "replay" if request.param == "disk" else None


@pytest.fixture(params=SELECTORS)
def make(request: pytest.FixtureRequest, directory: Path | None) -> Iterator[Callable[..., Replay]]:
    made: list[Replay] = []

    def factory(length: int = 4, capacity: int = 100, **options: Any) -> Replay:
        selector = SELECTORS[request.param]()
        options = {"chunk": 8, "selector": selector, **options}
        made.append(Replay(length, capacity, directory, **options))
        return made[-1]

    yield factory
    for replay in made:
        replay.close()


def fill(replay: Replay, count: int, streams: int = 3) -> ModelReplay:
    model = ModelReplay(replay.length, replay.capacity)
    for tag in range(count):
        replay.add(step(tag, tag % streams), tag % streams)
        model.add(tag, tag % streams)
    return model


def test_samples_are_living_items(make: Callable[..., Replay]) -> None:
    replay = make(capacity=30)
    model = fill(replay, 200)
    for mode in ("train", "report", "eval"):
        assert set(check_sequences(replay.sample(64, mode), 4)) <= set(model.items)


def test_every_item_can_be_drawn(make: Callable[..., Replay]) -> None:
    replay = make(capacity=12, online=False)
    model = fill(replay, 60)
    seen: set[tuple[int, ...]] = set()
    for _ in range(60):
        seen |= set(check_sequences(replay.sample(16, "eval"), 4))
    assert seen == set(model.items)


def test_online_sequences_come_first_and_once(make: Callable[..., Replay]) -> None:
    replay = make()
    model = fill(replay, 60)
    fresh = list(model.online)
    assert len(fresh) > 5
    replay.sample(5, "report")
    tags = check_sequences(replay.sample(len(fresh)), 4)
    assert tags == fresh
    assert replay.stats()["online_queue"] == 0


def test_online_can_be_switched_off(make: Callable[..., Replay]) -> None:
    replay = make(online=False)
    fill(replay, 60)
    queued = replay.stats()["online_queue"]
    replay.sample(8)
    assert replay.stats()["online_queue"] == queued


def test_same_seed_same_draws(directory: Path | None, make: Callable[..., Replay]) -> None:
    replay = make(seed=3, online=False)
    fill(replay, 90)
    drawn = replay.sample(50)["tag"]
    replay.close()
    if directory is None:
        replay = make(seed=3, online=False)
        fill(replay, 90)
    else:
        replay = make(seed=3, online=False)
    np.testing.assert_array_equal(drawn, replay.sample(50)["tag"])


def test_reports_do_not_change_training_samples(make: Callable[..., Replay]) -> None:
    """Two replays with the same history, one of them also asked for reports in between."""
    quiet = make(online=False)
    fill(quiet, 90)
    plain = [quiet.sample(7)["tag"] for _ in range(6)]
    quiet.close()
    asked = make(online=False)
    if not quiet.directory:
        fill(asked, 90)
    for tags in plain:
        asked.sample(5, "report")
        np.testing.assert_array_equal(asked.sample(7)["tag"], tags)


def test_an_update_is_seen_by_every_sequence_with_the_step(make: Callable[..., Replay]) -> None:
    replay = make()
    fill(replay, 60)
    data = replay.sample(4, "eval")
    states = np.full((*data["tag"].shape, 2, 2), -1, np.float32)
    assert replay.update({"stepid": data["stepid"], "state": states}) == data["tag"].size
    changed = set(data["tag"].flat)
    after = replay.sample(200, "eval")
    expected = [-1 if tag in changed else tag for tag in after["tag"].flat]
    np.testing.assert_array_equal(after["state"].reshape(-1, 4)[:, 0], expected)


def test_updates_of_evicted_steps_are_skipped_and_counted(make: Callable[..., Replay]) -> None:
    replay = make(capacity=20)
    fill(replay, 40, streams=1)
    old = replay.sample(3, "eval")
    fill(replay, 400, streams=1)
    before = replay.sample(20, "eval")["state"].sum()
    states = np.full((*old["tag"].shape, 2, 2), -1, np.float32)
    assert replay.update({"stepid": old["stepid"], "state": states}) == 0
    assert replay.stats()["skipped_updates"] == old["tag"].size
    assert replay.sample(20, "eval")["state"].min() >= 0
    assert before >= 0


def test_first_and_last_flags_of_a_sequence(make: Callable[..., Replay]) -> None:
    replay = make(length=5)
    for tag in range(5):
        replay.add(step(tag, first=tag in (0, 3), last=tag == 1))
    data = replay.sample(1)
    assert data["is_first"].tolist() == [[True, False, False, True, False]]
    assert data["is_last"].tolist() == [[False, True, True, False, False]]
    # Only the copy is annotated, not what is stored.
    replay.add(step(5))
    assert not check_flags(replay, tag=2)["is_last"]


def check_flags(replay: Replay, tag: int) -> dict[str, bool]:
    """What is stored for a step that is inside, and at the end of, no annotated place."""
    table = replay._table
    where = np.argwhere(table.store.columns["tag"][:1] == tag)[0]
    return {key: bool(table.store.columns[key][tuple(where)]) for key in ("is_first", "is_last")}


def test_stepids_name_chunk_and_big_endian_index(make: Callable[..., Replay]) -> None:
    replay = make(length=10)
    fill(replay, 10, streams=1)
    stepid = replay.sample(1)["stepid"][0]
    assert stepid.shape == (10, 20)
    assert stepid.dtype == np.uint8
    index = stepid[:, 16:].copy().view(">u4")[:, 0]
    assert index.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert len({row.tobytes() for row in stepid[:8, :16]}) == 1
    assert len({row.tobytes() for row in stepid}) == 10


def test_log_keys_are_not_stored(make: Callable[..., Replay]) -> None:
    replay = make(length=1)
    replay.add({**step(0), "log/image": np.zeros(9)})
    assert not [key for key in replay.sample(1) if key.startswith("log/")]


def test_a_batch_is_recognised(make: Callable[..., Replay]) -> None:
    replay = make(length=1)
    data = batch([step(0), step(1)])
    assert replay.add_batch(data, [0, 1], "a", 0) == 2
    assert replay.add_batch(data, [0, 1], "a", 0) == 0
    assert replay.add_batch(data, [0, 1], "b", 0) == 2
    assert replay.add_batch(data, [0, 1], "a", 2) == 2
    assert replay.add_batch(data, [0, 1], "a", 1) == 2, "a late batch is not a repeated one"
    assert replay.add_batch(data, [0, 1], "a", 1) == 0
    assert len(replay) == 8


def test_a_long_batch_of_one_stream(make: Callable[..., Replay]) -> None:
    replay = make(capacity=50)
    replay.add_batch(batch([step(tag) for tag in range(300)]), [0] * 300)
    assert len(replay) == 50
    tags = check_sequences(replay.sample(200, "eval"), 4)
    assert all(tag == tuple(range(tag[0], tag[0] + 4)) and tag[0] >= 247 for tag in tags)


def test_wrong_steps_are_refused_and_harm_nothing(make: Callable[..., Replay]) -> None:
    replay = make(length=1)
    replay.add(step(0))
    with pytest.raises(SchemaError, match=r"unexpected extra float64\[\]"):
        replay.add({**step(1), "extra": 1.0})
    with pytest.raises(SchemaError, match=r"missing vector float32\[3\]"):
        replay.add({k: v for k, v in step(1).items() if k != "vector"})
    with pytest.raises(SchemaError, match="one row for each stream"):
        replay.add_batch(batch([step(1), step(2)]), [0])
    with pytest.raises(SchemaError, match="bools, integers and floats"):
        replay.add({**step(1), "vector": np.array(["a", "b", "c"])})
    with pytest.raises(SchemaError, match="stepid"):
        replay.add({**step(1), "stepid": np.zeros(20, np.uint8)})
    with pytest.raises(SchemaError, match="cannot name a stream"):
        replay.add_batch(batch([step(1)]), [1.5])  # type: ignore[list-item]
    with pytest.raises(SchemaError, match="fits no stored key"):
        replay.update({"stepid": np.zeros((2, 20), np.uint8), "nothing": np.zeros(2)})
    with pytest.raises(SchemaError, match="stepid"):
        replay.update({"state": np.zeros((2, 2, 2))})
    assert len(replay) == 1
    assert replay.sample(1)["tag"].item() == 0


def test_sampling_from_an_empty_replay_is_an_error(make: Callable[..., Replay]) -> None:
    replay = make(length=3)
    with pytest.raises(NotEnoughDataError, match="no sequence of 3 steps"):
        replay.sample(1)
    fill(replay, 2, streams=1)
    with pytest.raises(NotEnoughDataError, match="no sequence of 3 steps"):
        replay.sample(1)


def test_using_a_closed_replay_is_an_error(make: Callable[..., Replay]) -> None:
    replay = make(length=1)
    replay.add(step(0))
    replay.close()
    replay.close()
    for use in (lambda: replay.sample(1), lambda: replay.add(step(1)), replay.sync):
        with pytest.raises(ReplayClosedError):
            use()


def test_batches_are_never_overwritten_while_they_are_in_use(directory: Path | None) -> None:
    """What a caller still holds, even as a view, stays."""
    replay = Replay(16, 1000, directory, chunk=64)
    for tag in range(64):
        replay.add({"tag": np.full(4096, tag, np.int64)})
    held = [replay.sample(4)["tag"][1:, 3] for _ in range(12)]
    copies = [array.copy() for array in held]
    for _ in range(20):
        replay.sample(4)
    for array, copy in zip(held, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    replay.close()


def test_small_floats_are_stored_exactly(directory: Path | None) -> None:
    replay = Replay(2, 10, directory)
    values = np.arange(8, dtype=ml_dtypes.bfloat16).reshape(2, 4)
    for row in values:
        replay.add({"state": row})
    data = replay.sample(1)["state"]
    assert data.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(data[0].astype(np.float32), values.astype(np.float32))
    replay.close()
    if directory:
        with Replay(2, 10, directory) as again:
            assert again.sample(1)["state"].dtype == ml_dtypes.bfloat16


def test_stats(make: Callable[..., Replay], directory: Path | None) -> None:
    replay = make(capacity=20)
    fill(replay, 60, streams=2)
    replay.sample(5)
    replay.sample(3, "report")
    data = replay.sample(2, "report")
    replay.update({"stepid": data["stepid"], "state": data["state"]})
    stats = replay.stats()
    assert stats["items"] == 20
    assert stats["inserts"] == 60
    assert stats["samples"] == 10
    assert stats["updates"] == 8
    assert stats["skipped_updates"] == 0
    assert 1 <= stats["sample_age_mean"] <= stats["sample_age_max"] <= 20
    assert 20 <= stats["steps"] <= 60
    on_disk = sum(file.stat().st_size for file in (directory or Path("/x")).glob("*.chunk"))
    assert stats["disk_bytes"] == on_disk
    assert stats["ram_bytes"] > 0
