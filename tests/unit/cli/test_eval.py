"""`dreamfleet eval` from the command line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.envs.gym import GymEnv
from dreamfleet.errors import ConfigError
from dreamfleet.evaluation import evaluate
from dreamfleet.metrics import MetricsError
from dreamfleet.metrics.frames import Mp4Writer, find_encoder
from dreamfleet.policy import BLUEPRINT, Blueprint, Policy
from dreamfleet.training import final_evaluation


def trained(logdir: Path, task: str = "gym:CartPole-v1", **options: Any) -> Path:
    """A run's directory, as far as evaluation needs it. Its environments are threads, because
    processes take seconds to start."""
    config = RunConfig(
        task=task, env_options=options, agent="random", envs_per_process=8, launcher="serial"
    )
    env = make_env(task, **options)
    agent = RandomAgent(env.obs_space, env.act_space)
    env.close()
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(logdir / "ckpt" / "agent").save(parts, step=1234)
    return logdir


def frames(path: Path) -> np.ndarray:
    """What a player would show of a video."""
    encoder = find_encoder()
    command = [encoder, "-loglevel", "error", "-i", str(path), "-f", "rawvideo"]
    done = subprocess.run([*command, "-pix_fmt", "rgb24", "-"], capture_output=True, check=True)
    probe = subprocess.run([encoder, "-i", str(path)], capture_output=True, text=True, check=False)
    size = next(word for word in probe.stderr.replace(",", " ").split() if _is_size(word))
    width, height = map(int, size.split("x"))
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)


def _is_size(word: str) -> bool:
    parts = word.split("x")
    return len(parts) == 2 and all(part.isdigit() and part != "0" for part in parts)


def printed(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `eval --json` prints, which is one JSON object and nothing else."""
    capsys.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def kept(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def test_every_return_and_their_mean_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained(tmp_path / "run"))
    result = printed(run, "--episodes", "11", capsys=capsys)
    assert len(result["returns"]) == len(result["lengths"]) == 11
    assert result["returns"] == result["lengths"]  # CartPole rewards every step with one
    assert len(set(result["returns"])) > 3  # environments differ
    assert result["mean"] == pytest.approx(np.mean(result["returns"]))
    spread = np.std(result["returns"], ddof=1) / np.sqrt(11)
    assert result["standard_error"] == pytest.approx(spread)
    assert (result["task"], result["step"]) == ("gym:CartPole-v1", 1234)
    assert main(["eval", run, "--episodes", "11"]) == 0
    text = capsys.readouterr().out
    assert "sampled" in text
    assert f"{result['mean']:.4g} ± {spread:.2g}" in text
    other = printed(run, "--episodes", "11", "--seed", "1", capsys=capsys)
    assert other["returns"] != result["returns"]


