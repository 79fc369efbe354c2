"""What the README, and the parts for other programs, show works as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dreamfleet import Space, configure
from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.policy import BLUEPRINT, Blueprint

README = (Path(__file__).parents[2] / "README.md").read_text()
PARTS = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
PARTS = PARTS[PARTS.index("## Parts for your own programs") : PARTS.index("## In a notebook")]
EXAMPLES = re.findall(r"```python\n(.*?)```", README + PARTS, re.DOTALL)


def example(word: str) -> str:
    """The one that shows this."""
    (found,) = (text for text in EXAMPLES if word in text)
    return found


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
    exec(example("Server("), names)
    assert names["result"].tolist() == [2.0, 3.0]


def test_the_replay_gives_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = experience()
    # The README adds one batch; a sequence has 65 steps.
    code = example("Replay(").replace("replay.add_batch", "for _ in range(70): replay.add_batch")
    exec(code, names)
    assert names["batch"]["vector"].shape == (16, 65, 3)


def test_the_agent_acts() -> None:
    names = experience()
    exec(example("Dreamer("), names)
    assert names["action"]["action"].shape == (1,)


def test_training_and_evaluating_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = {
        "agent": "random", "steps": 300, "launcher": "serial", "envs": 2, "train_ratio": 1,
        "batch_size": 2, "batch_length": 8, "eval_episodes": 0, "outputs": ["jsonl"],
    }  # fmt: skip
    # The settings that the README shows are those of a long run of Dreamer.
    code = example("train(env=")
    shown = code.replace('steps=20_000, dreamer__model="cpu-small"', "**short")
    assert shown != code
    configure({"task": "gym:Pendulum-v1", "dreamer.model": "cpu-small", "steps": 20_000})
    names: dict[str, Any] = {"short": short}
    exec(shown, names)
    assert len(names["result"].returns) == 20
    assert str(names["result"].mean) in capsys.readouterr().out


def test_the_policy_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    agent = RandomAgent({"vector": Space(np.float32, 4)}, {"action": Space(np.int32, (), 0, 2)})
    described = Blueprint.of(agent, RunConfig(agent="random")).save()
    folder = tmp_path / "runs" / "gym-CartPole-v1" / "ckpt" / "agent"
    Checkpoint(folder).save({"agent": agent.save(), BLUEPRINT: described}, step=5)
    names: dict[str, Any] = {"observation": np.zeros(4, np.float32)}
    exec(example("Policy.load"), names)
    assert names["action"]["action"].shape == ()
    assert capsys.readouterr().out in ("0\n", "1\n")  # the action in the dict


def test_every_example_is_run() -> None:
    assert len(EXAMPLES) == 5


def test_the_paper_is_cited() -> None:
    assert "arXiv 2301.04104" in README
    (entry,) = re.findall(r"^@article\{.*?^\}", README, re.DOTALL | re.MULTILINE)
    for words in ("world models", "Hafner", "Nature", "2025", "10.1038/s41586-025-08744-2"):
        assert words in entry
