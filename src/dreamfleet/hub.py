"""Trained policies on the Hugging Face Hub: what is uploaded, its model card, and the way back.

Only data goes in both directions: a checkpoint (safetensors and JSON), settings, scores, pictures.
Nothing that was downloaded is imported or executed; `Policy.load` decides about code that a
checkpoint names.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.checkpoint import Checkpoint, Which
from dreamfleet.errors import (
    ConfigError,
    DreamfleetError,
    MetricsError,
    first_line,
    import_extra,
)
from dreamfleet.files import atomic_write, temporary_folder
from dreamfleet.metrics.evaluations import FILE_NAME
from dreamfleet.metrics.outputs.jsonl import read_jsonl
from dreamfleet.plotting import draw, read_panels
from dreamfleet.policy import BLUEPRINT, Blueprint, find_checkpoint, run_of

_REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_DATA = ["*.json", "*.jsonl", "*.safetensors", "*.md", "*.mp4", "*.png"]
"""Files that are downloaded: none that any program would execute."""


class HubError(DreamfleetError):
    """The Hub has refused something, or cannot be reached."""


def push(
    path: Path,
    repository: str,
    *,
    which: Which = "latest",
    video: Path | None = None,
    private: bool = False,
) -> str:
    """Upload a run's policy with its card; returns where it is.

    Args:
        path: A run's directory, or one checkpoint.
        repository: `user/name`, which is made if it does not exist.
        which: The newest checkpoint, or the one with the best evaluation score.
        video: Shown on the page; the run's newest MP4 if not given.
        private: Make a repository that others do not see.

    Raises:
        ConfigError: There is no checkpoint or no such video, or no such name is possible.
        MissingExtraError: The Hub's client is not installed.
        HubError: The Hub refuses it.
    """
    if video is not None and not video.is_file():
        raise ConfigError(f"{video} does not exist: name an MP4 file, or leave --video out.")
    api = _client(repository).HfApi()
    with temporary_folder("dreamfleet-push-") as folder:
        stage(path, repository, folder, which=which, video=video)
        return str(
            _asked(lambda: _upload(api, repository, folder, private), f"{repository} at the Hub")
        )


def _upload(api: Any, repository: str, folder: Path, private: bool) -> Any:
    address = api.create_repo(repository, private=private or None, exist_ok=True)
    api.upload_folder(
        repo_id=repository,
        folder_path=str(folder),
        commit_message="Upload with Dreamfleet",
        delete_patterns=["ckpt/*"],  # of an older version
    )
    return address


def pull(repository: str, out: Path) -> Path:
    """Download a policy into a directory, which `Policy.load` and `dreamfleet eval` take.

    Raises:
        ConfigError: The directory exists, or what was downloaded holds no checkpoint.
        CheckpointError: The checkpoint is damaged.
        MissingExtraError: The Hub's client is not installed.
        HubError: The Hub has no such repository, or cannot be reached.
    """
    client = _client(repository)
    if out.exists():
        raise ConfigError(f"{out} exists already: choose another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.pulling")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _asked(
            lambda: client.snapshot_download(
                repository, local_dir=str(aside), allow_patterns=_DATA
            ),
            f"{repository} at the Hub",
        )
        find_checkpoint(aside)  # whose checksums are compared
        shutil.rmtree(aside / ".cache", ignore_errors=True)  # the client's own notes
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _client(repository: str) -> Any:
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(f"{repository!r} is no name at the Hub: write user/name.")
    return import_extra("huggingface_hub", "Uploads and downloads", "hub")


def _asked(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except Exception as error:  # of the network, or of any package that takes part
        raise HubError(
            f"{what} failed: {first_line(error)}. Check the name and the network, and log in with "
            "'hf auth login'."
        ) from error


def stage(
    path: Path,
    repository: str,
    folder: Path,
    *,
    which: Which = "latest",
    video: Path | None = None,
) -> None:
    """Write what is uploaded into an empty folder."""
    snapshot, run = find_checkpoint(path, which=which), run_of(path)
    blueprint = Blueprint.load(snapshot.parts[BLUEPRINT])
    # Where the run was kept says something about its owner, and nothing about the policy.
    config = replace(blueprint.config, logdir=Path(repository.partition("/")[2]))
    parts = {
        "agent": snapshot.parts["agent"],
        BLUEPRINT: replace(blueprint, config=config).save(),
    }
    Checkpoint(folder / "ckpt" / "agent").save(parts, step=snapshot.step, score=snapshot.score)
    atomic_write(folder / "config.json", config.to_json())
    for name in ("scores.jsonl", FILE_NAME):
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    with suppress(MetricsError, ConfigError, ImportError):  # no scores, or no matplotlib
        draw(read_panels([run]), folder / "curve.png")
    videos = sorted(run.rglob("*.mp4"), key=lambda each: each.stat().st_mtime)
    if chosen := video or (videos[-1] if videos else None):
        shutil.copyfile(chosen, folder / "replay.mp4")
    (folder / "README.md").write_text(card(repository, blueprint, snapshot.step, folder))


def card(repository: str, blueprint: Blueprint, step: int, folder: Path) -> str:
    """The model card: metadata that the Hub reads, and how to use the policy."""
    config = blueprint.config
    rows = list(read_jsonl(folder / FILE_NAME)) if (folder / FILE_NAME).is_file() else []
    scored = [row for row in rows if row.get("returns")]
    metadata: dict[str, Any] = {
        "library_name": "dreamfleet",
        "tags": [
            *("reinforcement-learning", "deep-reinforcement-learning", "world-model"),
            *(["dreamerv3"] if config.agent == "dreamer" else []),
            config.task.partition(":")[2] or config.task,
        ],
    }
    result = ""
    if scored:
        returns = np.asarray(scored[-1]["returns"], np.float64)
        result = f"{returns.mean():.2f} +/- {returns.std():.2f}"
        metric = {"type": "mean_reward", "value": result, "name": "mean_reward", "verified": False}
        entry = {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"name": config.task, "type": config.task},
            "metrics": [metric],
        }
        metadata["model-index"] = [{"name": repository.partition("/")[2], "results": [entry]}]
    shown = f"{config.agent} after {step:,} steps of {config.task}"
    if result:
        count, how = len(scored[-1]["returns"]), scored[-1].get("protocol", "")
        shown += f": a mean return of {result} in {count} episodes ({how})"
    pictures = ["![curve](curve.png)"] if (folder / "curve.png").is_file() else []
    # JSON is YAML, and has no word that means something else unquoted.
    head = "\n".join(f"{key}: {json.dumps(value)}" for key, value in metadata.items())
    return "\n".join(
        [
            f"---\n{head}\n---\n\n# {repository}\n\n{shown}. Trained with Dreamfleet.\n",
            *pictures,
            "\n```sh",
            "pip install 'dreamfleet[hub]'",
            f"dreamfleet pull {repository}",
            f"dreamfleet eval runs/{repository.partition('/')[2]}",
            "```\n",
        ]
    )
