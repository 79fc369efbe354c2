"""What is uploaded is whole, says nothing of its owner, and comes back as a policy."""

from __future__ import annotations

import fnmatch
import inspect
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import numpy as np
import pytest
import yaml

from dreamfleet import Policy
from dreamfleet.agents import Dreamer
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.hub import _stage
from dreamfleet.policy import BLUEPRINT, Blueprint
from dreamfleet.spaces import Space


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the Hub, with a client that takes the arguments we pass."""
    place = tmp_path / "hub"

    class HfApi:
        def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> str:
            (place / repo_id).mkdir(parents=True, exist_ok=exist_ok)
            return f"https://hub/{repo_id}"

        def upload_folder(
            self, *, repo_id: str, folder_path: str, commit_message: str, delete_patterns: list[str]
        ) -> None:
            for old in list((place / repo_id).rglob("*")):
                name = str(old.relative_to(place / repo_id))
                if old.is_file() and any(fnmatch.fnmatch(name, each) for each in delete_patterns):
                    old.unlink()
            shutil.copytree(folder_path, place / repo_id, dirs_exist_ok=True)

    def snapshot_download(repo_id: str, *, local_dir: str, allow_patterns: list[str]) -> str:
        if not (place / repo_id).is_dir():
            raise RuntimeError("404 Client Error\nmore")
        for path in (place / repo_id).rglob("*"):
            if path.is_file() and any(fnmatch.fnmatch(path.name, each) for each in allow_patterns):
                target = Path(local_dir) / path.relative_to(place / repo_id)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        return local_dir

    module = types.ModuleType("huggingface_hub")
    module.HfApi, module.snapshot_download = HfApi, snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return place


@pytest.fixture
def run(tmp_path: Path) -> Path:
    env = make_env("bundled:catch")
    logdir = tmp_path / "someones" / "run"
    config = RunConfig(task="bundled:catch", agent_config=worlds.config(), logdir=logdir)
    agent = Dreamer(env.obs_space, env.act_space, config.agent_config)
    for step in (5, 9):
        parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
        Checkpoint(logdir / "ckpt" / "agent").save(parts, step=step)
    (logdir / "config.json").write_text(config.to_json())
    (logdir / "scores.jsonl").write_text('{"step": 4, "episode/score": 1.0}\n')
    row = {"task": "bundled:catch", "step": 9, "returns": [1.0, 3.0], "protocol": "sampled"}
    (logdir / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    (logdir / "media").mkdir()
    (logdir / "media" / "000.mp4").write_bytes(b"video")
    return logdir


def test_a_policy_goes_there_and_back(
    hub: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "me/catch"]) == 0
    assert "https://hub/me/catch" in capsys.readouterr().out
    there = hub / "me" / "catch"
    names = {path.name for path in there.iterdir()}
    assert {"ckpt", "config.json", "README.md", "replay.mp4", "scores.jsonl"} <= names
    for path in there.rglob("*"):
        assert not path.is_file() or b"someones" not in path.read_bytes(), path
    (there / "evil.py").write_text("raise SystemExit")
    assert main(["pull", "me/catch"]) == 0
    assert not list(Path("runs/catch").rglob("*.py"))
    mine, theirs = Policy.load(run), Policy.load("runs/catch")
    assert theirs.step == 9
    rng = np.random.default_rng(0)
    obs = {key: space.sample(rng) for key, space in mine.obs_space.items()}
    np.testing.assert_equal(mine(obs)[0], theirs(obs)[0])
    assert main(["pull", "me/catch"]) == 2
    assert "exists already" in capsys.readouterr().err
    # A second upload leaves one checkpoint.
    assert main(["push", str(run), "me/catch"]) == 0
    assert len(list(there.rglob("manifest.json"))) == 1


def test_the_card_has_what_the_hub_reads(hub: Path, run: Path) -> None:
    assert main(["push", str(run), "me/catch"]) == 0
    _, head, text = (hub / "me" / "catch" / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata["library_name"] == "dreamfleet"
    assert {"reinforcement-learning", "dreamerv3", "catch"} <= set(metadata["tags"])
    (entry,) = metadata["model-index"][0]["results"]
    assert entry["metrics"][0]["type"] == "mean_reward"
    assert entry["metrics"][0]["value"] == "2.00 +/- 1.00"
    assert "dreamfleet pull me/catch" in text
    assert "dreamer after 9 steps of bundled:catch" in text


def test_a_download_that_cannot_be_used_leaves_nothing(
    hub: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "me/catch"]) == 0
    tensors = next((hub / "me" / "catch").rglob("*.safetensors"))
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 255
    tensors.write_bytes(data)
    assert main(["pull", "me/catch"]) == 1
    assert "damaged" in capsys.readouterr().err
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
    assert main(["pull", "me/none"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "me/none at the Hub failed: 404 Client Error. Check the name" in error


def test_code_that_a_download_names_is_not_imported(
    hub: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("evil_world.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    env = make_env("bundled:catch")
    config = RunConfig(task="evil_world:make", agent_config=worlds.config(), logdir=run)
    agent = Dreamer(env.obs_space, env.act_space, config.agent_config)
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(run / "ckpt" / "agent").save(parts, step=20)
    assert main(["push", str(run), "me/evil"]) == 0
    assert main(["pull", "me/evil"]) == 0
    capsys.readouterr()
    assert main(["eval", "runs/evil"]) == 2
    assert "evil_world:make" in capsys.readouterr().err
    assert Policy.load("runs/evil").step == 20, "a policy alone needs no environment"
    assert "evil_world" not in sys.modules


def test_what_cannot_work_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for words, code, sentence in (
        (["push", str(run), "me/catch"], 1, "dreamfleet[hub]"),
        (["push", str(run), "nobody"], 2, "write user/name"),
        (["push", str(run), "me/catch", "--video", "no.mp4"], 2, "no.mp4 does not exist"),
        (["push", str(run)], 2, "REPOSITORY is missing"),
        (["pull", "../etc/x"], 2, "write user/name"),
    ):
        assert main(words) == code
        assert sentence in capsys.readouterr().err


def test_the_client_takes_our_arguments() -> None:
    reason = "The Hub's client is not installed: pip install 'dreamfleet[hub]'"
    client: Any = pytest.importorskip("huggingface_hub", reason=reason)
    for function, given in (
        (client.HfApi.create_repo, {"private", "exist_ok"}),
        (
            client.HfApi.upload_folder,
            {"repo_id", "folder_path", "commit_message", "delete_patterns"},
        ),
        (client.snapshot_download, {"local_dir", "allow_patterns"}),
    ):
        assert given <= set(inspect.signature(function).parameters)


def test_an_upload_does_not_say_where_the_run_was_kept(tmp_path: Path) -> None:
    run, out = tmp_path / "secret" / "run", tmp_path / "out"
    out.mkdir()
    config = RunConfig(agent="random", logdir=run, keys=str(run / "keys"))
    space = {"x": Space(np.float32, (2,))}
    parts = {"agent": {"a": np.zeros(1)}, BLUEPRINT: Blueprint(config, space, space, {}).save()}
    Checkpoint(run / "ckpt" / "agent").save(parts, step=1)
    _stage(run, "ann/robot", out, "latest", None)
    texts = [each.read_text() for each in out.rglob("*.json")]
    assert texts
    assert not any("secret" in each for each in texts)
