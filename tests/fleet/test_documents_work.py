"""Every command and every program of the documentation, run as it stands there.

Trainings are made short, use the random agent and are in one thread; everything else is exactly
what a person types.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from documents import ROOT, blocks, commands, python_blocks
from fleet_parts import fixed_address

from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env, noop
from dreamfleet.envs.gym import GymPlayer
from dreamfleet.metrics import ScoresFile
from dreamfleet.policy import BLUEPRINT, Blueprint
from dreamfleet.replay import Replay

SHORT = {
    "--on-failure": "stop",
    "--agent": "random", "--steps": "120", "--eval-episodes": "1", "--log-every": "1",
    "--train-ratio": "1", "--envs": "2", "--batch-size": "2", "--batch-length": "8",
}  # fmt: skip


NEEDS = {
    "sweeps.md": ("optuna", "Optuna is not installed: pip install 'dreamfleet[sweep]'"),
    "datasets.md": ("h5py", "Minari is not installed: pip install 'dreamfleet[datasets]'"),
    "export.md": ("onnxruntime", "ONNX is not installed: pip install 'dreamfleet[export]'"),
}
"""Packages of extras without which a page's commands are refused."""


def run(words: Sequence[str], where: Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=where)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def install(words: Sequence[str]) -> None:
    """Check without a network that the checkout can be installed with these extras."""
    assert words[0] == "install"
    if words[1].startswith("."):  # another test looks at the names of extras
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--dry-run"]
        uv += ["--python", sys.executable, "--no-deps", "--offline", "--no-build-isolation"]
        done = subprocess.run(
            [*uv, *words[1:]], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        assert "does not have an extra" not in done.stderr


def shortened(words: list[str]) -> list[str]:
    """A training that is over in seconds; what the page says itself stays, but for many steps."""
    many = {word for word in words if word.isdecimal() and int(word) >= 50_000}
    words = [SHORT["--steps"] if word in many else word for word in words]
    given = {word.partition(".")[0] for word in words if word.startswith("--")}
    if "--dreamer" in given:  # settings of the agent belong to that agent
        given |= {"--agent", "--eval-episodes"}
        words += ["--dreamer.execution.cache-dir", os.environ["DREAMFLEET_TESTS_CACHE"]]
        words += ["--eval-episodes", "0", "--report-every", "0"]
        words += [] if "--dreamer.model" in words else ["--dreamer.model", "debug"]
    return words + [w for flag, value in SHORT.items() if flag not in given for w in (flag, value)]


def short_sweep(words: list[str]) -> list[str]:
    """A sweep of such trainings."""
    given = {"--launcher": "serial", **SHORT}
    flags = ("--agent", "--eval-episodes", "--train-ratio", "--envs", "--launcher")
    words = [SHORT["--steps"] if word.isdecimal() and int(word) > 100 else word for word in words]
    changed = ["batch_size=2", "batch_length=8", "report_length=8", "on_failure=stop"]
    if "--set" in words:
        words[words.index("--set") + 1 : words.index("--set") + 1] = changed
    else:
        words += ["--set", *changed]
    return words + [word for flag in flags for word in (flag, given[flag])]


@pytest.mark.parametrize("page", sorted({page for page, line in commands() if line}))
def test_every_command_works(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if page in NEEDS:
        package, reason = NEEDS[page]
        pytest.importorskip(package, reason=reason)
    monkeypatch.chdir(tmp_path)
    for block in python_blocks("environments.md"):
        name = re.match(r"# (\w+\.py)\n", block)
        (tmp_path / name[1]).write_text(block)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    lines = list(dict.fromkeys(line for where, line in commands() if where == page and line))
    # Runs that the page takes for granted, unless it makes them itself.
    for name in ("gym-CartPole-v1", "seed-0", "seed-1", "seed-2"):
        if name != "gym-CartPole-v1" or "dreamfleet train" not in lines:
            (a_policy if page == "export.md" else a_run)(tmp_path / "runs" / name)
    for line in lines:
        program, *words = shlex.split(line)
        if program == ".":
            assert words == [".venv/bin/activate"]  # where `make` puts it
        elif program == "pip":
            install(words)
        elif program == "python":
            run([sys.executable, *words], tmp_path)
        elif words[0] == "view":
            serve(words, tmp_path)
        else:
            assert program == "dreamfleet", line
            if words[0] == "sweep":
                words = short_sweep(words)
            if words[0] in ("train", "resume"):
                words = [*shortened(words), "--launcher", "serial"]  # one process instead of seven
            assert main(words) == 0, f"{line}\n{capfd.readouterr().err}"
        for made in re.findall(r"[\w-]+\.(?:png|mp4|json)\b", line):
            assert (tmp_path / made).stat().st_size > 0, line


def serve(words: Sequence[str], where: Path) -> None:
    """A server until it has said its address, then Ctrl-C, which background jobs ignore."""
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    command = [*ignoring, sys.executable, "-m", "dreamfleet.cli", *words]
    with subprocess.Popen(command, cwd=where, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("http://127.0.0.1:")
        server.send_signal(signal.SIGINT)
        server.communicate()  # it has more to say
    assert server.returncode == 130


def a_policy(logdir: Path) -> None:
    """A checkpoint of Dreamer that has learned nothing."""
    # Here: tests of the agent check its shapes from its first import on.
    import agent_worlds as worlds

    from dreamfleet.agents import Dreamer

    config = RunConfig(logdir=logdir, agent_config=worlds.config())
    env = make_env(config.task)
    agent = Dreamer(env.obs_space, env.act_space, config.agent_config)
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(logdir / "ckpt" / "agent").save(parts, step=0)


def a_run(logdir: Path) -> None:
    """A short run of the random agent as it lies on the disk, without a fleet that makes it."""
    config = RunConfig(agent="random", logdir=logdir, batch_length=8, report_length=8)
    env = make_env(config.task, seed=1)
    agent = RandomAgent(env.obs_space, env.act_space)
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    parts["run"] = {"updates": 0}
    Checkpoint(logdir / "ckpt" / "agent").save(parts, step=90)
    (logdir / "config.json").write_text(config.to_json())
    scores = ScoresFile(logdir / "scores.jsonl")
    action, score = noop(env.act_space), 0.0
    with Replay(config.window, 1000, logdir / "replay") as replay:
        for step in range(90):
            obs = env.step(action)
            score = float(obs["reward"]) + (0.0 if obs["is_first"] else score)
            if obs["is_last"]:
                scores.add(step, score, 9, "0", "epoch", step)
            _, chosen, _ = agent.policy({}, {key: value[None] for key, value in obs.items()})
            stored = {**{key: value[None] for key, value in obs.items()}, **chosen}
            replay.add_batch(stored, np.array([0]))
            action = {"action": chosen["action"][0], "reset": obs["is_last"]}
    scores.close()


def test_an_agent_of_your_own_is_trained_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, block in zip(
        ("bandit.py", "train_bandit.py"), python_blocks("agents.md"), strict=True
    ):
        assert block.startswith(f"# {name}\n")
        short = block.replace('"steps": 2000', '"steps": 700')
        assert (short != block) == (name == "train_bandit.py")
        (tmp_path / name).write_text(short)
    run([sys.executable, "train_bandit.py"], tmp_path)
    rows = (tmp_path / "runs" / "bandit" / "metrics.jsonl").read_text().splitlines()
    assert any("train/value" in json.loads(row) for row in rows)
    program = str(Path(sys.executable).with_name("dreamfleet"))
    command = [program, "eval", "runs/bandit", "--episodes", "1"]
    run([*command, "--agent", "bandit:BanditType"], tmp_path)
    refused = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert refused.returncode == 2
    assert "add --agent bandit:BanditType, or --trust" in refused.stderr
    # What only reads a run's directory needs no code of its agent.
    (tmp_path / "bandit.py").unlink()
    monkeypatch.chdir(tmp_path)
    for words in (["status", "runs/bandit"], ["plot", "runs/bandit"]):
        assert main(words) == 0
        assert "bandit" in capsys.readouterr().out


def test_the_program_for_users_of_other_libraries_runs(tmp_path: Path) -> None:
    (program,) = python_blocks("from_sb3.md")
    short = 'steps=120, agent="random", launcher="serial", envs=2, train_ratio=1, batch_size=2, '
    short += "batch_length=8, report_length=8, eval_episodes=1"
    changed = program.replace(" steps=30_000", f" {short}").replace("steps=50_000", "steps=200")
    assert changed.count("steps=120") == changed.count("steps=200") == 1
    (tmp_path / "from_sb3.py").write_text(changed)
    run([sys.executable, "from_sb3.py"], tmp_path)
    assert json.loads((tmp_path / "runs/cart/config.json").read_text())["steps"] == 200


def runs_of_several_machines() -> list[list[list[str]]]:
    """The commands of each run that the page shows, without `dreamfleet`: the training, then roles
    of other machines."""
    runs: list[list[list[str]]] = []
    for block in blocks(ROOT / "docs" / "machines.md"):
        if block.language == "console":
            for line in block.text.splitlines():
                _, *words = line.split()
                if words[0] == "train":
                    runs.append([])
                runs[-1].append(words)
    return runs


@pytest.mark.parametrize("shown", runs_of_several_machines(), ids=["joined", "shared", "copied"])
def test_machines_started_by_hand_make_one_run(shown: list[list[str]], tmp_path: Path) -> None:
    """The commands as shown. All machines are this one, each in a directory of its own, unless the
    page says that they share one."""
    shared, joins = "--config" not in shown[1], shown[1][0] == "join"
    program = str(Path(sys.executable).with_name("dreamfleet"))
    free = fixed_address()
    values = {"tcp://10.0.0.5:5551": free, "TASK": "bundled:dummy"}
    values["0.0.0.0"] = free.removeprefix("tcp://")
    train, *roles = ([values.get(word, word) for word in words] for words in shown)
    first, *others = (tmp_path / str(number) for number in range(len(shown)))
    run_directory = first / "DIR"
    first.mkdir()
    # What has joined does all the work.
    alone = ["--remote-envs"] if joins else []
    with (tmp_path / "said").open("w") as said:
        started = [subprocess.Popen([program, *shortened(train), *alone], cwd=first, stdout=said)]
    try:
        while not (run_directory / "config.json").exists():
            assert started[0].poll() is None
            time.sleep(0.05)
        if joins:
            while not (lines := re.findall(r"'dreamfleet://.*'", (tmp_path / "said").read_text())):
                assert started[0].poll() is None
                time.sleep(0.05)
            roles = [["join", lines[0].strip("'"), *words[2:]] for words in roles]
        for place, words in zip(others, roles, strict=True):
            if not shared:
                place.mkdir()
                for name in ("config.json", "keys"):
                    shutil.copy2(run_directory / name, place / name)
            started.append(subprocess.Popen([program, *words], cwd=first if shared else place))
        assert started[0].wait(250) == 0
        if joins:
            assert started[1].wait(60) == 0
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)
    assert len(started) == (2 if shared else 3)
    assert (run_directory / "ckpt" / "agent").exists()


def test_roles_apart_make_one_run(tmp_path: Path) -> None:
    (code,) = python_blocks("machines.md")
    code = f"sockets = {str(tmp_path)!r}\n{code}"
    programs = [
        subprocess.Popen([sys.executable, "-c", f"{code}\n{name}()"], cwd=tmp_path)
        for name in ("on_the_first_machine", "on_the_second_machine")
    ]
    first, second = programs
    try:
        assert first.wait(250) == 0
    finally:
        for program in programs:
            program.terminate()
        second.wait(60)
        first.wait(60)
    scores = (tmp_path / "runs" / "apart" / "scores.jsonl").read_text().splitlines()
    assert scores


def test_a_policy_is_used_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "runs" / "gym-CartPole-v1")
    names = {"observation": np.zeros(4, np.float32), "observations": np.zeros((3, 4), np.float32)}
    forgotten = []
    real = GymPlayer.reset
    monkeypatch.setattr(GymPlayer, "reset", lambda play: forgotten.append(play) or real(play))
    for block in python_blocks("evaluation.md"):
        exec(block, names)
    assert len(names["scores"]) == len(forgotten) == 2
    assert names["actions"]["action"].shape == (3,)
    assert names["state"].fresh.tolist() == [False, True, False]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step":1000,"loss":0.5}\n'
