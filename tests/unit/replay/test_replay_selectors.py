"""The draws: distributions, removal, priorities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_model import step

from dreamfleet.errors import ConfigError
from dreamfleet.replay import (
    Draw,
    Fifo,
    Mixture,
    Prioritized,
    Recency,
    Replay,
    SchemaError,
    Selector,
    Uniform,
)
from dreamfleet.replay.sumtree import SumTree

DRAWS = 200_000


def frequencies(selector: Selector, low: int, high: int, count: int = DRAWS) -> np.ndarray:
    """How often each living item is drawn, as a fraction."""
    rng = np.random.default_rng(0)
    numbers = selector.draw(Draw(rng, count, low, high, consume=True))
    assert numbers.min() >= low
    assert numbers.max() < high
    return np.bincount(numbers - low, minlength=high - low) / count


def assert_matches(found: np.ndarray, expected: np.ndarray, count: int = DRAWS) -> None:
    """Chi-squared, with a bound that a right distribution passes in all but one of 10^6 runs."""
    expected = expected / expected.sum()
    chi = count * ((found - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert chi < degrees + 5 * np.sqrt(2 * degrees) + 20


def test_uniform() -> None:
    assert_matches(frequencies(Uniform(), 1000, 1050), np.ones(50))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_recency(exponent: float) -> None:
    found = frequencies(Recency(exponent), 70, 110)
    assert_matches(found, np.arange(40, 0, -1.0) ** -exponent)


def test_recency_follows_growth() -> None:
    selector = Recency(1.0)
    frequencies(selector, 0, 10)
    assert_matches(frequencies(selector, 0, 3000), np.arange(3000, 0, -1.0) ** -1.0)


def test_prioritized_by_item() -> None:
    selector = Prioritized(exponent=0.5)
    selector.bind(64)
    priorities = np.arange(20.0)
    selector.prioritize(np.arange(100, 120), priorities[:, None], 100, 120)
    found = frequencies(selector, 100, 120)
    assert found[0] == 0, "an item of no priority is never drawn"
    assert_matches(found[1:], priorities[1:] ** 0.5)


def test_prioritized_mixes_maximum_and_mean() -> None:
    selector = Prioritized(exponent=1.0, max_fraction=0.25)
    selector.bind(4)
    steps = np.array([[1.0, 1, 1, 1], [0, 0, 0, 8]])
    selector.prioritize(np.array([0, 1]), steps, 0, 2)
    assert_matches(frequencies(selector, 0, 2), np.array([1.0, 0.25 * 8 + 0.75 * 2]))


def test_new_items_have_the_initial_priority_and_removed_ones_none() -> None:
    selector = Prioritized(exponent=1.0, initial=3.0)
    selector.bind(8)
    selector.prioritize(np.array([0, 1]), np.array([[1.0], [2.0]]), 0, 2)
    assert_matches(frequencies(selector, 0, 3), np.array([1.0, 2.0, 3.0]))
    assert_matches(frequencies(selector, 1, 4), np.array([2.0, 3.0, 3.0]))
    # Numbers go on while the ring of leaves wraps around.
    assert_matches(frequencies(selector, 6, 14), np.ones(8))


def test_zero_on_sample_and_nothing_left() -> None:
    selector = Prioritized(zero_on_sample=True)
    selector.bind(8)
    rng = np.random.default_rng(0)
    drawn = [int(selector.draw(Draw(rng, 1, 0, 8, consume=True))[0]) for _ in range(8)]
    assert sorted(drawn) == list(range(8))
    assert_matches(frequencies(selector, 0, 8), np.ones(8))
    selector.prioritize(np.array([3]), np.ones((1, 1)), 0, 8)
    numbers = selector.draw(Draw(rng, 50, 0, 8, consume=False))
    assert set(numbers.tolist()) == {3}


def test_mixture() -> None:
    selector = Mixture((Uniform(), 0.25), (Recency(2.0), 0.75))
    selector.bind(32)
    recent = np.arange(20, 0, -1.0) ** -2
    assert_matches(frequencies(selector, 5, 25), 0.25 / 20 + 0.75 * recent / recent.sum())


def test_fifo_goes_round() -> None:
    selector = Fifo()
    rng = np.random.default_rng(0)
    assert selector.draw(Draw(rng, 3, 10, 14, consume=True)).tolist() == [10, 11, 12]
    assert selector.draw(Draw(rng, 2, 10, 14, consume=False)).tolist() == [13, 10]
    assert selector.draw(Draw(rng, 2, 10, 14, consume=True)).tolist() == [13, 10]
    assert selector.draw(Draw(rng, 2, 12, 16, consume=True)).tolist() == [12, 13]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Recency(-1),
        lambda: Prioritized(exponent=-1),
        lambda: Prioritized(initial=np.inf),
        lambda: Prioritized(max_fraction=2),
        lambda: Mixture(),
        lambda: Mixture((Uniform(), 0.5)),
        lambda: Mixture((Uniform(), 1.5), (Fifo(), -0.5)),
    ],
)
def test_settings_that_make_no_sense(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


@given(
    st.integers(1, 300).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.tuples(st.integers(0, size - 1), st.floats(0, 1e6)), max_size=40),
        )
    ),
    st.floats(0, 1, exclude_max=True),
)
def test_sum_tree_against_a_list(changes: tuple[int, list[tuple[int, float]]], at: float) -> None:
    size, pairs = changes
    tree, weights = SumTree(size), np.zeros(size)
    for leaf, weight in pairs:
        tree.set(np.array([leaf]), np.array([weight]))
        weights[leaf] = weight
    assert tree.total == pytest.approx(weights.sum())
    if tree.total > 0:
        leaf = int(tree.draw(np.array([at]))[0])
        assert weights[leaf] > 0
        slack = 1e-9 * weights.sum()
        assert weights[:leaf].sum() <= at * weights.sum() + slack
        assert at * weights.sum() <= weights[: leaf + 1].sum() + slack


def test_sum_tree_of_millions() -> None:
    tree = SumTree(3_000_000)
    leaves = np.array([0, 127, 128, 16_384, 2_097_152, 2_999_999])
    tree.set(leaves, np.arange(1.0, 7.0))
    drawn = tree.draw(np.random.default_rng(0).random(DRAWS))
    found = np.array([(drawn == leaf).mean() for leaf in leaves])
    assert_matches(found, np.arange(1.0, 7.0))


def test_sum_tree_takes_leaves_in_any_order() -> None:
    """Leaves of one block that are not beside each other count all the same."""
    rng = np.random.default_rng(0)
    tree, weights = SumTree(100_000), np.zeros(100_000)
    for _ in range(20):
        leaves = rng.permutation(100_000)[:3000]
        weights[leaves] = rng.random(3000)
        tree.set(leaves, weights[leaves])
        assert tree.total == pytest.approx(weights.sum(), rel=1e-12)
    tree.set(rng.permutation(100_000), 0.0)
    assert tree.total == 0


def filled(selector: Selector, length: int = 3) -> Replay:
    replay = Replay(length, 50, chunk=4, selector=selector, online=False)
    for tag in range(40):
        replay.add(step(tag))
    return replay


def drawn_starts(replay: Replay, count: int = 20_000) -> np.ndarray:
    starts = replay.sample(count, "eval")["tag"][:, 0]
    return np.bincount(starts, minlength=38) / count


def steps_by_tag(replay: Replay) -> dict[int, np.ndarray]:
    data = replay.sample(2000, "eval")
    return {
        int(tag): stepid
        for tag, stepid in zip(data["tag"].flat, data["stepid"].reshape(-1, 20), strict=True)
    }


def test_updated_priorities_change_the_draw() -> None:
    """The priority of each step is its tag; an item's is the mean of its three."""
    replay = filled(Prioritized(exponent=1.0, initial=0.5))
    ids = steps_by_tag(replay)
    assert len(ids) == 40
    for tag, stepid in ids.items():
        priority = np.array([tag], np.float32)
        assert replay.update({"stepid": stepid[None], "priority": priority}) == 1
    assert_matches(drawn_starts(replay), np.arange(38) + 1.0, 20_000)


