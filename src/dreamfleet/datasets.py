"""Datasets of Minari: read as the steps of a run, and written from a run.

Minari stores T + 1 observations and T actions of an episode; rewards and ends belong to actions. A
step here is an observation with the reward and the ends that came with it, and the action that was
taken there. So action t stands beside observation t, reward t beside observation t + 1, and the
last observation has an action of zeros that was never taken.

A dataset is converted once, into a folder of the user's cache, which is a replay like any other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dreamfleet.config import RunConfig
from dreamfleet.envs.base import RESERVED, Arrays, Spaces
from dreamfleet.envs.gym import GymTranslation
from dreamfleet.envs.wrappers import affine_actions
from dreamfleet.errors import ConfigError, DreamfleetError, first_line, import_extra
from dreamfleet.files import folder_aside
from dreamfleet.policy import Blueprint, read_blueprint
from dreamfleet.replay import Replay
from dreamfleet.replay.reading import StoredEpisode, replay_directories, stored_episodes
from dreamfleet.spaces import FLAGS, Space, spaces_from_json, spaces_to_json

PREFIX = "minari:"
_OURS = "dreamfleet"
"""The entry of the metadata that says which run a dataset is of."""
_STREAMS = 8
"""Episodes follow each other in so many streams, as those of environments do."""
_METADATA = "metadata.json"


def is_dataset(path: Path | str) -> bool:
    """Whether a source of steps is a dataset, and no run."""
    return str(path).startswith(PREFIX) or _data_folder(Path(path)) is not None


def _data_folder(path: Path) -> Path | None:
    """Where a local dataset's data lies: its folder, the folder `data` in it, or its HDF5 file."""
    places = (path / "data", path, path.parent if path.suffix in (".hdf5", ".h5") else path)
    return next((each for each in places if (each / _METADATA).is_file()), None)


def dataset_source(path: Path | str) -> tuple[Path, Blueprint]:
    """The replay that a dataset was converted into, and what its steps are.

    Args:
        path: `minari:ID`, which is downloaded if it is not there, or a local dataset.

    Raises:
        ConfigError: The dataset cannot be used.
        MissingExtraError: Minari is not installed.
    """
    try:
        return _source(_found(str(path)), path)
    except DreamfleetError:
        raise
    except Exception as error:  # of a damaged file, in any package that takes part
        raise ConfigError(
            f"{path} cannot be used ({first_line(error)}): it is damaged, or not a Minari dataset."
        ) from error


def _source(folder: Path, path: Path | str) -> tuple[Path, Blueprint]:
    raw = json.loads((folder / _METADATA).read_text())
    if not {"observation_space", "action_space"} <= raw.keys():
        # Minari would import and make the environment that the file names.
        raise ConfigError(f"{path} does not name its spaces: use a dataset of a newer Minari.")
    storage = _minari("minari.dataset.minari_storage").MinariStorage.read(folder)
    reader = _Reader(storage, raw, str(path))
    described = RunConfig(task=reader.task, agent="random", env_options=reader.env_options)
    blueprint = Blueprint(described, reader.obs_space, reader.act_space, {})
    files = sorted(each for each in folder.iterdir() if each.is_file())
    marks = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    key = repr((2, str(folder.resolve()), marks))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "dreamfleet" / "datasets" / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not target.is_dir():
        with folder_aside(target) as made, Replay(1, max(reader.steps, 1), made) as replay:
            for number, rows in enumerate(reader.episodes()):
                replay.add_batch(rows, [number % _STREAMS] * len(rows["reward"]))
    return target, blueprint


def _found(path: str) -> Path:
    """The folder of a dataset's data."""
    if not path.startswith(PREFIX):
        folder = _data_folder(Path(path))
        assert folder is not None
        return folder
    name = path.removeprefix(PREFIX)
    roots = _minari("minari.storage.datasets_root_dir")
    folder = Path(roots.get_dataset_path(name)) / "data"
    if not folder.is_dir():
        try:
            _minari("minari").download_dataset(name)
        except Exception as error:  # of the network, or of any package that takes part
            raise ConfigError(
                f"{path} is not on this machine and cannot be downloaded ({first_line(error)}): "
                "check its name in 'minari list remote', or name a local folder."
            ) from error
    return folder


