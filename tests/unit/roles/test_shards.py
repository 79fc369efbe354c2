"""A replay of two shards is one replay: what it stores, what it draws, what its limiter does."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import small_run, stored_streams

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.factories import factories, replay
from dreamfleet.offline import copy_steps, find_source
from dreamfleet.policy import Blueprint
from dreamfleet.replay import Replay, SamplesPerInsert, Shares, make_selector, used_fractions
from dreamfleet.replay.config import Fractions, PriorityConfig, ReplayConfig
from dreamfleet.replay.positions import Positions
from dreamfleet.roles.addresses import find_server
from dreamfleet.roles.replay import parallel_replay, together
from dreamfleet.roles.runtime import StopSignal
from dreamfleet.roles.scaling.coordinator import ReplayCoordinator
from dreamfleet.roles.scaling.shards import (
    ROW_BITS,
    ReplayClient,
    marked,
    shard_of,
    split_batch,
    unmarked,
)
from dreamfleet.transport import Client, RemoteError

ENVS, LENGTH, LONG = 5, 4, 120.0


def steps(envids: Sequence[int], number: int) -> dict[str, Any]:
    """Step `number` of each of these environments."""
    rows = len(envids)
    return {
        "vector": np.stack([np.array(envids), np.full(rows, number)], 1).astype(np.float32),
        "is_first": np.full(rows, number == 0),
        "is_last": np.zeros(rows, bool),
        "is_terminal": np.zeros(rows, bool),
        "state": np.zeros(rows, np.float32),
    }


def history() -> Iterator[tuple[list[int], int]]:
    """Which environments make which of their steps; the first one makes more than the others."""
    for number in range(30):
        yield list(range(ENVS)), number
    for number in range(30, 60):
        yield [0], number


def windows_of(batch: dict[str, Any]) -> list[tuple[int, int]]:
    """The environment and the first step of each sequence of a batch, which is whole."""
    vector = batch["vector"].astype(int)
    assert (vector[..., 0] == vector[:, :1, 0]).all()
    assert (np.diff(vector[..., 1]) == 1).all()
    return [(int(row[0, 0]), int(row[0, 1])) for row in vector]


ALL_WINDOWS = {
    (envid, start)
    for envid in range(ENVS)
    for start in range((60 if envid == 0 else 30) - LENGTH + 1)
}


class Fleet:
    """The shards of a run, each in a thread that can be ended and started again."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.running: dict[int, tuple[StopSignal, threading.Thread]] = {}
        for shard in range(config.replay_shards):
            self.start(shard)

    def start(self, shard: int) -> None:
        made, signal = factories(self.config), StopSignal()
        buffers = made.make_replay_train, made.make_replay_eval

        def role() -> None:
            parallel_replay(*buffers, made.make_stream, self.config, shard)

        thread = threading.Thread(target=signal.run, args=[role], daemon=True)
        thread.start()
        self.running[shard] = signal, thread

    def end(self, shard: int) -> None:
        signal, thread = self.running.pop(shard)
        signal.stop()
        thread.join(LONG)
        assert not thread.is_alive()


@contextmanager
def running(config: RunConfig) -> Iterator[Fleet]:
    fleet = Fleet(config)
    try:
        yield fleet
    finally:
        for shard in list(fleet.running):
            fleet.end(shard)


def sharded(logdir: Path, shards: int = 2, **changes: Any) -> RunConfig:
    settings = {
        "envs": ENVS,
        "eval_envs": 2,
        "batch_size": 6,
        "train_ratio": 0.0,
        "log_every": 3600.0,
    }
    return small_run(logdir, replay_shards=shards, **{**settings, **changes})


def fill(client: Any) -> None:
    for seq, (envids, number) in enumerate(history()):
        message = (steps(envids, number), np.array(envids), False, "actor", seq)
        assert client.add_batch(*message).result(LONG) == len(envids)


def stored_rows(*directories: Path) -> Counter[tuple[float, ...]]:
    return Counter(
        tuple(row)
        for directory in directories
        for stream in stored_streams(directory).values()
        for row in stream["vector"].tolist()
    )