def test_every_result_is_kept_with_the_run(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    (checkpoint,) = (run / "ckpt" / "agent").iterdir()
    assert main(["eval", str(run), "--episodes", "1", "--no-keep"]) == 0
    assert not (run / "evaluations.jsonl").exists()
    for path in (run, checkpoint):
        assert main(["eval", str(path), "--episodes", "2"]) == 0
    evaluate(run, 3)
    found = [(row["kind"], row["step"], row["episodes"]) for row in kept(run)]
    assert found == [("asked", 1234, count) for count in (2, 2, 3)]
    assert "seconds" in kept(run)[0]


def test_a_result_that_cannot_be_kept_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run")
    (run / "evaluations.jsonl").mkdir()
    result = printed(str(run), "--episodes", "1", capsys=capsys)
    assert len(result["returns"]) == 1
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    said = capsys.readouterr().out
    assert "mean return" in said
    assert "The result could not be written: Is a directory." in said


def test_greedy_actions_are_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    policy = RandomAgent.policy

    def spy(agent: RandomAgent, carry: Any, obs: Any, mode: Any = "train") -> Any:
        asked.append(mode)
        return policy(agent, carry, obs, mode)

    monkeypatch.setattr(RandomAgent, "policy", spy)
    run = trained(tmp_path / "run")
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    assert set(asked) == {"eval"}
    asked.clear()
    assert main(["eval", str(run), "--episodes", "1", "--greedy"]) == 0
    assert set(asked) == {"greedy"}
    assert "greedy" in kept(run)[-1]["protocol"]
    assert "greedy" in capsys.readouterr().out


SEEDED = """
import gymnasium
import numpy as np


class Seeded(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.score = float(self.np_random.integers(10**6))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), self.score, True, False, {}
"""


def test_every_episode_has_a_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the actions are, the score of this environment is a number of its seed."""
    (tmp_path / "seeded_envs.py").write_text(SEEDED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = trained(tmp_path / "run", "seeded_envs:Seeded")
    found = []
    for seed in ("0", "0", "1"):
        command = ["eval", str(run), "--episodes", "20", "--seed", seed]
        assert main([*command, "--task", "seeded_envs:Seeded"]) == 0
        found.append(kept(run)[-1]["returns"])
    assert len(set(found[0])) == 20
    assert found[1] == found[0]
    assert not set(found[2]) & set(found[0])


def test_the_first_episode_is_recorded(tmp_path: Path) -> None:
    video = tmp_path / "play.mp4"
    run = trained(tmp_path / "run")
    assert main(["eval", str(run), "--episodes", "2", "--video", str(video)]) == 0
    shown = frames(video)
    assert len(shown) == kept(run)[-1]["lengths"][0] + 1
    label = shown.shape[1] - 400  # rows above the environment's own frame
    assert label > 0
    assert shown.shape[2:] == (600, 3)
    assert (shown[0, :label] > 128).any()  # letters
    assert (shown[0, :label] != shown[-1, :label]).any()  # the return so far
    assert len({frame.tobytes() for frame in shown}) > 5
    assert sorted(each.name for each in tmp_path.iterdir()) == ["play.mp4", "run"]


def test_small_images_are_enlarged(tmp_path: Path) -> None:
    video = tmp_path / "catch.mp4"
    assert main(["eval", str(trained(tmp_path, "bundled:catch")), "--episodes", "1", "--video",
                 str(video)]) == 0  # fmt: skip
    assert min(frames(video).shape[1:3]) >= 256


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--episodes", "0"], "at least 1"),
        (["--video", "play.gif"], "must end in .mp4"),
    ],
)
def test_mistakes_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["eval", str(trained(tmp_path)), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_what_renders_no_frames_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = "import gymnasium\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    (tmp_path / "unseen_envs.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    video = tmp_path / "play.mp4"
    run = trained(tmp_path / "run", "unseen_envs:make")
    assert main(["eval", str(run), "--trust", "--video", str(video)]) == 2
    assert "renders no frames" in capsys.readouterr().err
    assert not video.exists()


@pytest.mark.parametrize("failure", ["render", "close"])
def test_training_keeps_its_evaluation_when_the_video_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: str,
) -> None:
    end = Mp4Writer.__exit__

    def fail(*arguments: Any) -> None:
        if failure == "render":
            raise OSError("gone")
        end(*arguments)
        raise MetricsError("It is out of order.")

    if failure == "close":
        monkeypatch.setattr(Mp4Writer, "__exit__", fail)
    else:
        monkeypatch.setattr(GymEnv, "render", fail)
    config = RunConfig(logdir=trained(tmp_path), agent="random", eval_episodes=3, launcher="serial")
    said: list[str] = []
    final_evaluation(config, 0.0, said.append)
    text = "\n".join(said)
    assert "Evaluation: mean score" in text
    reason = "It is out of order." if failure == "close" else "OSError('gone')"
    assert f"No video was recorded: {reason}" in text
    assert len(json.loads((tmp_path / "evaluations.jsonl").read_text())["returns"]) == 3


def test_a_factory_that_passes_everything_on_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = "import gymnasium\ndef make(**kw):\n    return gymnasium.make('CartPole-v1', **kw)\n"
    (tmp_path / "passing_envs.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"render_mode": "rgb_array"}
    run = trained(tmp_path / "run", "passing_envs:make", **options)
    video = str(tmp_path / "play.mp4")
    assert main(["eval", str(run), "--trust", "--episodes", "1", "--video", video]) == 0


def test_without_an_encoder_the_fix_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    assert main(["eval", str(trained(tmp_path)), "--video", str(tmp_path / "play.mp4")]) == 1
    assert "pip install 'dreamfleet[video]'" in capsys.readouterr().err


def test_python_evaluates_as_the_command_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run")
    result = printed(str(run), "--episodes", "9", "--seed", "3", capsys=capsys)
    assert result == evaluate(run, 9, seed=3).record()
    assert evaluate(Policy.load(run), 9, seed=3) == evaluate(str(run), 9, seed=3)
    assert evaluate(run, 1, greedy=True).protocol != evaluate(run, 1).protocol
    with pytest.raises(ConfigError, match="episodes=0 is not valid"):
        evaluate(run, 0)
