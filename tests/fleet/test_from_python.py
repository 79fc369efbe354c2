"""Training from Python: environments of a script, settings as arguments, progress."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from documents import ROOT, python_blocks
from fleet_parts import rows, small_run

from dreamfleet import ConfigError, Policy, StopTraining, resume, train
from dreamfleet.agents.random import RandomType
from dreamfleet.config import RunConfig, read_config
from dreamfleet.envs.bundled import Dummy
from dreamfleet.fleet.supervisor import silent
from dreamfleet.metrics import Outputs

TARGET = """
import functools
import threading

import gymnasium
import numpy as np

import dreamfleet


class Target(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=20):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, False, self.steps >= self.length, {}


short = dict(agent="random", envs=2, train_ratio=1, batch_size=2, batch_length=8,
             log_every=0.2, eval_episodes=1, outputs=["jsonl"])
"""
UNGUARDED = f"""
print("once")
{TARGET}
result = dreamfleet.train(env=functools.partial(Target, length=7), steps=150, **short)
assert result.returns == [7.0]
result = dreamfleet.train(env=lambda: Target(), logdir="runs/mine", steps=150, **short)
assert result.returns == [20.0]
lock = threading.Lock()
try:
    dreamfleet.train(env=lambda: lock and Target(), logdir="runs/never", steps=1, **short)
except dreamfleet.ConfigError as error:
    print("refused:", error)
"""
GUARDED = f"""
{TARGET}
if __name__ == "__main__":
    for task, steps in ((Target, 150), ("__main__:Target", 400)):
        result = dreamfleet.train(env=task, steps=steps, **short)
    assert result.step >= 400
"""


class Reaching(gymnasium.Env[Any, Any]):
    """Says in `info` how an episode ended, as other libraries expect it."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        over = self.steps == 4
        return (
            np.zeros(1),
            0.0,
            False,
            over,
            {"log/fuel": 2.0, **({"is_success": 1} if over else {})},
        )


def test_numbers_of_info_are_logged(tmp_path: Path) -> None:
    settings = {"agent": "random", "launcher": "serial", "envs": 2, "batch_size": 2}
    train(env=Reaching, logdir=tmp_path, steps=60, batch_length=8, eval_episodes=1, say=silent,
          train_ratio=1, log_every=0.1, **settings)  # fmt: skip
    metrics = {key: value for row in rows(tmp_path / "metrics.jsonl") for key, value in row.items()}
    assert metrics["episode/log/is_success/avg"] == 1, "the mean of the steps that have it"
    assert metrics["episode/log/fuel/sum"] == 8
    assert metrics["eval/log/fuel/avg"] == 2
    assert "episode/log/success/avg" not in metrics
    assert read_config(tmp_path).env_options == {"log_info": ("log/fuel",)}


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_a_script_without_a_guard_trains_on_what_only_it_has(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("once") == 1
    assert re.search("^(step|Waiting:) ", done.stdout, re.MULTILINE)  # without a terminal
    assert "refused: The code of the environment cannot be sent to its process" in done.stdout
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"Target-length=7", "mine"}


