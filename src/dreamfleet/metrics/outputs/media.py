"""Images and videos as files that anything can show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamfleet.files import atomic_write
from dreamfleet.metrics.frames import as_frames, encode_png, write_video
from dreamfleet.metrics.outputs.base import Output, kind_of


class MediaOutput(Output):
    """Images as PNG; labelled videos as MP4, or GIF without an encoder: `DIRECTORY/KEY/STEP.mp4`.

    Args:
        directory: Made with the first file.
        keep: Number of newest files kept of each key.
    """

    def __init__(self, directory: Path | str, *, keep: int = 20) -> None:
        self._directory, self._keep = Path(directory), keep

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for key, value in metrics.items():
            kind = kind_of(value)
            if kind not in ("image", "video"):
                continue
            folder = self._folder(key)
            if kind == "image":
                atomic_write(folder / f"{step:012d}.png", encode_png(as_frames(value)))
            else:
                label = f"{key} step {step:,}"
                write_video(folder / f"{step:012d}", as_frames(value), label=label)
            for old in sorted(folder.glob("[0-9]*"))[: -self._keep]:
                old.unlink(missing_ok=True)

    def _folder(self, key: str) -> Path:
        """One directory for each key, whatever characters an agent or an environment uses in it."""
        return self._directory / (re.sub(r"[^\w.=-]+", "-", key).strip(".-") or "unnamed")
