"""Traces of the reference: limiter and replay, which must match exactly."""

import numpy as np
import pytest
from golden_files import load, numbered, part

from dreamfleet.replay import RateLimitedError, Replay, SamplesPerInsert


@pytest.mark.parametrize("trace", numbered(load("15_limiter"), "trace"))
def test_limiter_trace(trace: int) -> None:
    data = part(load("15_limiter"), f"trace{trace}/")
    limiter = SamplesPerInsert(
        float(data["samples_per_insert"]), float(data["tolerance"]), int(data["minsize"])
    )
    attempts = (limiter.insert, limiter.sample)
    for op, allowed, size, avail in zip(
        data["op"], data["allowed"], data["size_after"], data["avail_after"], strict=True
    ):
        try:
            attempts[op](timeout=0)
            assert allowed
        except RateLimitedError:
            assert not allowed
        assert limiter.size == size
        assert limiter.avail == avail


@pytest.mark.parametrize("chunk", [1, 4, 5, 1024])
def test_replay_trace(chunk: int) -> None:
    data = load("16_replay_sampling")
    length = int(data["cfg/length"])
    replay = Replay(length, 1000, chunk=chunk)
    for step in range(data["in/is_first"].shape[1]):
        for worker in range(int(data["cfg/workers"])):
            replay.add(
                {
                    "tag": np.int32(1000 * worker + step),
                    "is_first": data["in/is_first"][worker, step],
                    "is_last": data["in/is_last"][worker, step],
                },
                worker,
            )
            assert len(replay) == data["out/num_items_after_add"][worker, step]
            queue = replay.stats()["online_queue"]
            assert queue == data["out/online_queue_len_after_add"][worker, step]
    expected = data["out/online_sequence_tags"]
    np.testing.assert_array_equal(replay.sample(len(expected))["tag"], expected)

    sampled = replay.sample(400, "report")
    found = {
        tuple(tags): (first.tolist(), last.tolist())
        for tags, first, last in zip(
            sampled["tag"].tolist(), sampled["is_first"], sampled["is_last"], strict=True
        )
    }
    for tags, first, last in zip(
        data["out/sampled_tags"].tolist(),
        data["out/sampled_is_first"].tolist(),
        data["out/sampled_is_last"].tolist(),
        strict=True,
    ):
        assert found[tuple(tags)] == (first, last)