def _minari(module: str) -> Any:
    import_extra("h5py", "Datasets", "datasets")
    return import_extra(module, "Datasets", "datasets")


class _Reader:
    """The episodes of a dataset as steps of a run."""

    def __init__(self, storage: Any, raw: Mapping[str, Any], path: str) -> None:
        self._storage, self._path = storage, path
        self.steps = int(storage.total_steps) + int(storage.total_episodes)
        self._spaces = storage.observation_space, storage.action_space
        self._ours = json.loads(raw[_OURS]) if _OURS in raw else None
        if self._ours:
            self.task, self.env_options = self._ours["task"], self._ours["env_options"]
            self.obs_space = spaces_from_json(self._ours["obs_space"])
            self.act_space = spaces_from_json(self._ours["act_space"])
            return
        spec = json.loads(raw.get("env_spec") or "{}")
        if "id" not in spec:
            raise ConfigError(f"{path} does not name its environment: use another dataset.")
        self.task, self.env_options = f"gym:{spec['id']}", {}
        self._translation = GymTranslation(*self._spaces, batched=True)
        self._native = self._translation.act_space
        ends, _ = affine_actions(self._native)
        self._bounds = {
            key: (to(-np.ones(self._native[key].shape)), to(np.ones(self._native[key].shape)))
            for key, to in ends.items()
        }
        self.obs_space = {**self._translation.obs_space, **RESERVED}
        self.act_space = {
            key: Space(np.float32, space.shape, -1, 1) if key in self._bounds else space
            for key, space in self._native.items()
        }

    def episodes(self) -> Iterable[Arrays]:
        for episode in self._storage.get_episodes(range(self._storage.total_episodes)):
            rewards = np.asarray(episode["rewards"], np.float32)
            count = len(rewards) + 1
            rows = self._observations(episode["observations"])
            for key, value in self._actions(episode["actions"]).items():
                rows[key] = np.concatenate([value, np.zeros_like(value[:1])])
            if any(len(value) != count for value in rows.values()):
                raise ConfigError(
                    f"Episode {episode['id']} of {self._path} has {count - 1} rewards, but not "
                    f"{count - 1} actions and {count} observations: the dataset is damaged."
                )
            ended = np.zeros(count, bool)
            ended[-1] = True
            terminal = ended & bool(np.asarray(episode["terminations"])[-1])
            yield {
                **rows,
                "reward": np.concatenate([np.zeros(1, np.float32), rewards]),
                "is_first": np.arange(count) == 0,
                "is_last": ended,
                "is_terminal": terminal,
            }

    def _observations(self, values: Any) -> Arrays:
        if self._ours:
            return _by_key(values, self.obs_space)
        return self._translation.observe(values)

    def _actions(self, values: Any) -> Arrays:
        if self._ours:
            return _by_key(values, self.act_space)
        found: Arrays = {}
        for key, space in self._native.items():
            value, native = values, self._spaces[1]
            for name in (
                () if key == "action" and not isinstance(values, Mapping) else key.split("/")
            ):
                value, native = value[name], native[name]
            array = np.asarray(value).reshape(-1, *space.shape)
            if key in self._bounds:
                low, high = self._bounds[key]
                half = np.where(high > low, (high - low) / 2, 1.0)
                found[key] = np.clip((array - (low + high) / 2) / half, -1, 1).astype(np.float32)
            else:
                start = getattr(native, "start", native.low if hasattr(native, "low") else 0)
                found[key] = (array - start).astype(space.dtype)
        return found


def _by_key(values: Any, spaces: Mapping[str, Space]) -> Arrays:
    """Columns of a dataset that this package has written: a single key has no name."""
    kept = {key: space for key, space in spaces.items() if key not in FLAGS}
    named = values if isinstance(values, Mapping) else {next(iter(kept)): values}
    return {key: np.asarray(named[key]).astype(space.dtype) for key, space in kept.items()}


# --- writing --------------------------------------------------------------------------------------


