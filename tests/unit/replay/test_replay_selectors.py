"""Selectors: distributions of draws, priorities of steps, infinite priorities, the sum tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_model import ModelReplay, step

from dreamfleet.errors import ConfigError
from dreamfleet.replay import (
    Draw,
    Fractions,
    Mixture,
    Prioritized,
    PriorityConfig,
    Recency,
    Replay,
    ReplayConfig,
    SchemaError,
    Selector,
    Uniform,
    make_selector,
)
from dreamfleet.replay.selectors import SumTree

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


def test_mixture() -> None:
    selector = Mixture((Uniform(), 0.25), (Recency(2.0), 0.75))
    recent = np.arange(20, 0, -1.0) ** -2
    assert_matches(frequencies(selector, 5, 25), 0.25 / 20 + 0.75 * recent / recent.sum())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Recency(-1),
        lambda: Prioritized(exponent=-1),
        lambda: Prioritized(initial=-1),
        lambda: Prioritized(initial=np.nan),
        lambda: Prioritized(max_fraction=2),
        lambda: Mixture(),
        lambda: Mixture((Uniform(), 0.5)),
        lambda: Mixture((Uniform(), 1.5), (Recency(), -0.5)),
        lambda: Mixture((Prioritized(), 0.5), (Prioritized(), 0.5)),
    ],
)
def test_settings_that_cannot_work_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_settings_describe_the_selector() -> None:
    assert isinstance(make_selector(ReplayConfig()), Uniform)
    only = make_selector(ReplayConfig(fractions=Fractions(0, 1, 0)))
    assert isinstance(only, Prioritized)
    assert vars(only) == vars(Prioritized(0.8, 0.5, np.inf, True))
    mixed = make_selector(
        ReplayConfig(
            fractions=Fractions(0.2, 0.3, 0.5),
            priority=PriorityConfig(1.0, 0.25, 2.0, False),
            recency_exponent=0.5,
        )
    )
    assert isinstance(mixed, Mixture)
    assert mixed.fractions.tolist() == [0.2, 0.3, 0.5]
    assert [type(part) for part in mixed.parts] == [Uniform, Prioritized, Recency]
    assert vars(mixed.parts[1]) == vars(Prioritized(1.0, 0.25, 2.0, False))
    assert isinstance(mixed.parts[2], Recency)
    assert mixed.parts[2].exponent == 0.5


def filled(selector: Selector, length: int = 3, steps: int = 40) -> Replay:
    replay = Replay(length, 50, chunk=4, selector=selector, online=False)
    for tag in range(steps):
        replay.add(step(tag))
    return replay


def drawn_starts(replay: Replay, count: int = 20_000) -> np.ndarray:
    starts = replay.sample(count, "eval")["tag"][:, 0]
    return np.bincount(starts, minlength=len(replay)) / count


def steps_by_tag(replay: Replay) -> dict[int, np.ndarray]:
    """Stepids of all stored steps."""
    table = replay._table
    slots, indices = table.starts(np.arange(table.low, table.high))
    data = table.store.gather(
        table.store.pieces(slots, indices, replay.length), len(slots), replay.length
    )
    return {
        int(tag): stepid
        for tag, stepid in zip(data["tag"].flat, data["stepid"].reshape(-1, 20), strict=True)
    }


def prioritize(replay: Replay, priorities: dict[int, float]) -> None:
    ids = steps_by_tag(replay)
    stepid = np.stack([ids[tag] for tag in priorities])
    values = np.array(list(priorities.values()), np.float32)
    assert replay.update({"stepid": stepid, "priority": values}) == len(priorities)


def weights(replay: Replay) -> list[float]:
    """The weights of all living items, as the tree holds them."""
    table = replay._table
    selector = table.priorities
    selector._catch_up()
    numbers = np.arange(table.low, table.high)
    leaves = selector._tree._blocks.reshape(-1)[numbers % selector._size]
    return np.where(leaves >= SumTree._INFINITE, np.inf, leaves).tolist()


def test_weights_by_hand() -> None:
    """Priorities 1, 32, 0, 243, 1024 to the power of 0.8 are 1, 16, 0, 81, 256.

    Steps 0 to 3: the maximum is 81, the mean 24.5. Steps 1 to 4: 256 and 88.25.
    """
    replay = filled(Prioritized(), length=4, steps=5)
    prioritize(replay, {0: 1.0, 1: 32.0, 2: 0.0, 3: 243.0, 4: 1024.0})
    assert weights(replay) == pytest.approx(
        [0.5 * 81 + 0.5 * 24.5, 0.5 * 256 + 0.5 * 88.25], rel=1e-6
    )
    assert_matches(drawn_starts(replay), np.array([52.75, 172.125]), 20_000)


@pytest.mark.parametrize("max_fraction", [0.0, 0.5, 1.0])
def test_sequences_with_steps_never_trained_on_come_first(max_fraction: float) -> None:
    """Items 3 and 4 hold step 4 or 5, which have no priority yet."""
    replay = filled(Prioritized(max_fraction=max_fraction), length=2, steps=6)
    assert weights(replay) == [np.inf] * 5
    prioritize(replay, {0: 1.0, 1: 1e38, 2: 1e38, 3: 1.0})
    assert [weight < np.inf for weight in weights(replay)] == [True, True, True, False, False]
    found = drawn_starts(replay)
    assert found[:3].tolist() == [0, 0, 0]
    assert_matches(found[3:], np.ones(2), 20_000)
    prioritize(replay, {4: 0.0, 5: 0.0})
    assert drawn_starts(replay)[4] == 0
    replay.add(step(6))
    assert replay.sample(20, "eval")["tag"][:, 0].tolist() == [5] * 20, "the new sequence"


def test_an_infinite_priority_to_the_power_of_zero_is_one() -> None:
    assert weights(filled(Prioritized(exponent=0.0), length=2, steps=4)) == [1.0, 1.0, 1.0]


def test_priorities_too_large_for_the_power_stay_finite() -> None:
    replay = filled(Prioritized(exponent=4.0), length=1, steps=2)
    prioritize(replay, {0: 3e38})
    assert weights(replay)[0] < np.inf
    assert drawn_starts(replay).tolist() == [0.0, 1.0]


def test_when_all_priorities_are_zero_the_draw_is_uniform() -> None:
    replay = filled(Prioritized())
    prioritize(replay, dict.fromkeys(range(40), 0.0))
    assert_matches(drawn_starts(replay), np.ones(38), 20_000)
    starts = replay.sample(20_000)["tag"][:, 0]
    assert_matches(np.bincount(starts) / 20_000, np.ones(38), 20_000)


def test_a_batch_is_drawn_as_if_one_after_the_other() -> None:
    """For the second draw of a batch the steps of the first have the priority 0.

    Priorities 1 to 5, items of two steps, drawn by their sum: 3, 5, 7 and 9 of 24. After item 0
    the weights are 0, 3, 7, 9; after 1: 1, 0, 4, 9; after 2: 3, 2, 0, 5; after 3: 3, 5, 3, 0.
    """
    after = np.array([[0, 3, 7, 9], [1, 0, 4, 9], [3, 2, 0, 5], [3, 5, 3, 0]], np.float64)
    expected = np.array([3, 5, 7, 9])[:, None] / 24 * after / after.sum(1, keepdims=True)
    replay = filled(Prioritized(1.0, 0.0), length=2, steps=5)
    count, found = 5000, np.zeros((4, 4))
    for _ in range(count):
        prioritize(replay, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0})
        first, second = replay.sample(2)["tag"][:, 0]
        found[first, second] += 1
    assert found.trace() == 0
    assert_matches(found[expected > 0] / count, expected[expected > 0], count)


def test_removed_items_are_never_drawn() -> None:
    """Also when the ring of leaves wraps around."""
    replay = Replay(1, 8, chunk=4, selector=Prioritized(initial=1.0), online=False)
    for tag in range(10_000):
        replay.add(step(tag))
        if tag % 999 == 0:
            starts = replay.sample(50, "eval")["tag"][:, 0]
            assert starts.min() > tag - 8
    assert weights(replay) == [1.0] * 8


def test_steps_updated_together_do_not_reach_items_of_each_other() -> None:
    replay = filled(Prioritized(exponent=1.0, initial=0.0, max_fraction=1.0))
    stepids = steps_by_tag(replay)
    replay.update({"stepid": stepids[13][None], "priority": np.ones(1)})
    both = np.stack([stepids[5], stepids[15]])
    replay.update({"stepid": both, "priority": np.ones(2)})
    assert np.flatnonzero(drawn_starts(replay)).tolist() == [3, 4, 5, 11, 12, 13, 14, 15]


def test_priorities_that_are_negative_or_not_finite_are_refused() -> None:
    replay = filled(Prioritized())
    stepid = replay.sample(1)["stepid"]
    for priority in (np.full((1, 3), np.nan), np.full((1, 3), -1.0), np.ones((1, 2))):
        with pytest.raises(SchemaError, match="priority"):
            replay.update({"stepid": stepid, "priority": priority})


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.just(0.0)),
    st.tuples(st.just("sample"), st.integers(1, 4), st.just(0.0)),
    st.tuples(st.just("update"), st.integers(0, 100), st.floats(0, 10, width=32)),
)


@given(
    operations=st.lists(OPERATIONS, max_size=60),
    length=st.integers(1, 4),
    chunk=st.integers(1, 5),
    exponent=st.sampled_from([0.5, 0.8, 1.0]),
    initial=st.sampled_from([np.inf, 1.0, 0.0]),
    max_fraction=st.sampled_from([0.0, 0.5, 1.0]),
    online=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_weights_follow_from_the_priorities_of_steps(
    operations: list[tuple[str, int, float]],
    length: int,
    chunk: int,
    exponent: float,
    initial: float,
    max_fraction: float,
    online: bool,
) -> None:
    """Through any history of adds, samples, updates and evictions, across borders of chunks. What
    was sampled for training has the priority 0 until its next update."""
    selector = Prioritized(exponent, max_fraction, initial)
    replay = Replay(length, 12, chunk=chunk, selector=selector, online=online)
    model, priorities, tag = ModelReplay(length, 12), dict[int, float](), 0
    for what, number, value in [("add", 0, 0.0)] * length + operations:
        if what == "add":
            replay.add(step(tag), number)
            model.add(tag, number)
            tag += 1
        elif what == "sample":
            for tags in replay.sample(number)["tag"]:
                priorities |= dict.fromkeys(tags.tolist(), 0.0)
        else:
            data = replay.sample(2, "eval")
            found = data["tag"][:, number % length]
            count = len(set(found.tolist()))  # two steps at once, if they are not the same
            stepid, values = data["stepid"][:count, number % length], np.array([value, value / 2])
            priorities |= dict(zip(found[:count].tolist(), values.tolist(), strict=False))
            replay.update({"stepid": stepid, "priority": values[:count]})
        expected = []
        for item in model.items:
            powers = np.array([priorities.get(t, initial) for t in item], np.float64) ** exponent
            mixed = [(max_fraction, powers.max()), (1 - max_fraction, powers.mean())]
            expected.append(sum(share * part for share, part in mixed if share))
        if expected:
            assert weights(replay) == pytest.approx(expected, rel=1e-5)


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
    """Leaves of one block that are not next to each other count all the same."""
    rng = np.random.default_rng(0)
    tree, weights = SumTree(100_000), np.zeros(100_000)
    for _ in range(20):
        leaves = rng.permutation(100_000)[:3000]
        weights[leaves] = rng.random(3000)
        tree.set(leaves, weights[leaves])
        assert tree.total == pytest.approx(weights.sum(), rel=1e-12)
    tree.set(rng.permutation(100_000), 0.0)
    assert tree.total == 0


def test_infinite_weights_of_a_sum_tree_are_equally_likely() -> None:
    """However many lie in a block, and whatever finite weights lie between them."""
    tree = SumTree(3_000_000)
    leaves = np.array([5, 6, 7, 300, 2_000_000, 2_999_999])
    tree.set(np.arange(1000), np.full(1000, 1e38))
    tree.set(leaves, np.full(6, np.inf))
    drawn = tree.draw(np.random.default_rng(0).random(DRAWS))
    assert_matches(np.array([(drawn == leaf).mean() for leaf in leaves]), np.ones(6))
    assert tree.draw(np.zeros(1)).tolist() == [5]
    tree.set(leaves, np.zeros(6))
    assert tree.total == pytest.approx(996 * 1e38), "nothing is left of the infinite weights"


def test_rounding_never_leads_beyond_the_last_weight() -> None:
    """The sum of a block and the last of its running sums differ in the last bits."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        tree, weights = SumTree(512), rng.random(512)
        weights[[0, 256]] = weights[200:256] = weights[400:] = 0
        tree.set(np.arange(512), weights)
        assert tree.draw(np.array([np.nextafter(1.0, 0.0)])).tolist() == [399]


def test_a_share_of_each_batch_is_drawn_from_the_first_steps() -> None:
    """Also while there are fresh sequences, which come first among the others."""

    def add(replay: Replay, count: int, reward: float, stream: int) -> None:
        flags = {key: np.zeros(count, bool) for key in ("is_first", "is_last", "is_terminal")}
        rewards = np.full(count, reward, np.float32)
        replay.add_batch({"reward": rewards, **flags}, [stream] * count)

    with Replay(4, 100, selector=Recency()) as replay:
        add(replay, 50, 0.0, 0)
        replay.mix(0.25, replay.tick)
        assert replay.sample(16)["reward"].sum() == 0, "there are no others yet"
        add(replay, 30, 1.0, 1)
        for _ in range(5):
            assert np.unique(replay.sample(16)["reward"][:, 0]).tolist() == [0, 1]
            assert replay.sample(16)["reward"][:, 0].sum() == 12
        replay.mix(0.3, 50)
        drawn = np.mean([replay.sample(16)["reward"] for _ in range(500)])
        assert 0.68 < drawn < 0.72
        add(replay, 200, 1.0, 1)
        assert replay.sample(16)["reward"].all(), "the first steps have left"