def test_an_environment_of_a_script_is_resumed_by_its_name_and_evaluated_elsewhere(
    tmp_path: Path,
) -> None:
    (tmp_path / "guarded.py").write_text(GUARDED)
    done = run("guarded.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    logdir = tmp_path / "runs" / "Target"
    assert len(rows(logdir / "evaluations.jsonl")) == 2
    assert read_config(logdir).task == "__main__:Target"
    assert set(Policy.load(logdir).obs_space) == {"vector"}
    command = ("-m", "dreamfleet.cli", "eval", "runs/Target", "--episodes", "1")
    refused = run(*command, cwd=tmp_path)
    assert refused.returncode == 2
    assert "write --task module:Target" in refused.stderr
    assert "Traceback" not in refused.stderr
    resuming = run("-m", "dreamfleet.cli", "resume", "runs/Target", cwd=tmp_path)
    assert "write --task module:Target" in resuming.stderr
    found = run(*command, "--task", "guarded:Target", cwd=tmp_path)
    assert "mean return    20" in found.stdout, found.stderr


class Local(RandomType):
    pass


def test_an_agent_is_given_by_its_type_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(tmp_path, launcher="serial", steps=80, eval_episodes=0)
    quiet: dict[str, Any] = {"display": None, "say": silent}
    train(config, agent=RandomType, **quiet)
    assert read_config(tmp_path).agent == "dreamfleet.agents.random:RandomType"
    monkeypatch.setattr(Local, "__module__", "__main__")
    for agent in (Local, Local(), "__main__:Local"):
        with pytest.raises(ConfigError, match=r"Local exists in this program only"):
            train(config, agent=agent, **quiet)
    seen: list[int] = []
    before = len(rows(tmp_path / "scores.jsonl"))
    resume(tmp_path, steps=300, trust=True, on_episode=lambda *_: seen.append(1), **quiet)
    assert len(seen) == len(rows(tmp_path / "scores.jsonl")) - before > 0
    assert Policy.load(tmp_path, agent=RandomType()).step >= 300


def test_environments_that_share_a_name_need_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the second one would resume the run of the first."""
    monkeypatch.chdir(tmp_path)

    class Inside(Dummy):
        pass

    class Caller:
        def __call__(self) -> Any:
            return Dummy()

    shared: list[Any] = [
        lambda **options: Dummy(**options),
        Inside,
        partial(lambda length: Dummy(length=length), 3),
    ]
    shared += [partial(Dummy, size=(8, 8)), Caller()]
    for env in shared:
        for config in (None, RunConfig(agent="random")):
            with pytest.raises(ConfigError, match=r"would resume its run: pass logdir="):
                train(config, env=env, steps=1)
    assert not list(tmp_path.iterdir())
    config = small_run(tmp_path / "mine", launcher="serial", steps=20, eval_episodes=0)
    train(config, env=shared[0], display=None, say=silent)
    assert read_config(tmp_path / "mine").task.endswith("<lambda>")


class Kept:
    """An output."""

    def __init__(self, logdir: Path) -> None:
        self._path = logdir / "kept"

    def write(self, step: int, metrics: Any) -> None:
        self._path.touch()


def test_one_output_needs_no_list_and_resume_takes_classes(tmp_path: Path) -> None:
    config = small_run(tmp_path, launcher="serial", steps=40, eval_episodes=0)
    quiet: dict[str, Any] = {"display": None, "say": silent}
    train(config, outputs="jsonl", **quiet)
    assert read_config(tmp_path).outputs == ("jsonl",)
    resume(tmp_path, steps=300, outputs=["jsonl", Kept], **quiet)
    assert (tmp_path / "kept").exists()
    (tmp_path / "kept").unlink()
    resume(tmp_path, steps=600, outputs=Kept, **quiet)
    assert (tmp_path / "kept").exists()
    assert read_config(tmp_path).outputs == ()


def test_settings_are_arguments(tmp_path: Path) -> None:
    said: list[str] = []
    config = small_run(tmp_path, launcher="serial", steps=80, eval_episodes=1)
    result = train(config, say=said.append, display=None, replay__chunk=32)
    assert result is not None
    assert read_config(tmp_path).replay.chunk == 32
    assert "Training random on bundled:dummy" in said[0]
    assert said[-1].endswith(f"Results: {tmp_path}")
    assert rows(tmp_path / "evaluations.jsonl")[0]["returns"] == result.returns
    assert train(config, say=silent, display=None, steps=120, eval_episodes=0) is None
    for given, words in (
        ({"task": "bundled:catch"}, "holds a run with task bundled:dummy"),
        ({"env": Dummy, "task": "bundled:dummy"}, "env and task mean the same"),
        ({"preset": "debug"}, "leave the preset out"),
        ({"replay__chonk": 3}, "did you mean"),
        ({"env": lambda: Dummy(), "remote_envs": True, "actor_addr": "tcp://127.0.0.1:9"},
         "put it into a module"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            train(config, **given)


SHORT = (
    'steps=150, agent="random", envs=2, train_ratio=1, batch_size=2, batch_length=8, '
    "log_every=0.2, eval_episodes=1"
)


@pytest.mark.parametrize("name", ["train_target", "with_callbacks", "with_outputs"])
def test_the_programs_of_the_guide_work(tmp_path: Path, name: str) -> None:
    (code,) = (each for each in python_blocks("python.md") if each.startswith(f"# {name}.py\n"))
    short = code.replace("steps=20_000", SHORT).replace(", dreamer__loss__horizon=50", "")
    assert short != code
    (tmp_path / "program.py").write_text(short)
    for block in python_blocks("environments.md"):
        (tmp_path / block.split()[1]).write_text(block)
    done = run("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "with_callbacks":
        logdir = tmp_path / "runs" / "gym-CartPole-v1"
        assert f"{len(rows(logdir / 'scores.jsonl'))} episodes" in done.stdout
        assert "is saved in runs/gym-CartPole-v1/ckpt/agent/000001-step-" in done.stdout
    if name == "with_outputs":
        lines = (tmp_path / "runs" / "my_native-Counter" / "metrics.csv").read_text().splitlines()
        assert any(",episode/log/right/max," in line for line in lines)


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells one after the other, as code that has no file."""
    path = ROOT / "examples" / "notebook.ipynb"
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    short = code.replace("steps=10_000, eval_episodes=5", SHORT)
    assert short != code
    done = run("-c", f"import matplotlib; matplotlib.use('agg')\n{short}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean score of 1 new episodes" in done.stdout
    assert "{'action': array(" in done.stdout


def test_an_exception_in_a_callback_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    config = small_run(tmp_path, launcher="serial", steps=0, log_every=0.1)
    failing = {"display": None, "say": silent}

    def fail(step: int, score: float, length: int) -> None:
        raise RuntimeError("my mistake")

    with pytest.raises(RuntimeError, match="my mistake"):
        train(config, on_episode=fail, **failing)
    assert Policy.load(tmp_path).step > 0

    def stop(step: int, metrics: dict[str, Any]) -> None:
        raise StopTraining

    seen: list[Path] = []
    before = len(rows(tmp_path / "evaluations.jsonl"))
    result = train(config, on_log=stop, on_checkpoint=lambda _, path: seen.append(path), **failing)
    assert result is not None
    assert len(rows(tmp_path / "evaluations.jsonl")) == before + 1
    with pytest.raises(ConfigError, match="add jsonl to outputs"):
        train(config, on_log=stop, outputs=["media"])
    with pytest.raises(ConfigError, match="pass the class Outputs"):
        train(config, outputs=[Outputs([])])
    with pytest.raises(ConfigError, match="There is no output 'jsnl': choose from"):
        train(config, outputs=["jsnl"])
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        train(config, outputs=["nowhere:Csv"])
    named = small_run(tmp_path, outputs=("jsonl", "nowhere:Csv"))
    (tmp_path / "config.json").write_text(named.to_json())
    with pytest.raises(ConfigError, match="nowhere:Csv"):  # which a file alone does not import
        resume(tmp_path)
