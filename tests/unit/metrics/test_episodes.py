import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamfleet.metrics import EpisodeStats


def batch(*rows: tuple, **more) -> tuple[np.ndarray, dict]:
    """Rows of (envid, reward, flags): f for first, l for last."""
    envid = np.array([row[0] for row in rows])
    flags = [row[2] if len(row) > 2 else "" for row in rows]
    return envid, {
        "reward": np.array([row[1] for row in rows], np.float32),
        "is_first": np.array(["f" in flag for flag in flags]),
        "is_last": np.array(["l" in flag for flag in flags]),
        **{key.replace("log_", "log/"): np.asarray(value) for key, value in more.items()},
    }


def test_an_episode_is_summed_up_when_it_ends() -> None:
    stats = EpisodeStats()
    assert stats.add(*batch((7, 0, "f"))) == []
    assert stats.add(*batch((7, 1))) == []
    assert stats.add(*batch((7, 1))) == []
    (episode,) = stats.add(*batch((7, 3, "l")))
    assert (episode.envid, episode.score, episode.length) == (7, 5.0, 3)
    assert episode.reward_rate == pytest.approx(2 / 3), "0-1 and 1-3 differ, 1-1 does not"
    assert stats.stats() == {"finished": 1, "abandoned": 0, "timed_out": 0, "running": 0}


def test_environments_do_not_mix() -> None:
    stats = EpisodeStats()
    stats.add(*batch((1, 0, "f"), (2, 0, "f"), (3, 0, "f")))
    stats.add(*batch((3, 30), (1, 10)))
    episodes = stats.add(*batch((2, 2, "l"), (3, 3, "l"), (1, 1)))
    assert {e.envid: (e.score, e.length) for e in episodes} == {2: (2, 1), 3: (33, 2)}
    assert stats.stats()["running"] == 1


def test_log_keys_become_avg_max_and_sum() -> None:
    stats = EpisodeStats()
    stats.add(*batch((1, 0, "f"), (2, 0, "f"), log_speed=[1.0, -5], log_hits=[0, 7]))
    stats.add(*batch((1, 0), (2, 0), log_speed=[4.0, -1], log_hits=[1, 7]))
    one, two = stats.add(*batch((1, 0, "l"), (2, 0, "l"), log_speed=[1.0, -3], log_hits=[1, 7]))
    assert one.logs == {
        "speed/avg": 2,
        "speed/max": 4,
        "speed/sum": 6,
        "hits/avg": pytest.approx(2 / 3),
        "hits/max": 1,
        "hits/sum": 2,
    }
    assert two.logs["speed/max"] == -1
    assert one.metrics()["log/speed/max"] == 4
    assert one.metrics()["score"] == 0


def test_log_keys_are_reset_in_the_next_episode() -> None:
    stats = EpisodeStats()
    for value in (9.0, 2.0):
        stats.add(*batch((1, 0, "f"), log_x=[value]))
        (episode,) = stats.add(*batch((1, 0, "l"), log_x=[value]))
        assert episode.logs == {"x/avg": value, "x/max": value, "x/sum": 2 * value}


def test_log_keys_may_appear_late_and_differ() -> None:
    stats = EpisodeStats()
    stats.add(*batch((1, 0, "f"), (2, 0, "f"), log_x=[1.0, 1.0]))
    stats.add(*batch((3, 0, "f"), log_y=[-2.0]))
    (three,) = stats.add(*batch((3, 0, "l"), log_y=[-2.0]))
    (one,) = stats.add(*batch((1, 0, "l"), log_x=[1.0]))
    assert three.logs == {"y/avg": -2, "y/max": -2, "y/sum": -4}
    assert one.logs == {"x/avg": 1, "x/max": 1, "x/sum": 2}


def test_values_that_are_missing_count_neither_in_the_sum_nor_in_the_mean() -> None:
    nothing = -np.inf
    stats = EpisodeStats()
    stats.add(*batch((1, 0, "f"), log_success=[nothing], log_never=[nothing]))
    stats.add(*batch((1, 0), log_success=[0.0], log_never=[nothing]))
    (episode,) = stats.add(*batch((1, 0, "l"), log_success=[1.0], log_never=[nothing]))
    assert episode.logs == {"success/avg": 0.5, "success/max": 1, "success/sum": 1}


def test_a_restarted_environment_abandons_its_episode() -> None:
    stats = EpisodeStats()
    stats.add(*batch((1, 0, "f")))
    stats.add(*batch((1, 100)))
    stats.add(*batch((1, 0, "f")))
    (episode,) = stats.add(*batch((1, 1, "l")))
    assert (episode.score, episode.length) == (1, 1)
    assert stats.abandoned == 1


def test_an_episode_whose_first_step_was_missed_does_not_count() -> None:
    """A logger that was restarted sees episodes from the middle."""
    stats = EpisodeStats()
    assert stats.add(*batch((1, 5))) == []
    assert stats.add(*batch((1, 5, "l"))) == []
    assert stats.finished == 0


