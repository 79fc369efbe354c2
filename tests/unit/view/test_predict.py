"""What a world model predicts of numbers, next to what happened."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from dream_parts import small_run

from dreamfleet.dream import Dream
from dreamfleet.view import predict
from dreamfleet.view.charts import prediction_chart
from dreamfleet.view.predict import Prediction


def test_an_episode_is_observed_and_then_predicted_from_its_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run(tmp_path, "gym:CartPole-v1", 60)
    monkeypatch.setattr(sys, "argv", ["predict", str(tmp_path), str(tmp_path / "made")])
    predict.main()
    content = (tmp_path / "made" / "000000000070.json").read_bytes()
    found = msgspec.json.decode(content, type=Prediction)
    truth, predicted = np.array(found.truth["vector"]), np.array(found.predicted["vector"])
    assert truth.shape[1] == predicted.shape[1] == 4
    # From the last step that was observed to the last one of the episode.
    assert len(predicted) == len(truth) - found.observed + 1
    dream = Dream.load(tmp_path)
    episode = max(dream.episodes(), key=lambda each: each.length)
    stored = episode.read(0, len(truth))
    np.testing.assert_allclose(truth, stored["vector"], atol=1e-5)
    dream.start(episode, observe=found.observed)
    action = {"action": stored["action"][found.observed - 1]}
    np.testing.assert_allclose(predicted[1], dream.step(action).obs["vector"], atol=1e-4)
    options = prediction_chart("vector 0", truth[:, 0], predicted[:, 0], found.observed)
    drawn = {each["name"]: each["data"] for each in options["series"]}
    assert drawn["prediction"][0][0] == found.observed - 1
    assert drawn["prediction"][-1][0] == drawn["truth"][-1][0]
