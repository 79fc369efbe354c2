"""What results/README.md says is what the files next to it say."""

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "results"
TEXT = (RESULTS / "README.md").read_text()


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / path).read_text().splitlines()]


@pytest.mark.parametrize("run", sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
def test_a_run_has_all_its_files(run: str) -> None:
    config = json.loads((RESULTS / run / "config.json").read_text())
    evaluation = rows(f"{run}/evaluations.jsonl")[-1]
    assert evaluation["task"] == config["task"]
    last = config["steps"] + config["envs"]  # a batch of actions may pass the end
    assert config["steps"] <= evaluation["step"] <= last
    assert evaluation["episodes"] == len(evaluation["returns"]) == 20
    assert all(row["step"] <= last for row in rows(f"{run}/scores.jsonl"))
    assert (RESULTS / run / "command.txt").read_text().strip()


def test_the_game_of_pixels_shows_both_evaluations() -> None:
    own = rows("catch/evaluations.jsonl")[-1]["returns"]
    more = json.loads((RESULTS / "catch" / "evaluation-200.json").read_text())["returns"]
    caught, all_caught = own.count(1.0), more.count(1.0)
    assert f"({caught} of {len(own)} caught); {all_caught} more episodes: all caught" in TEXT


def test_scores_that_are_missing_are_said() -> None:
    first = rows("cartpole_balance-0/scores.jsonl")[0]["step"]
    assert f"scores before step {first:,} are lost" in TEXT


def test_updates_are_counted_from_the_configurations() -> None:
    config = json.loads((RESULTS / "walker_stand-0" / "config.json").read_text())
    ours = config["steps"] * config["train_ratio"] / (config["batch_size"] * config["batch_length"])
    published = config["steps"] * 512 / (16 * 64)
    assert ours == published / 2
    assert f"({ours:,.0f} instead of {published:,.0f})" in TEXT


@pytest.mark.parametrize("run", ["cartpole_balance-0", "cartpole_swingup-0"])
def test_runs_that_span_versions_of_the_code_show_it(run: str) -> None:
    timed = ["time" in row for row in rows(f"{run}/scores.jsonl")]
    assert timed == sorted(timed)
    assert not all(timed)
    assert any(timed)
    assert "The two cartpole runs span versions of the code" in TEXT
