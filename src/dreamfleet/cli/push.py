"""`dreamfleet push LOGDIR user/name`."""

from __future__ import annotations

from pathlib import Path

from dreamfleet.checkpoint import Which
from dreamfleet.cli.console import say
from dreamfleet.errors import ConfigError
from dreamfleet.hub import push as upload


def push(
    words: tuple[str, ...],
    /,
    best: bool = False,
    video: Path | None = None,
    private: bool = False,
) -> None:
    """Upload a trained policy to the Hugging Face Hub, with a model card.

    What is uploaded: the checkpoint, the settings, scores and evaluations, a curve, and a video if
    there is one. Log in with 'hf auth login' first.

    Args:
        words: A run's directory or one checkpoint, and the repository as user/name.
        best: Take the checkpoint with the best evaluation score instead of the newest.
        video: An MP4 to show; the run's newest one if not given.
        private: Make a repository that others do not see.
    """
    if len(words) != 2:
        raise ConfigError("Name the run and the repository: dreamfleet push LOGDIR user/name.")
    which: Which = "best" if best else "latest"
    say(upload(Path(words[0]), words[1], which=which, video=video, private=private))
