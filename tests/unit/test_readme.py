"""What the README shows works as it stands there."""

import re
from pathlib import Path

import numpy as np
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def experience() -> dict[str, object]:
    """The variables that the examples take for granted."""
    count = 4
    return {
        "array": np.arange(6.0).reshape(3, 2),
        "streams": np.arange(count),
        "steps": {
            "vector": np.zeros((count, 3), np.float32),
            "reward": np.zeros(count, np.float32),
            "is_first": np.zeros(count, bool),
            "is_last": np.zeros(count, bool),
            "is_terminal": np.zeros(count, bool),
        },
    }


def test_the_call_returns_what_the_method_does() -> None:
    names = experience()
    exec(EXAMPLES[0], names)
    assert names["result"].tolist() == [2.0, 3.0]


def test_the_replay_gives_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = experience()
    # The README adds one batch; a sequence has 65 steps.
    code = EXAMPLES[1].replace("replay.add_batch", "for _ in range(70): replay.add_batch")
    exec(code, names)
    assert names["batch"]["vector"].shape == (16, 65, 3)


def test_the_agent_acts() -> None:
    names = experience()
    exec(EXAMPLES[2], names)
    assert names["action"]["action"].shape == (1,)


def test_every_example_is_run() -> None:
    assert len(EXAMPLES) == 3