def test_two_shards_store_and_draw_what_one_replay_does(tmp_path: Path) -> None:
    """The same steps; each fresh sequence once and first; then any of them; states go back to the
    shard that they came from; counts are those of all."""
    rows = {}
    for shards in (1, 2):
        config = sharded(tmp_path / str(shards), shards)
        with running(config), ReplayClient(config, "learner", 2) as client:
            fill(client)
            # A message that is sent again stores nothing.
            again = (steps([0], 59), np.array([0]), False, "actor", 59)
            assert client.add_batch(*again).result(LONG) == 0
            is_eval = (steps([ENVS, ENVS + 1], 0), np.array([ENVS, ENVS + 1]), True, "actor", 60)
            assert client.sample("eval") == {}
            assert client.add_batch(*is_eval).result(LONG) == 2
            drawn: list[tuple[int, int]] = []
            for _ in range(12):
                batch = client.sample("train")
                drawn += windows_of(batch)
                assert batch["stepid"].shape == (6, LENGTH, 20)
                states = (batch["vector"][..., 0] * 100 + batch["vector"][..., 1]).astype(
                    np.float32
                )
                states = {"stepid": batch["stepid"], "state": states}
                assert client.update(states).result(LONG) == 6 * LENGTH
            fresh = {(e, s) for e, s in ALL_WINDOWS if s % LENGTH == 1}
            assert set(drawn[: len(fresh)]) == fresh
            report = client.sample("report")
            assert set(windows_of(report)) <= ALL_WINDOWS
            # Every step of a fresh window has its state by now.
            vector, state = report["vector"], report["state"]
            written = {(e, s + n) for e, s in drawn for n in range(LENGTH)}
            for row, value in zip(vector.reshape(-1, 2).tolist(), state.reshape(-1), strict=True):
                assert value == (100 * row[0] + row[1] if tuple(map(int, row)) in written else 0)
            assert client.position().result(LONG) == {"steps": 180, "samples": 72}
        folders = ["replay", "replay-1"][:shards]
        rows[shards] = stored_rows(*(config.logdir / name for name in folders))
        assert sorted(path.name for path in config.logdir.glob("replay*")) == folders
        for shard, name in enumerate(folders):
            assert {e % shards for e in stored_streams(config.logdir / name)} == {shard}
    assert rows[1] == rows[2]
    assert set(rows[2].values()) == {1}


class Interrupting(ReplayClient):
    """A learner's client that does something between a permission and its batch."""

    interrupt: Any = None

    def _splits(self, count: int, mode: Any) -> Any:
        splits = super()._splits(count, mode)
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            interrupt()
        return splits


