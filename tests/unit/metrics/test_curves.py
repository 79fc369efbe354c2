"""Learning curves of one run and of several, and what is published."""

import json
from pathlib import Path

import numpy as np
import pytest

from dreamfleet import plotting
from dreamfleet.envs import MissingExtraError, tasks
from dreamfleet.metrics import MetricsError
from dreamfleet.plotting import (
    Scores,
    bin_width,
    combine,
    final_score,
    published_curve,
    read_evaluations,
    read_scores,
)


def scores(*pairs: tuple[float, float]) -> Scores:
    at, score = zip(*pairs, strict=True)
    return Scores(np.array(at, float), np.array(score, float))


@pytest.mark.parametrize(
    ("longest", "most", "width"),
    [
        (100, 50, 2),
        (101, 50, 5),
        (250, 50, 5),
        (500_000, 50, 10_000),
        (30, 3, 10),
        (0, 50, 0.02),
        (245 / 3600, 50, 0.002),
    ],
)
def test_bins_have_round_widths(longest: float, most: int, width: float) -> None:
    assert bin_width(longest, most) == pytest.approx(width)


def test_a_bin_is_the_mean_of_its_episodes_and_is_held() -> None:
    curve = combine([scores((5, 1), (10, 3), (31, 8), (40, 10))], 10)
    assert curve.at.tolist() == [10, 20, 30, 40]
    assert curve.mean.tolist() == [2, 2, 2, 9]
    assert curve.low.tolist() == curve.high.tolist() == curve.mean.tolist()


def test_seeds_become_mean_and_range() -> None:
    """A run adds nothing before its first and after its last episode."""
    curve = combine([scores((5, 1), (15, 3)), scores((15, 7), (25, 9))], 10)
    assert curve.at.tolist() == [10, 20, 25]
    assert curve.mean.tolist() == [1, 5, 9]
    assert curve.low.tolist() == [1, 3, 9]
    assert curve.high.tolist() == [1, 7, 9]
    assert curve.runs == 2
    assert curve.present.tolist() == [1, 2, 1]
    assert curve.whole.tolist() == [False, True, False]
    longer = combine([scores((10, 1)), scores((10, 1), (40, 2))], 10)
    assert longer.present.tolist() == [2, 1, 1, 1]
    assert longer.partial.tolist() == [True, True, True, True]  # the line begins where all end


def test_an_episode_at_the_very_start_is_a_point() -> None:
    assert combine([scores((0, 7))], 0.02).mean.tolist() == [7]


def test_the_end_of_a_run_is_its_last_tenth() -> None:
    assert final_score(scores((50, 100), (90, 100), (91, 1), (100, 3))) == 2
    assert final_score(scores((100, 7))) == 7


def test_scores_are_read_in_order_and_in_frames(tmp_path: Path) -> None:
    rows = [
        {"step": 20, "episode/score": 2.0},
        {"step": 10, "episode/score": 1.0},
        {"step": 15, "episode/score": None},
    ]
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_scores(tmp_path, 4)
    assert read.at.tolist() == [40, 80]
    assert read.score.tolist() == [1, 2]


def test_a_run_without_episodes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="holds no scores"):
        read_scores(tmp_path)
    (tmp_path / "scores.jsonl").touch()
    with pytest.raises(MetricsError, match="no episode has ended yet"):
        read_scores(tmp_path)


def test_of_evaluations_at_one_step_that_with_the_most_episodes_counts(tmp_path: Path) -> None:
    rows = [(20, 5.0, 10), (10, 1.0, 3), (10, 2.0, 20), (10, 9.0, 10), (20, 6.0, 10)]
    keys = ("step", "mean", "episodes")
    lines = (json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)
    (tmp_path / "evaluations.jsonl").write_text("".join(lines))
    found = read_evaluations(tmp_path)
    assert (found.at.tolist(), found.score.tolist()) == ([10, 20], [2, 6])


def test_published_curves_are_found_by_task() -> None:
    curve = published_curve("dmc:cartpole_balance")
    assert curve is not None
    assert curve.seeds == 5
    assert curve.frames[[0, -1]].tolist() == [10_000, 490_000]
    assert curve.at(45_000) == pytest.approx(((485.8 + 490.3) / 2, (61.1 + 71.4) / 2), abs=0.1)
    assert curve.at(5_000) is None
    assert published_curve("dmc:cartpole_balance", {"obs": "pixels"}) is None
    assert published_curve("gym:CartPole-v1") is None
    assert published_curve("dmc:nothing") is None


@pytest.mark.parametrize("suite", ["dmc", "atari100k"])
def test_published_tasks_are_tasks(suite: str) -> None:
    try:
        known = {f"{suite}:{name}" for name in tasks(suite)}
    except MissingExtraError as error:
        pytest.skip(str(error))
    published = {task for task in known if published_curve(task)}
    assert len(published) == len(plotting._table()["suites"][suite]["tasks"]) > 0
