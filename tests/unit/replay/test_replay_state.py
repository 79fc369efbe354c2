"""Checkpoints: what `save` returned, loaded into a directory that has moved on since."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from replay_model import ModelReplay, check_sequences, step

from dreamfleet.replay import Replay


def add(replay: Replay, model: ModelReplay, tags: range) -> None:
    for tag in tags:
        replay.add(step(tag, tag % 3), f"env{tag % 3}")
        model.add(tag, tag % 3)


def test_fresh_sequences_since_the_checkpoint_are_queued(tmp_path: Path) -> None:
    """The agent starts again from the checkpoint, so what it trained on since is fresh again."""
    model = ModelReplay(4, 60)
    with Replay(4, 60, tmp_path, chunk=8) as replay:
        add(replay, model, range(70))
        taken = check_sequences(replay.sample(5), 4)
        model.online = model.online[5:]
        state = replay.save()
        replay.sample(3)
        add(replay, model, range(70, 100))
    with Replay(4, 60, tmp_path, chunk=8) as replay:
        replay.load(state)
        assert replay.stats()["online_queue"] == len(model.online) > 10
        assert check_sequences(replay.sample(len(model.online)), 4) == model.online
        assert not set(taken) & set(model.online)
        # And the phase of each stream goes on as if nothing had happened.
        model.online = []
        add(replay, model, range(100, 160))
        assert check_sequences(replay.sample(len(model.online)), 4) == model.online


def test_without_a_checkpoint_only_new_steps_are_fresh(tmp_path: Path) -> None:
    with Replay(4, 60, tmp_path, chunk=8) as replay:
        add(replay, ModelReplay(4, 60), range(70))
    with Replay(4, 60, tmp_path, chunk=8) as replay:
        assert replay.stats()["online_queue"] == 0
        add(replay, ModelReplay(4, 60), range(70, 70 + 12))
        fresh = check_sequences(replay.sample(3), 4)
        assert sorted(tags[0] for tags in fresh) == [70, 71, 72]


def test_draws_and_counters_go_on(tmp_path: Path) -> None:
    with Replay(4, 60, tmp_path, online=False) as replay:
        add(replay, ModelReplay(4, 60), range(100))
        replay.sample(7)
        state = replay.save()
        expected = replay.sample(50)["tag"]
    assert all(isinstance(value, np.ndarray) for value in state.values())
    with Replay(4, 60, tmp_path, online=False, seed=9) as replay:
        replay.load(state)
        np.testing.assert_array_equal(replay.sample(50)["tag"], expected)
        stats = replay.stats()
        assert (stats["inserts"], stats["samples"]) == (100, 57)


def test_loading_into_an_empty_replay(tmp_path: Path) -> None:
    with Replay(4, 60) as replay:
        add(replay, ModelReplay(4, 60), range(50))
        state = replay.save()
    with Replay(4, 60) as replay:
        replay.load(state)
        add(replay, ModelReplay(4, 60), range(50))
        assert len(replay) == 41