@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_ends_between_permission_and_batch_costs_neither_batch_nor_count(
    tmp_path: Path, shard: int, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if its files are gone when it comes back: the others make up for it, and the run's
    steps stay counted."""
    config = sharded(tmp_path)
    with running(config) as fleet, Interrupting(config, "samples", 2) as client:
        fill(client)
        assert len(windows_of(client.sample("train"))) == 6

        def interrupt() -> None:
            fleet.end(shard)
            if lost:
                shutil.rmtree(tmp_path / ("replay-1" if shard else "replay"))
                if shard:  # with its counts: the coordinator knows what it had
                    shutil.rmtree(tmp_path / "ckpt" / "replay-1")
            fleet.start(shard)

        client.interrupt = interrupt
        batch = windows_of(client.sample("train"))
        assert len(batch) == 6
        assert client.position().result(LONG) == {"steps": 180, "samples": 12}
        more = (steps([0, 1], 90), np.array([0, 1]), False, "actor", 100)
        assert client.add_batch(*more).result(LONG) == 2
        assert client.position().result(LONG) == {"steps": 182, "samples": 12}
    assert ("steps less than" in caplog.text or "was lost" in caplog.text) == lost


BAD_CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("shares", ("all",)),
    ("shares", ([],)),
    ("shares", (np.zeros(2),)),
    ("sample_train", (0, [0], 5)),
    ("sample_train", (3, [4], 5)),
    ("sample_train", (-1, [3], 5)),
    ("sample_train", (0, [1, 1], 5)),
    ("sample_train", (0, 7, 5)),
    ("sample_train", (0.5, [1], 5)),
    ("sample_eval", (0, [1], "x")),
    ("permit", (1.5,)),
    ("permit", (-1,)),
    ("inserted", (0, "many")),
    ("inserted", (7, 1)),
    ("inserted", (True, 1)),
    ("inserted", (1, 1 << 60)),
    ("opened", (1, 5, None)),
]


def test_nonsense_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    config = sharded(tmp_path)
    with (
        running(config),
        Client(find_server(config, "replay"), "stranger") as coordinator,
        ReplayClient(config, "samples", 2) as client,
    ):
        fill(client)
        for method, args in BAD_CALLS:
            with pytest.raises(RemoteError) as refused:
                coordinator.call(method, *args).result(LONG)
            assert refused.value.kind in ("ConfigError", "ArgumentError"), (
                method,
                args,
                refused.value,
            )
        assert client.position().result(LONG) == {"steps": 180, "samples": 0}
        assert len(windows_of(client.sample("train"))) == 6


def test_a_replay_with_too_few_steps_left_is_filled_again(tmp_path: Path) -> None:
    run: Any = sharded(tmp_path, batch_size=2)
    limiter = SamplesPerInsert(0.5, 8.0, 10, 8.0)
    coordinator = ReplayCoordinator(limiter, Positions(None, 0, 2), run, threading.Event())
    coordinator.begin([0, 0], [0, 0])
    coordinator.inserted(1, 12)
    assert limiter.can_sample()
    assert coordinator.opened(1, 12, 12) == 12
    assert limiter.can_sample()
    assert coordinator.opened(1, 0, 0) == 12
    assert not limiter.can_sample()
    coordinator.inserted(1, 22)
    assert limiter.can_sample()
    with pytest.raises(ConfigError, match="no shard 2 in a replay of 2"):
        coordinator.opened(2, 0, 0)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_limiters_walk_does_not_depend_on_the_number_of_shards(
    tmp_path: Path, shards: int
) -> None:
    rng = np.random.default_rng(0)
    plain = SamplesPerInsert(0.5, 8.0, 10, 8.0)
    limiter = SamplesPerInsert(0.5, 8.0, 10, 8.0)
    positions = Positions(None, 0, shards)
    coordinator = ReplayCoordinator(
        limiter, positions, sharded(tmp_path, shards, batch_size=2), threading.Event()
    )
    coordinator.begin([0] * shards, [0] * shards)
    made, known, walk = [0] * shards, 0, []
    for _ in range(500):
        if plain.can_insert() and (not plain.can_sample() or rng.random() < 0.6):
            shard, count = int(rng.integers(shards)), int(rng.integers(1, 6))
            plain.insert(count)
            made[shard] += count
            if shard == 0:
                positions.stored(made[0])
            coordinator.inserted(shard, made[shard])
        else:
            plain.sample(2)
            known = coordinator.permit(known)
        assert (limiter.size, limiter.avail) == (plain.size, plain.avail)
        walk.append(limiter.avail)
    assert (positions.steps, positions.samples) == (sum(made), known)
    assert known > 100
    assert len(set(walk)) > 20


class Shards:
    """The same steps in one replay and in two, in memory."""

    def __init__(self, config: ReplayConfig) -> None:
        def make(seed: int) -> Replay:
            selector = make_selector(config)
            return Replay(LENGTH, 10**6, chunk=8, online=False, selector=selector, seed=seed)

        self.fractions = used_fractions(config)
        self.one, self.several = make(0), [make(1), make(2)]
        for envids, number in history():
            self.one.add_batch(steps(envids, number), envids)
            for shard, part in enumerate(self.several):
                if mine := [envid for envid in envids if envid % 2 == shard]:
                    part.add_batch(steps(mine, number), mine)

    def prioritise(self) -> None:
        """Give each step the priority that its number says, in all of them."""
        for buffer in (self.one, *self.several):
            batch = buffer.sample(4000, "report")
            wanted = (1 + batch["vector"][..., 1] % 7).astype(np.float32)
            buffer.update({"stepid": batch["stepid"], "priority": wanted})

    def draw(self, count: int, mode: Any) -> tuple[Counter[Any], Counter[Any]]:
        rng = np.random.default_rng(3)
        one = Counter(windows_of(self.one.sample(count, mode)))
        several: Counter[Any] = Counter()
        for _ in range(count // 50):
            shares = [Shares(*part.shares(mode)) for part in self.several]
            for shard, split in split_batch(rng, 50, shares, self.fractions).items():
                part = self.several[shard].sample(split.batch, mode, split=split)
                several += Counter(windows_of(part))
        return one, several


def distance(found: Counter[Any], chances: dict[Any, float]) -> float:
    """How many standard deviations chi-square is above its mean."""
    count = sum(found.values())
    chi = sum((found[key] - count * p) ** 2 / (count * p) for key, p in chances.items())
    freedom = len(chances) - 1
    return float((chi - freedom) / np.sqrt(2 * freedom))


def test_every_sequence_of_all_shards_is_equally_likely() -> None:
    """Although one shard holds more than twice as many as the other."""
    one, several = Shards(ReplayConfig()).draw(20_000, "report")
    chances = dict.fromkeys(ALL_WINDOWS, 1 / len(ALL_WINDOWS))
    assert set(several) == set(one) == ALL_WINDOWS
    assert distance(one, chances) < 4
    assert distance(several, chances) < 4
    # The test would notice if each shard had the same share.
    unfair = {(e, s): (1 + e % 2) / len(ALL_WINDOWS) for e, s in ALL_WINDOWS}
    total = sum(unfair.values())
    assert distance(several, {key: p / total for key, p in unfair.items()}) > 20


def test_priorities_weigh_the_same_in_all_shards() -> None:
    config = ReplayConfig(
        fractions=Fractions(uniform=0.25, priority=0.75),
        priority=PriorityConfig(exponent=1.0, max_fraction=0.0, zero_on_sample=False),
    )
    shards = Shards(config)
    shards.prioritise()
    _, several = shards.draw(20_000, "report")
    weights = {(e, s): sum(1 + (s + n) % 7 for n in range(LENGTH)) for e, s in ALL_WINDOWS}
    total = sum(weights.values())
    chances = {
        key: 0.25 / len(ALL_WINDOWS) + 0.75 * weight / total for key, weight in weights.items()
    }
    assert distance(several, chances) < 4
    assert distance(several, dict.fromkeys(ALL_WINDOWS, 1 / len(ALL_WINDOWS))) > 4


def test_recent_sequences_are_as_likely_as_in_one_replay() -> None:
    """A shard takes its sequences to be spread evenly over all; so halves of them have the shares
    that one replay of evenly spread ones gives them."""
    shards = Shards(ReplayConfig(fractions=Fractions(uniform=0.0, recency=1.0)))
    _, several = shards.draw(20_000, "report")
    every = len(ALL_WINDOWS)
    sums = np.cumsum(1 / np.arange(1, every + 1))
    newest_half = 0
    for shard, part in enumerate(shards.several):
        items = len(part)
        numbered = windows_of(part.sample(4000, "report"))
        assert all(envid % 2 == shard for envid, _ in numbered)
        assert items == sum(envid % 2 == shard for envid, _ in ALL_WINDOWS)
    # Of the second shard, which was filled evenly, the newest half of each stream.
    newest_half = sum(n for (e, s), n in several.items() if e % 2 and s >= 14)
    second = sum(n for (e, _), n in several.items() if e % 2)
    assert newest_half / second == pytest.approx(sums[every // 2 - 1] / sums[-1], abs=0.03)


def test_fresh_sequences_come_first_from_whichever_shard_has_them() -> None:
    rng = np.random.default_rng(0)
    shares = [Shares(50, 3, [50.0]), Shares(10, 0, [10.0]), Shares(40, 4, [40.0])]
    splits = split_batch(rng, 6, shares, [1.0])
    assert (
        sum(split.fresh for split in splits.values()) == sum(s.batch for s in splits.values()) == 6
    )
    splits = split_batch(rng, 20, shares, [1.0])
    assert [splits[0].fresh, splits[2].fresh] == [3, 4]
    assert sum(split.batch for split in splits.values()) == 20
    assert {split.everywhere for split in splits.values()} == {100}
    assert split_batch(rng, 6, [Shares(0, 0, [0.0])] * 2, [1.0]) == {}
    # A shard without sequences gives none, also when no priority is above zero.
    nothing = [Shares(0, 0, [0.0]), Shares(5, 0, [0.0])]
    assert list(split_batch(rng, 9, nothing, [1.0])) == [1]


def test_a_step_says_which_shard_it_came_from() -> None:
    """As many shards as there may be, each with the longest chunks."""
    rows = np.array([0, 7, ReplayConfig(chunk=1 << ROW_BITS).chunk - 1])
    stepid = np.full((2, 3, 20), 9, np.uint8)
    stepid[..., 16:] = rows.astype(">u4").view(np.uint8).reshape(3, 4)
    stepid.flags.writeable = False  # as it is received
    for shard in (0, 1, 1023):
        found = marked(stepid, shard)
        assert shard_of(found[:, 1:]).tolist() == [[shard] * 2] * 2
        assert unmarked(found).tobytes() == stepid.tobytes()
        other = np.asfortranarray(found)  # as an agent may send it back
        assert shard_of(other).tolist() == shard_of(found).tolist()
        assert unmarked(other).tobytes() == stepid.tobytes()
    with pytest.raises(ConfigError, match="chunk"):
        ReplayConfig(chunk=(1 << ROW_BITS) + 1)
    with pytest.raises(ConfigError, match="replay_shards"):
        RunConfig(replay_shards=1025)


def test_capacity_is_that_of_all_shards_together(tmp_path: Path) -> None:
    config = small_run(
        tmp_path, envs=5, eval_envs=1, replay_shards=2, replay=ReplayConfig(capacity=100, chunk=8)
    )
    with replay(config, "replay") as first, replay(config, "replay", 1) as second:
        assert (first.capacity, second.capacity) == (60, 40)
        assert second.directory == tmp_path / "replay-1"
    with replay(config, "eval_replay", 1) as evaluation:
        assert evaluation.capacity == 10  # the one environment for evaluation has number 5


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (2, 3)])
def test_steps_of_other_runs_are_spread_over_the_shards(
    tmp_path: Path, theirs: int, ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = sharded(tmp_path / "other", theirs)
    for shard in range(theirs):
        with replay(other, "replay", shard) as buffer:
            for envids, number in history():
                if mine := [envid for envid in envids if envid % theirs == shard]:
                    buffer.add_batch(steps(mine, number), mine)
    blueprint = Blueprint(other, {}, {}, {})
    monkeypatch.setattr("dreamfleet.offline.read_blueprint", lambda _: blueprint)
    folders = ["replay", "replay-1"][:theirs]
    assert [path.name for path in find_source(tmp_path / "other").directories] == folders
    one = find_source(tmp_path / "other" / "replay").directories
    assert [path.name for path in one] == ["replay"]
    config = sharded(tmp_path / "mine", ours, prefill=(str(tmp_path / "other"),))
    for shard in range(ours):
        with replay(config, "replay", shard) as buffer:
            copy_steps(buffer, config, shard)
            copied = len(buffer)
            copy_steps(buffer, config, shard)
            assert len(buffer) == copied > 0
    names = ["replay", "replay-1", "replay-2"][:ours]
    expected = stored_rows(*(other.logdir / name for name in folders))
    assert stored_rows(*(config.logdir / name for name in names)) == expected


def test_statistics_are_those_of_all_shards() -> None:
    first = {"items": 30.0, "inserts": 40.0, "samples": 10.0}
    second = {"items": 10.0, "inserts": 20.0, "samples": 30.0}
    ages = (
        {"sample_age_mean": 3.0, "sample_age_max": 6.0},
        {"sample_age_mean": 4.0, "sample_age_max": 5.0},
    )
    shards = [{**first, **ages[0]}, {**second, **ages[1]}]
    for alone in shards:
        assert together([alone]) == pytest.approx(alone)
    found = together(shards)
    assert found["items"] == 40
    assert found["sample_age_max"] == 20  # of the second shard, in sequences of both
    assert found["sample_age_mean"] == pytest.approx((10 * 4 + 30 * 16) / 40)


def test_more_shards_than_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most as many shards as environments"):
        RunConfig(envs=2, replay_shards=3)


def test_machines_that_join_may_fill_more_shards_than_the_run_has_environments(
    tmp_path: Path,
) -> None:
    joined = {
        "bind": "127.0.0.1",
        "replay_shards": 2,
        "replay": ReplayConfig(capacity=100, chunk=8),
    }
    for number, more in enumerate(({"envs": 1}, {"envs": 3, "remote_envs": True})):
        config = small_run(tmp_path / str(number), **joined, **more)
        with replay(config, "replay") as first, replay(config, "replay", 1) as second:
            assert (first.capacity, second.capacity) == (50, 50)
