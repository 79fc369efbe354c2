"""`dreamfleet pull user/name`."""

from __future__ import annotations

from pathlib import Path

from dreamfleet.cli.console import say
from dreamfleet.hub import pull as download


def pull(repository: str, /, out: Path | None = None) -> None:
    """Download a trained policy from the Hugging Face Hub.

    Only data is downloaded. 'dreamfleet eval' and Policy.load take the directory; they import code
    outside of Dreamfleet only if you name or trust it.

    Args:
        repository: At the Hub, as user/name.
        out: The directory to make; runs/name if not given.
    """
    made = download(repository, out or Path("runs") / repository.partition("/")[2])
    say(f"The policy is in {made}: dreamfleet eval {made}")