def test_an_episode_of_one_step_has_length_zero() -> None:
    (episode,) = EpisodeStats().add(*batch((1, 0, "fl")))
    assert (episode.length, episode.score, episode.reward_rate) == (0, 0, 0)


def test_episodes_of_environments_that_are_gone_time_out() -> None:
    stats = EpisodeStats()
    stats.add(*batch((1, 0, "f"), (2, 0, "f"), (3, 0, "fl")))
    stats.forget([1, 3, 4])
    assert stats.stats() == {"finished": 1, "abandoned": 0, "timed_out": 1, "running": 1}
    assert stats.add(*batch((1, 1, "l"))) == [], "it comes back in the middle of something"
    stats.add(*batch((1, 0, "f")))
    (episode,) = stats.add(*batch((1, 1, "l")))
    assert episode.score == 1


def test_environments_that_are_gone_take_no_memory() -> None:
    stats = EpisodeStats()
    for envid in range(1000):
        stats.add(*batch((envid, 0, "f")))
        stats.forget([envid - 5])
    assert len(stats._running) == 5


def frames(*values: int) -> np.ndarray:
    return np.stack([np.full((4, 4, 3), value, np.uint8) for value in values])


def test_one_environment_is_recorded() -> None:
    stats = EpisodeStats(video=2)
    stats.add(*batch((1, 0, "f"), (2, 0, "f")), {"image": frames(20)})
    stats.add(*batch((2, 0), (1, 0), (2, 0)), {"image": frames(21, 22)})
    one, two = stats.add(*batch((1, 0, "l"), (2, 0, "l")), {"image": frames(23)})
    assert one.video == {}
    assert two.video["image"][:, 0, 0, 0].tolist() == [20, 21, 22, 23]
    assert two.video["image"].shape == (4, 4, 4, 3)


def test_an_episode_without_its_frames_is_recorded_no_more() -> None:
    stats = EpisodeStats(video=2)
    stats.add(*batch((2, 0, "f")), {"image": frames(20)})
    stats.add(*batch((2, 0)))
    (episode,) = stats.add(*batch((2, 0, "l")), {"image": frames(22)})
    assert episode.video == {}


def test_a_video_is_not_overwritten_by_its_source() -> None:
    stats = EpisodeStats(video=1)
    image = frames(1)
    stats.add(*batch((1, 0, "f")), {"image": image})
    image[:] = 99
    (episode,) = stats.add(*batch((1, 0, "l")), {"image": image})
    assert episode.video["image"][:, 0, 0, 0].tolist() == [1, 99]


def test_a_video_has_an_end() -> None:
    stats = EpisodeStats(video=1, most_frames=2)
    image = {"image": frames(1)}
    stats.add(*batch((1, 0, "f")), image)
    for _ in range(5):
        stats.add(*batch((1, 0)), image)
    (episode,) = stats.add(*batch((1, 0, "l")), image)
    assert len(episode.video["image"]) == 2


def test_an_environment_may_occur_twice_in_a_batch() -> None:
    stats = EpisodeStats()
    episodes = stats.add(
        *batch((1, 0, "f"), (1, 2), (2, 0, "f"), (1, 3, "l"), (1, 0, "f"), (2, 9, "l"), (1, 5, "l"))
    )
    assert sorted((e.envid, e.score, e.length) for e in episodes) == [
        (1, 5, 1),
        (1, 5, 2),
        (2, 9, 1),
    ]


class Plain:
    """The same statistics, one step at a time."""

    def __init__(self) -> None:
        self.episodes: dict[int, list[float]] = {}
        self.done: list[tuple] = []

    def add(self, envid: int, reward: float, first: bool, last: bool) -> None:
        if first:
            self.episodes[envid] = []
        if envid not in self.episodes:
            return
        self.episodes[envid].append(reward)
        if last:
            rewards = self.episodes.pop(envid)
            changes = sum(abs(a - b) >= 0.01 for a, b in itertools.pairwise(rewards))
            length = len(rewards) - 1
            self.done.append((envid, sum(rewards), length, changes / length if length else 0.0))


STEP = st.tuples(st.integers(0, 4), st.integers(-3, 3), st.sampled_from(["", "", "f", "l", "fl"]))


@settings(deadline=None)
@given(st.lists(st.lists(STEP, min_size=1, max_size=8), max_size=30))
def test_batches_equal_single_steps(batches: list[list[tuple]]) -> None:
    stats, plain = EpisodeStats(), Plain()
    ours = []
    for rows in batches:
        ours += stats.add(*batch(*rows))
        for envid, reward, flags in rows:
            plain.add(envid, reward, "f" in flags, "l" in flags)
    results = [(e.envid, e.score, e.length, e.reward_rate) for e in ours]
    # Within a batch the order of different environments is free.
    assert sorted(results) == sorted(plain.done)
