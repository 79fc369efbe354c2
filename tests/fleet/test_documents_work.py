"""Every command and every program of the documents, run as it stands there.

Trainings are made short and use the random agent; everything else is exactly what a person types.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from documents import ROOT, commands, python_blocks

SCRIPTS = Path(sys.executable).parent
SHORT = {
    "--agent": "random", "--steps": "120", "--eval-episodes": "1", "--log-every": "1",
    "--train-ratio": "1", "--envs": "2", "--batch-size": "2", "--batch-length": "8",
}  # fmt: skip


def run(words: Sequence[str], where: Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=where)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shortened(words: list[str]) -> list[str]:
    """A training that is over in seconds; what the document says itself stays."""
    return words + [w for flag, value in SHORT.items() if flag not in words for w in (flag, value)]


@pytest.mark.timeout(300)
def test_every_command_works(tmp_path: Path) -> None:
    for block in python_blocks("environments.md"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None
        (tmp_path / name[1]).write_text(block)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    lines = list(dict.fromkeys(line for _, line in commands() if line))
    # First what makes runs, then what builds on them, then what looks at them.
    building = ("--offline", "--prefill")
    lines.sort(key=lambda line: (not line.startswith("dreamfleet train"),
                                 any(flag in line for flag in building)))  # fmt: skip
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for line in lines:
        program, *words = shlex.split(line)
        if program == "pip":
            for extra in re.findall(r"\[([\w,]+)\]", line):
                assert set(extra.split(",")) <= set(extras)
        elif program == "make":
            continue  # both are what the whole project is tested with
        elif program == "python":
            run([sys.executable, *words], tmp_path)
        elif words[0] == "train":
            run([str(SCRIPTS / program), *shortened(words)], tmp_path)
        else:
            if words[0] == "plot":
                seeds(tmp_path)
            run([str(SCRIPTS / program), *words], tmp_path)
    for made in ("curves.png", "play.mp4", "result.json", "runs/counter/scores.jsonl"):
        assert (tmp_path / made).stat().st_size > 0, made


def seeds(where: Path) -> None:
    """Runs that the documents take for granted, from the one that was really made."""
    source = where / "runs" / "gym-CartPole-v1"
    for seed in range(3):
        target = where / "runs" / f"seed-{seed}"
        target.mkdir(exist_ok=True)
        shutil.copy(source / "scores.jsonl", target)
        config = json.loads((source / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "seed": seed}))


def test_an_agent_of_your_own_is_trained_and_used(tmp_path: Path) -> None:
    (tmp_path / "bandit.py").write_text("\n".join(python_blocks("agents.md")))
    run([sys.executable, "bandit.py"], tmp_path)
    rows = (tmp_path / "runs" / "bandit" / "metrics.jsonl").read_text().splitlines()
    assert any("train/value" in json.loads(row) for row in rows)


def test_roles_apart_make_one_run(tmp_path: Path) -> None:
    (code,) = python_blocks("machines.md")
    code = f"sockets = {str(tmp_path)!r}\n{code}"
    programs = [
        subprocess.Popen([sys.executable, "-c", f"{code}\n{name}()"], cwd=tmp_path)
        for name in ("on_the_first_machine", "on_the_second_machine")
    ]
    first, second = programs
    try:
        assert first.wait(100) == 0
    finally:
        for program in programs:
            program.terminate()
        second.wait(60)
        first.wait(60)
    scores = (tmp_path / "runs" / "apart" / "scores.jsonl").read_text().splitlines()
    assert scores


def test_a_policy_is_used_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dreamfleet.agent import RandomAgent
    from dreamfleet.blueprint import BLUEPRINT, Blueprint
    from dreamfleet.checkpoint import Checkpoint
    from dreamfleet.config import RunConfig
    from dreamfleet.envs import make_env

    monkeypatch.chdir(tmp_path)
    env = make_env("gym:CartPole-v1")
    agent = RandomAgent(env.obs_space, env.act_space)
    described = Blueprint.of(agent, RunConfig(agent="random")).save()
    folder = tmp_path / "runs" / "gym-CartPole-v1" / "ckpt" / "agent"
    Checkpoint(folder).save({"agent": agent.save(), BLUEPRINT: described}, step=5)
    names = {"observation": np.zeros(4, np.float32), "observations": np.zeros((3, 4), np.float32)}
    for block in python_blocks("evaluation.md"):
        exec(block, names)
    assert names["actions"]["action"].shape == (3,)
    assert names["state"].fresh.tolist() == [False, True, False]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step":1000,"loss":0.5}\n'
