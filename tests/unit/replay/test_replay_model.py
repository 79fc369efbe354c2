"""The replay against a slow, obvious model, through random histories."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_model import InOrder, ModelReplay, all_items, batch, check_sequences, step

from dreamfleet.replay import Replay


class ReplayMachine(RuleBasedStateMachine):
    """Adds, samples, updates and reopens; after each the replay holds what the model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.tag = 0
        self.seq = 0
        self.updated: dict[int, float] = {}

    @initialize(
        length=st.integers(1, 6),
        capacity=st.integers(1, 25),
        chunk=st.integers(1, 7),
        disk=st.booleans(),
    )
    def start(self, length: int, capacity: int, chunk: int, disk: bool) -> None:
        self.options = {"length": length, "chunk": chunk, "selector": None}
        self.directory = Path(self.folder.name) / "replay" if disk else None
        self.model = ModelReplay(length, capacity)
        self.open(capacity)

    def open(self, capacity: int) -> None:
        options = self.options | {"selector": InOrder(), "capacity": capacity}
        self.replay = Replay(directory=self.directory, **options)

    @rule(streams=st.lists(st.integers(0, 3), min_size=1, max_size=12), again=st.booleans())
    def add(self, streams: list[int], again: bool) -> None:
        tags = range(self.tag, self.tag + len(streams))
        data = batch([step(tag, stream) for tag, stream in zip(tags, streams, strict=True)])
        assert self.replay.add_batch(data, streams, "writer", self.seq) == len(streams)
        if again:
            assert self.replay.add_batch(data, streams, "writer", self.seq) == 0
        for tag, stream in zip(tags, streams, strict=True):
            self.model.add(tag, stream)
        self.tag, self.seq = self.tag + len(streams), self.seq + 1

    @precondition(lambda self: self.model.items)
    @rule(size=st.integers(1, 5))
    def train(self, size: int) -> None:
        tags = check_sequences(self.replay.sample(size), self.model.length)
        fresh, self.model.online = self.model.online[:size], self.model.online[size:]
        assert tags[: len(fresh)] == fresh
        assert set(tags) <= set(self.model.items)

    @precondition(lambda self: self.model.items)
    @rule(value=st.floats(0, 100, width=32))
    def update(self, value: float) -> None:
        data = self.replay.sample(2, "eval")
        state = np.full((*data["tag"].shape, 2, 2), value, np.float32)
        count = data["tag"].size
        assert self.replay.update({"stepid": data["stepid"], "state": state}) == count
        self.updated |= dict.fromkeys(data["tag"].reshape(-1).tolist(), value)

    @precondition(lambda self: self.directory)
    @rule(capacity=st.one_of(st.none(), st.integers(1, 25)))
    def reopen(self, capacity: int | None) -> None:
        self.replay.close()
        if capacity is not None and capacity < self.model.capacity:
            self.model.capacity = capacity
            self.model.items = self.model.items[-capacity:]
        self.open(self.model.capacity)
        self.model.restart()

    @invariant()
    def same_items(self) -> None:
        if not hasattr(self, "replay"):
            return
        assert len(self.replay) == len(self.model.items)
        assert self.replay.stats()["online_queue"] == len(self.model.online)
        if self.model.items:
            data = self.replay.sample(len(self.replay), "report")
            order = check_sequences(data, self.model.length)
            assert sorted(order) == sorted(self.model.items)
            for tag, state in zip(data["tag"].flat, data["state"].reshape(-1, 4), strict=True):
                assert (state == self.updated.get(int(tag), tag)).all()

    @invariant()
    def files_are_bounded(self) -> None:
        if not hasattr(self, "replay"):
            return
        stats = self.replay.stats()
        if self.directory and stats["chunks"]:
            assert len(list(self.directory.glob("*.chunk"))) == stats["chunks"]
        # A chunk lives for an item that starts in it, or because a stream may continue it.
        length, chunk = self.options["length"], self.options["chunk"]
        tails = len(self.model.streams) * (length // chunk + 2)
        assert stats["chunks"] <= len(self.model.items) + tails

    def teardown(self) -> None:
        if hasattr(self, "replay"):
            self.replay.close()
        self.folder.cleanup()


TestReplayAgainstModel = ReplayMachine.TestCase
TestReplayAgainstModel.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    phases=[p for p in Phase if p is not Phase.explain],
    suppress_health_check=[HealthCheck.too_slow],
)


def test_items_are_listed_in_order() -> None:
    replay = Replay(3, 10, chunk=4, selector=InOrder())
    model = ModelReplay(3, 10)
    for tag in range(30):
        replay.add(step(tag, tag % 2), tag % 2)
        model.add(tag, tag % 2)
    assert all_items(replay) == model.items