def test_one_priority_reaches_every_item_with_the_step_and_no_other() -> None:
    """Also across the border of a chunk: step 12 begins one, item 10 begins in the one before."""
    replay = filled(Prioritized(exponent=1.0, initial=0.0, max_fraction=1.0))
    stepid = steps_by_tag(replay)[12]
    replay.update({"stepid": stepid[None], "priority": np.ones(1)})
    found = drawn_starts(replay)
    assert np.flatnonzero(found).tolist() == [10, 11, 12]
    # A sequence of priorities at once, as a training step would send them.
    data = replay.sample(1, "eval")
    replay.update({"stepid": data["stepid"], "priority": np.zeros((1, 3), np.float32)})
    start = int(data["tag"][0, 0])
    expected = [] if start <= 12 <= start + 2 else [10, 11, 12]
    left = drawn_starts(replay)
    assert (np.flatnonzero(left).tolist() == expected) or (not expected and (left > 0).all())


def test_steps_updated_together_do_not_reach_items_of_each_other() -> None:
    replay = filled(Prioritized(exponent=1.0, initial=0.0, max_fraction=1.0))
    stepids = steps_by_tag(replay)
    replay.update({"stepid": stepids[13][None], "priority": np.ones(1)})
    both = np.stack([stepids[5], stepids[15]])
    replay.update({"stepid": both, "priority": np.ones(2)})
    assert np.flatnonzero(drawn_starts(replay)).tolist() == [3, 4, 5, 11, 12, 13, 14, 15]


