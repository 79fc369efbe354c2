"""Trained policies on the Hugging Face Hub: what is uploaded, its model card, and the way back.

Only data goes in both directions: a checkpoint (safetensors and JSON), settings, scores, pictures.
Nothing that was downloaded is imported or executed; `Policy.load` decides about code that a
checkpoint names.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.checkpoint import Checkpoint, Which
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError, DreamfleetError, MetricsError, first_line, import_extra
from dreamfleet.files import atomic_write, folder_aside, temporary_folder
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
    logdir: Path,
    repository: str,
    /,
    best: bool = False,
    video: Path | None = None,
    private: bool = False,
) -> str:
    """Upload a trained policy to the Hugging Face Hub, with a model card.

    What is uploaded: the checkpoint, the settings, scores and evaluations, a curve, and a video if
    there is one. Log in with 'hf auth login' first.

    Args:
        logdir: A run's directory, or one checkpoint.
        repository: At the Hub, as user/name; it is made if it does not exist.
        best: Take the checkpoint with the best evaluation score instead of the newest.
        video: An MP4 to show; the run's newest one if not given.
        private: Make a repository that others do not see.
    """
    if video is not None and not video.is_file():
        raise ConfigError(f"{video} does not exist: name an MP4 file, or leave --video out.")
    api = _client(repository).HfApi()
    with temporary_folder("dreamfleet-push-") as folder:
        _stage(logdir, repository, folder, "best" if best else "latest", video)
        with _asking(repository):
            address = api.create_repo(repository, private=private or None, exist_ok=True)
            api.upload_folder(
                repo_id=repository,
                folder_path=str(folder),
                commit_message="Upload with Dreamfleet",
                delete_patterns=["ckpt/*"],  # of an older version
            )
    return str(address)


def pull(repository: str, /, out: Path | None = None) -> str:
    """Download a trained policy from the Hugging Face Hub.

    Only data is downloaded. 'dreamfleet eval' and Policy.load take the directory; they import code
    outside of Dreamfleet only if you name or trust it.

    Args:
        repository: At the Hub, as user/name.
        out: The directory to make; runs/name if not given.
    """
    client = _client(repository)
    made = out or Path("runs") / repository.partition("/")[2]
    if made.exists():
        raise ConfigError(f"{made} exists already: choose another --out.")
    with folder_aside(made) as aside:
        with _asking(repository):
            client.snapshot_download(repository, local_dir=str(aside), allow_patterns=_DATA)
        find_checkpoint(aside)  # whose checksums are compared
        shutil.rmtree(aside / ".cache", ignore_errors=True)  # the client's own notes
    return f"The policy is in {made}: dreamfleet eval {made}"


def _client(repository: str) -> Any:
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(f"{repository!r} is not a repository of the Hub: write user/name.")
    return import_extra("huggingface_hub", "Uploads and downloads", "hub")


@contextmanager
def _asking(repository: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the network, or of any package that takes part
        raise HubError(
            f"{repository} at the Hub failed: {first_line(error)}. Check the name and the network, "
            "and log in with 'hf auth login'."
        ) from error


def _stage(path: Path, repository: str, folder: Path, which: Which, video: Path | None) -> None:
    """Write what is uploaded into an empty folder."""
    snapshot, run = find_checkpoint(path, which=which), run_of(path)
    blueprint = Blueprint.load(snapshot.parts[BLUEPRINT])
    # Where the run was kept says something about its owner, and nothing about the policy.
    config = replace(blueprint.config, logdir=Path(repository.partition("/")[2]), keys="")
    kept = replace(blueprint, config=config).save()
    parts = {"agent": snapshot.parts["agent"], BLUEPRINT: kept}
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
    (folder / "README.md").write_text(_card(repository, config, snapshot.step, folder))


def _card(repository: str, config: RunConfig, step: int, folder: Path) -> str:
    """The model card: metadata that the Hub reads, and how to use the policy."""
    name = repository.partition("/")[2]
    rows = list(read_jsonl(folder / FILE_NAME)) if (folder / FILE_NAME).is_file() else []
    scored = [row for row in rows if row.get("returns")]
    tags = ["reinforcement-learning", "deep-reinforcement-learning", "world-model"]
    tags += ["dreamerv3"] if config.agent == "dreamer" else []
    metadata: dict[str, Any] = {
        "library_name": "dreamfleet",
        "tags": [*tags, config.task.partition(":")[2] or config.task],
    }
    shown = f"{config.agent} after {step:,} steps of {config.task}"
    if scored:
        returns = np.asarray(scored[-1]["returns"], np.float64)
        result = f"{returns.mean():.2f} +/- {returns.std():.2f}"
        metric = {"type": "mean_reward", "value": result, "name": "mean_reward", "verified": False}
        entry = {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"name": config.task, "type": config.task},
            "metrics": [metric],
        }
        metadata["model-index"] = [{"name": name, "results": [entry]}]
        how = scored[-1].get("protocol", "")
        shown += f": a mean return of {result} in {len(returns)} episodes ({how})"
    # JSON is YAML, and has no word that means something else unquoted.
    head = "\n".join(f"{key}: {json.dumps(value)}" for key, value in metadata.items())
    picture = "![curve](curve.png)\n" if (folder / "curve.png").is_file() else ""
    return (
        f"---\n{head}\n---\n\n# {repository}\n\n{shown}. Trained with Dreamfleet.\n\n{picture}\n"
        "```sh\npip install 'dreamfleet[hub]'\n"
        f"dreamfleet pull {repository}\ndreamfleet eval runs/{name}\n```\n"
    )
