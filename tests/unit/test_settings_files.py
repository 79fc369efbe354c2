"""`train --config FILE`: settings in a file, which `--print-config` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.cli import main
from dreamfleet.cli.train import config_of
from dreamfleet.config import RunConfig
from dreamfleet.presets import PRESETS, preset

RAN = "ran_because_a_file_of_settings_said_so"


def file_of(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return ["--config", str(path)]


@pytest.mark.parametrize("with_yaml", [True, False], ids=["yaml", "json"])
@pytest.mark.parametrize("name", ["default", "pixels", "debug"])
def test_what_is_printed_is_read_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    with_yaml: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    if not with_yaml:
        monkeypatch.setitem(sys.modules, "yaml", None)
    typed = ["--preset", name, "--dreamer.optimizer.eps", "1e-20", "--target-score", "5"]
    assert main(["train", *typed, "--print-config"]) == 0
    text = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "nothing was trained"
    path = tmp_path / ("run.yaml" if with_yaml else "run.json")
    assert config_of(file_of(path, text)) == config_of(typed)
    other = config_of([*file_of(path, text), "--task", "gym:Acrobot-v1"])
    assert other.logdir == Path("runs/gym-Acrobot-v1"), "it follows the task"


def test_what_is_typed_replaces_what_the_file_says(tmp_path: Path) -> None:
    here = file_of(
        tmp_path / "run.yaml",
        "preset: pixels\nsteps: 1e6\nenvs: 3\ntarget_score: null\nenv_options: {time_limit: 9}\n"
        "outputs: [jsonl]\nreplay: {capacity: 5e4}\ndreamer.loss.horizon: 50\n"
        "dreamer:\n  model: debug\n  optimizer:\n    learning_rate: 1e-4\n    warmup: 7\n",
    )
    config = config_of(here)
    agent = config.agent_config
    assert config.task == preset("pixels").task
    assert (config.steps, config.envs, config.outputs) == (10**6, 3, ("jsonl",))
    assert config.env_options == {"size": (32, 32), "time_limit": 9}
    assert (config.replay.capacity, agent.optimizer.learning_rate) == (50_000, 1e-4)
    assert (agent.loss.horizon, agent.optimizer.warmup, agent.model.deter) == (50.0, 7, 16)
    line = "--steps 5 --env-options time_limit=4 --dreamer.optimizer.warmup 8 --dreamer.model 1m"
    typed = config_of([*here, *line.split()])
    assert (typed.steps, typed.envs, typed.env_options["time_limit"]) == (5, 3, 4)
    agent = typed.agent_config
    assert (agent.optimizer.learning_rate, agent.optimizer.warmup) == (1e-4, 8)
    assert agent.model == PRESETS["size1m"].agent_config.model


def test_a_file_changes_a_run_that_is_resumed(tmp_path: Path) -> None:
    config = RunConfig(agent="random", logdir=tmp_path, batch_size=7, seed=3)
    (tmp_path / "config.json").write_text(config.to_json())
    here = file_of(tmp_path / "run.json", json.dumps({"logdir": str(tmp_path), "batch_size": 8}))
    assert config_of(here) == config.changed({"batch_size": 8})
    assert config_of([*here, "--seed", "4"]).seed == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stesp: 5", "There is no setting 'stesp': did you mean 'steps'?"),
        ("replay: {capcity: 5}", "no setting 'replay.capcity': did you mean 'replay.capacity'?"),
        ("dreamer: {los: {horizon: 5}}", "There is no setting 'dreamer.los'"),
        ("dreamer: {loss: {1: 5}}", "There is no setting 'dreamer.loss.1'"),
        ("buffer_size: 5", "did you mean 'replay.capacity'?"),
        ("agent: random\ndreamer: {model: 1m}", "There is no setting 'dreamer'"),
        ("steps: many", "steps=many is not valid: use a whole number, at least 0."),
        ("env_options: 3", "env_options=3 is not valid"),
        ("offline: runs/a", "offline=runs/a is not valid: use a list"),
        ("agent: 5", "There is no agent '5'"),
        ("preset: atri", "There is no preset 'atri': did you mean 'atari'?"),
        ("steps: [", "run.yaml is not valid: while parsing"),
        ("- steps", "run.yaml is not valid: write a setting and its value in each line."),
        ("", "run.yaml is not valid: write a setting"),
    ],
)
def test_a_mistake_in_a_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    assert main(["train", *file_of(tmp_path / "run.yaml", text)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_file_that_is_no_file_leads_to_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "atari"]) == 2
    assert "No such file or directory. Presets are chosen with --preset." in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["yaml", "json"])
@pytest.mark.parametrize(
    ("values", "typed"),
    [
        ({"task": f"{RAN}:make"}, ["--task", f"{RAN}:make"]),
        ({"agent": f"{RAN}:AGENT"}, ["--agent", f"{RAN}:AGENT"]),
        ({"outputs": [f"{RAN}:Output"]}, ["--outputs", f"{RAN}:Output"]),
        (
            {"dreamer": {"model": {"encoder": f"{RAN}:Encoder"}}},
            ["--dreamer.model.encoder", f"{RAN}:Encoder"],
        ),
        ({"dreamer.loss.extra": {f"{RAN}:Loss": 0.1}}, ["--dreamer.loss.extra", f"{RAN}:Loss=0.1"]),
        (
            {"dreamer": {"execution": {"cache_dir": "/tmp/theirs"}}},
            ["--dreamer.execution.cache-dir", "/tmp/theirs"],
        ),
        ({"ray_address": "far:1"}, ["--ray-address", "far:1"]),
    ],
    ids=["task", "agent", "outputs", "network", "loss", "folder", "cluster"],
)
def test_a_file_chooses_no_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    typed: list[str],
    kind: str,
) -> None:
    (tmp_path / f"{RAN}.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    here = file_of(tmp_path / f"run.{kind}", json.dumps(values))
    for more in ([], ["--set", "own.hats=5"], ["--own.hats", "5"]):
        assert main(["train", *here, *more]) == 2
        said = capsys.readouterr().err
        if not more or "agent" in values:
            assert f"add {' '.join(typed)}, or --trust" in said
    assert RAN not in sys.modules
    if "agent" not in values:  # which would be imported
        path = typed[0].removeprefix("--").replace("-", "_")
        for more in (typed, ["--trust"]):
            named = {each.path: each.value for each in config_of([*here, *more]).settings()}
            assert typed[1].partition("=")[0] in str(named[path])
