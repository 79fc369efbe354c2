"""What a world model predicts of numbers: a process of its own writes it, and a page draws it.

`python -m dreamfleet.view.predict CHECKPOINT FOLDER [trust]` observes the first steps of a stored
episode and predicts the rest from its actions alone; `FOLDER/STEP.json` then has truth and
prediction of every observation key that holds numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from dreamfleet.dream import Dream
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import atomic_write

_OBSERVED, _PREDICTED = 16, 48
_MOST_VALUES = 24
_EPISODES = 20


class Prediction(msgspec.Struct, frozen=True):
    """Truth and prediction of one stored episode."""

    step: int
    """Training steps of the checkpoint."""
    observed: int
    """Steps that the model has observed; it has predicted those that follow."""
    truth: dict[str, list[list[float]]]
    """Of each key the values of each step."""
    predicted: dict[str, list[list[float]]]
    """The same from the last observed step on."""


def predict(path: Path, *, trust: bool = False) -> Prediction:
    """Predict an episode of the run's replay with a checkpoint.

    Raises:
        ConfigError: There is no stored episode, or the agent has no world model.
    """
    dream = Dream.load(path, trust=trust)
    episodes = [each for each in dream.episodes(_EPISODES) if each.begins and each.length > 3]
    if not episodes:
        raise ConfigError("The run's replay holds no episode to predict.")
    episode = max(episodes, key=lambda each: each.length)
    observed = min(_OBSERVED, episode.length // 2)
    stop = min(episode.length, observed + _PREDICTED)
    stored = episode.read(0, stop)
    moments = [dream.start(episode, observe=observed)]
    for number in range(observed, stop):
        action = {key: stored[key][number - 1] for key in dream.act_space}
        moments.append(dream.step(action))
    keys = [
        key
        for key, space in dream.obs_space.items()
        if space.dtype != np.uint8 and key in moments[0].obs
    ]
    return Prediction(
        step=dream.trained_steps,
        observed=observed,
        truth={key: _values(stored[key]) for key in keys},
        predicted={key: _values(np.stack([m.obs[key] for m in moments])) for key in keys},
    )


def _values(array: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[list[float]]:
    flat = np.asarray(array, np.float64).reshape(len(array), -1)[:, :_MOST_VALUES]
    rows: list[list[float]] = np.nan_to_num(flat).round(6).tolist()
    return rows


def main() -> None:
    """Write the prediction of a checkpoint."""
    try:
        made = predict(Path(sys.argv[1]), trust=sys.argv[3:] == ["trust"])
    except DreamfleetError as error:
        sys.exit(str(error))
    atomic_write(Path(sys.argv[2]) / f"{made.step:012d}.json", msgspec.json.encode(made))


if __name__ == "__main__":
    main()
