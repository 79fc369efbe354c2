"""Datasets of Minari become steps that are aligned, and steps become datasets without loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import gymnasium
import numpy as np
import pytest

from dreamfleet import ConfigError, Space
from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.datasets import dataset_source, is_dataset, write_dataset
from dreamfleet.offline import check_sources, copy_steps, find_source
from dreamfleet.policy import BLUEPRINT, Blueprint
from dreamfleet.replay import Replay
from dreamfleet.replay.reading import replay_directories, stored_episodes
from dreamfleet.training import configure


@pytest.fixture(autouse=True)
def folders_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.fixture
def minari() -> Any:
    reason = "Minari is not installed: pip install 'dreamfleet[datasets]'"
    pytest.importorskip("h5py", reason=reason)
    return pytest.importorskip("minari", reason=reason)


def collected(logdir: Path, obs: dict[str, Space], act: dict[str, Space]) -> list[dict[str, Any]]:
    """A run whose replay holds three episodes, the last one cut short; returns them."""
    rng = np.random.default_rng(0)
    agent = RandomAgent(obs, act)
    config = RunConfig(task="bundled:dummy", agent="random", env_options={"size": (16, 16)})
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(logdir / "ckpt" / "agent").save(parts, step=9)
    episodes = []
    with Replay(4, 1000, logdir / "replay", chunk=8) as replay:
        for number, (length, terminal) in enumerate(((7, True), (12, False), (5, False))):
            spaces = {**agent.obs_space, **agent.act_space}
            rows: dict[str, Any] = {key: s.sample(rng, length) for key, s in spaces.items()}
            at = np.arange(length)
            last = (at == length - 1) & (number < 2)
            rows |= {"is_first": at == 0, "is_last": last, "is_terminal": last & terminal}
            rows["reward"] = np.where(at == 0, 0, rng.standard_normal(length)).astype(np.float32)
            replay.add_batch(rows, [0] * length)
            episodes.append(rows)
    return episodes


def test_the_round_trip_is_exact(minari: Any, tmp_path: Path) -> None:
    act = {key: space for key, space in worlds.ACTIONS.items() if key != "reset"}
    episodes = collected(tmp_path / "run", worlds.MIXED, act)
    folders = replay_directories(tmp_path / "run")
    assert write_dataset(tmp_path / "run", tmp_path / "set", folders, "a/b-v0") == (3, 21)
    replay, blueprint = dataset_source(tmp_path / "set")
    assert blueprint.config.task == "bundled:dummy"
    assert blueprint.config.env_options == {"size": (16, 16)}
    assert blueprint.obs_space == worlds.MIXED
    assert blueprint.act_space == act
    back = list(reversed(stored_episodes([replay])))
    assert [each.ends for each in back] == [True, True, True]  # what was cut short is truncated
    for before, episode in zip(episodes, back, strict=True):
        after = episode.read()
        for key in (*worlds.MIXED, *act):
            kept = slice(None, -1) if key in act or key == "is_last" else slice(None)
            assert after[key].dtype == before[key].dtype
            np.testing.assert_array_equal(after[key][kept], before[key][kept], err_msg=key)
    # Others read it, too: one observation more than actions.
    whole = minari.MinariDataset(tmp_path / "set" / "data")
    (first, *_) = whole.iterate_episodes()
    assert len(first.observations["vector"]) == len(first.actions["move"]) + 1 == 7
    np.testing.assert_array_equal(first.observations["image"], episodes[0]["image"])
    np.testing.assert_array_equal(first.rewards, episodes[0]["reward"][1:])
    with pytest.raises(ConfigError, match="holds a dataset already"):
        write_dataset(tmp_path / "run", tmp_path / "set", folders, "a/b-v0")


def foreign(minari: Any, folder: Path, task: str = "Pendulum-v1", length: int = 6) -> Path:
    """A dataset as others write it, in which every number says which step it is of."""
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    box = gymnasium.spaces.Box
    folder.mkdir(parents=True)
    storage = MinariStorage.new(
        folder / "data", box(-100, 100, (2,)), box(0.0, 10.0, (1,)), gymnasium.spec(task)
    )
    for end in (True, False):
        at = np.arange(length, dtype=np.float32)
        last = at == length - 1
        storage.update_episodes(
            [
                EpisodeBuffer(
                    observations=np.stack([np.arange(length + 1)] * 2, 1).astype(np.float32),
                    actions=at[:, None],
                    rewards=at + 0.5,
                    terminations=last & end,
                    truncations=last & (not end),
                    infos={},
                )
            ]
        )
    storage.update_metadata({"dataset_id": "x/y-v0", "minari_version": minari.__version__})
    return folder


@pytest.mark.parametrize("how", ["folder", "file", "name"])
def test_actions_stand_beside_the_observations_they_were_taken_at(
    minari: Any, tmp_path: Path, how: str
) -> None:
    folder = foreign(minari, tmp_path / "minari" / "x" / "y-v0")
    path = {"folder": folder, "file": folder / "data" / "main_data.hdf5", "name": "minari:x/y-v0"}
    source = find_source(path[how])  # type: ignore[arg-type]
    assert source.blueprint.config.task == "gym:Pendulum-v1"
    for episode, terminal in zip(stored_episodes(source.directories), (False, True), strict=True):
        rows = episode.read()
        np.testing.assert_array_equal(rows["vector"][:, 0], [0, 1, 2, 3, 4, 5, 6])
        # From 0..10 to -1..1; the last one was never taken.
        expected = [-1, -0.8, -0.6, -0.4, -0.2, 0, 0]
        np.testing.assert_allclose(rows["action"][:, 0], expected, atol=1e-6)
        np.testing.assert_array_equal(rows["reward"], [0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
        np.testing.assert_array_equal(np.flatnonzero(rows["is_first"]), [0])
        np.testing.assert_array_equal(np.flatnonzero(rows["is_last"]), [6])
        assert rows["is_terminal"].tolist() == [False] * 6 + [terminal]


def test_a_run_begins_with_a_dataset(minari: Any, tmp_path: Path) -> None:
    """What the agent stores with a step is zero, as at the start of an episode."""
    folder = foreign(minari, tmp_path / "set")
    config = RunConfig(
        task="gym:Pendulum-v1",
        logdir=tmp_path / "run",
        prefill=(str(folder),),
        agent_config=worlds.config(),
        batch_length=4,
        report_length=4,
    )
    check_sources(config)
    with Replay(config.window, 100, chunk=config.replay.chunk) as replay:
        copy_steps(replay, config)
        assert len(replay) > 0
        rows = replay.sample(2)
    assert not rows["dyn/deter"].any()
    assert rows["dyn/deter"].shape[-1] == config.agent_config.model.deter
    with pytest.raises(ConfigError, match="another task"):
        check_sources(config.changed({"task": "gym:Acrobot-v1"}))


def test_a_dataset_is_converted_once(minari: Any, tmp_path: Path) -> None:
    folder = foreign(minari, tmp_path / "set")
    first, _ = dataset_source(folder)
    marked = first / "mark"
    marked.touch()
    assert (dataset_source(folder)[0] / "mark").exists()
    again, _ = dataset_source(foreign(minari, tmp_path / "other", length=3))
    assert again != first
    assert len(list(first.parent.iterdir())) == 2  # and nothing that was written aside


def test_the_command_and_the_settings(
    minari: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    act = {"move": worlds.ACTIONS["move"]}
    collected(tmp_path / "run", worlds.VECTOR, act)
    assert main(["dataset", "export", str(tmp_path / "run"), "--out", "set"]) == 0
    said = capsys.readouterr().out
    assert main(["dataset", str(tmp_path / "run")]) == 2
    assert "is not valid: use one of export." in capsys.readouterr().err
    assert "3 episodes with 21 actions are in set" in said
    config = configure({"offline": ["set"]})
    assert (config.task, config.logdir) == ("bundled:dummy", Path("set-offline"))
    foreign(minari, tmp_path / "minari" / "x" / "y-v0")
    config = configure({"offline": ["minari:x/y-v0"]})
    assert (config.task, config.logdir) == ("gym:Pendulum-v1", Path("runs/x/y-v0-offline"))


def test_what_cannot_be_read_is_refused(
    minari: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = foreign(minari, tmp_path / "set")
    path = folder / "data" / "metadata.json"
    metadata = json.loads(path.read_text())

    def changed(**changes: Any) -> None:
        kept = {**metadata, **changes}
        path.write_text(json.dumps({k: v for k, v in kept.items() if v is not None}))

    changed(action_space=None)
    with pytest.raises(ConfigError, match="does not name its spaces"):
        find_source(folder)
    changed(env_spec=None)
    with pytest.raises(ConfigError, match="does not name its environment"):
        find_source(folder)
    changed()
    import h5py

    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1/actions"]
        file["episode_1/actions"] = np.zeros((7, 1), np.float32)
    with pytest.raises(ConfigError, match=r"Episode 1 .* damaged"):
        find_source(folder)
    for text in ("{", "[]", json.dumps({**metadata, "dreamfleet": "{", "env_spec": "{"})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"cannot be used \("):
            find_source(folder)
    changed()
    (folder / "data" / "main_data.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(ConfigError, match=r"cannot be used \("):
        find_source(folder)
    with pytest.raises(ConfigError, match="holds no replay and is no Minari dataset"):
        find_source(tmp_path)
    monkeypatch.setattr(minari, "download_dataset", lambda _: 1 / 0)
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        find_source("minari:none/such-v0")


def test_without_minari_a_dataset_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert is_dataset("minari:a/b-v0")
    assert main(["train", "--offline", "minari:a/b-v0"]) == 1
    assert "dreamfleet[datasets]" in capsys.readouterr().err