def dataset(
    action: Literal["export"],  # noqa: ARG001 - the only one
    logdir: Path,
    /,
    out: Path = Path("dataset"),
    name: str = "",
) -> str:
    """Write the steps of a run as a Minari dataset.

    'train --offline' and 'train --prefill' read the folder, and other programs read it with
    minari.MinariDataset(DIR/data).

    Args:
        action: export, the only action.
        logdir: The run's directory.
        out: The folder to write.
        name: The dataset's id, such as cartpole/mine-v0; named after the run if not given.
    """
    named = name or f"dreamfleet/{logdir.absolute().name}-v0"
    episodes, actions = write_dataset(logdir, out, replay_directories(logdir), named)
    return f"{episodes:,} episodes with {actions:,} actions are in {out}"


def write_dataset(run: Path, out: Path, directories: Iterable[Path], name: str) -> tuple[int, int]:
    """Write the episodes of a run's replay as a dataset; returns how many episodes and actions.

    Nothing is lost: images are stored as they are, where Minari by itself takes JPEG. An episode
    whose beginning is no longer in the replay is left out, and one that was cut short is truncated.
    """
    blueprint = read_blueprint(run)
    if blueprint is None:
        raise ConfigError(f"{run} has no checkpoint, which describes its steps: train longer.")
    if (out / "data").exists():
        raise ConfigError(f"{out} holds a dataset already: choose another --out.")
    storages, buffers = _minari("minari.dataset.minari_storage"), _minari("minari.data_collector")
    obs_space = {k: s for k, s in blueprint.obs_space.items() if k not in FLAGS}
    act_space = dict(blueprint.act_space)
    newest = 1 << 62
    episodes = [
        e for e in reversed(stored_episodes(directories, newest)) if e.begins and e.length > 1
    ]
    if not episodes:
        raise ConfigError(
            f"The replay of {run} holds no episode with its first step: train longer."
        )
    with folder_aside(out / "data") as made:
        storage = storages.MinariStorage.new(
            made.absolute(), _gym_space(obs_space), _gym_space(act_space), jpeg_encoding=False
        )
        kept = (obs_space, act_space)
        storage.update_episodes(_buffer(buffers.EpisodeBuffer, each, *kept) for each in episodes)
        about = {
            "task": blueprint.config.task,
            "env_options": dict(blueprint.config.env_options),
            "obs_space": spaces_to_json(blueprint.obs_space),
            "act_space": spaces_to_json(act_space),
        }
        version = _minari("minari").__version__
        storage.update_metadata(
            {"dataset_id": name, "minari_version": version, _OURS: json.dumps(about)}
        )
    return len(episodes), sum(each.length - 1 for each in episodes)


def _buffer(make: Any, episode: StoredEpisode, obs_space: Spaces, act_space: Spaces) -> Any:
    rows = episode.read(keys=[*obs_space, *act_space, *FLAGS])
    count = episode.length - 1
    ends = np.arange(count) == count - 1
    terminal = ends & bool(rows["is_terminal"][-1])
    return make(
        observations=_unnamed({key: rows[key] for key in obs_space}),
        actions=_unnamed({key: rows[key][:-1] for key in act_space}),
        rewards=rows["reward"][1:],
        terminations=terminal,
        truncations=ends & ~terminal,
        infos={},
    )


def _unnamed(columns: Arrays) -> Any:
    return columns if len(columns) > 1 else next(iter(columns.values()))


def _gym_space(spaces: Mapping[str, Space]) -> Any:
    """The spaces as Gymnasium has them, a single one without a name."""
    from gymnasium import spaces as gym

    def one(space: Space) -> Any:
        if space.discrete and not space.image and not space.low.any():
            if not space.shape:
                return gym.Discrete(int(space.high))
            if space.dtype.kind == "i":
                return gym.MultiDiscrete(space.high.astype(np.int64))
        dtype = np.uint8 if space.dtype.kind == "b" else space.dtype
        high = space.high - space.discrete
        return gym.Box(space.low.astype(dtype), high.astype(dtype), space.shape, dtype)

    made = {key: one(space) for key, space in spaces.items()}
    return gym.Dict(made) if len(made) > 1 else next(iter(made.values()))