def test_priorities_of_a_reused_slot_do_not_leak() -> None:
    replay = Replay(2, 6, chunk=2, selector=Prioritized(exponent=1.0), online=False)
    for tag in range(200):
        replay.add(step(tag))
        if len(replay) > 1:
            data = replay.sample(4, "eval")
            replay.update({"stepid": data["stepid"], "priority": np.full((4, 2), 1000.0)})
    for tag in range(200, 230):
        replay.add(step(tag))
    # An update makes the items around it look at their steps again, and they know nothing.
    for _ in range(20):
        stepid = replay.sample(1, "eval")["stepid"][0, :1]
        replay.update({"stepid": stepid, "priority": np.ones(1)})
    starts = replay.sample(DRAWS // 10, "eval")["tag"][:, 0]
    assert_matches(np.bincount(starts - 223, minlength=6) / len(starts), np.ones(6), len(starts))


def test_priorities_that_make_no_sense() -> None:
    replay = filled(Prioritized())
    stepid = replay.sample(1)["stepid"]
    for priority in (np.full((1, 3), np.nan), np.full((1, 3), -1.0), np.ones((1, 2))):
        with pytest.raises(SchemaError, match="priority"):
            replay.update({"stepid": stepid, "priority": priority})


def test_uniform_draws_from_the_replay_are_uniform() -> None:
    replay = filled(Uniform())
    assert_matches(drawn_starts(replay), np.ones(38), 20_000)


def test_new_items_know_the_priorities_of_steps_they_share() -> None:
    selector = Prioritized(exponent=1.0, initial=1.0)
    replay = Replay(4, 100, chunk=8, online=False, selector=selector)
    for tag in range(20):
        replay.add(step(tag))
    replay.update(replay.sample(500, "eval") | {"priority": np.zeros((500, 4))})
    replay.add(step(20))
    # Of all items only the newest has a step that was never updated, and so any weight.
    assert (replay.sample(50)["tag"] == np.arange(17, 21)).all()
    assert selector._tree.total == pytest.approx(1 / 4)


def test_zero_on_sample_gives_each_item_once_in_a_batch() -> None:
    selector = Prioritized(exponent=1.0, zero_on_sample=True)
    selector.bind(100)
    steps = np.full((50, 1), 1.0)
    steps[7] = 1e6
    selector.prioritize(np.arange(50), steps, 0, 50)
    numbers = selector.draw(Draw(np.random.default_rng(0), 50, 0, 50, consume=True))
    assert sorted(numbers.tolist()) == list(range(50))
    assert numbers[0] == 7
    assert selector._tree.total == 0


def test_zero_on_sample_counts_online_sequences() -> None:
    replay = Replay(2, 100, selector=Prioritized(zero_on_sample=True))
    for tag in range(3):
        replay.add(step(tag))
    assert replay.sample(1)["tag"].tolist() == [[1, 2]], "the one online sequence"
    assert replay.sample(1)["tag"].tolist() == [[0, 1]], "the one that is left"


def test_rounding_never_leads_beyond_the_last_weight() -> None:
    """The sum of a block and the last of its running sums differ in the last bits."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        tree, weights = SumTree(512), rng.random(512)
        weights[[0, 256]] = weights[200:256] = weights[400:] = 0
        tree.set(np.arange(512), weights)
        assert tree.draw(np.array([np.nextafter(1.0, 0.0)])).tolist() == [399]
