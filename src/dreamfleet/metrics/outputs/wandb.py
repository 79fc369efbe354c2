"""Weights & Biases."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.errors import import_extra
from dreamfleet.metrics.frames import as_frames, encode_gif
from dreamfleet.metrics.outputs.base import EVAL_STEP, Output, kind_of


class WandbOutput(Output):
    """Scalars, histograms, images, videos and text.

    Args:
        fps: Of videos.
        init: Passed to `wandb.init`: project, name, dir, id, config and so on. An `id` with
            `resume="allow"` lets a resumed run continue there.
    """

    def __init__(self, *, fps: float = 20, **init: Any) -> None:
        self._wandb: Any = import_extra("wandb", "Logs in Weights & Biases", "wandb")
        self._run = self._wandb.init(**init)
        self._fps = fps
        self._step = int(getattr(self._run, "step", 0))  # where a resumed run is
        self._own_axis = False

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="dreamfleet-wandb-") as folder:
            row = {}
            for number, (key, value) in enumerate(metrics.items()):
                converted = self._convert(value, Path(folder) / f"{number}.gif")
                if converted is not None:
                    row[key] = converted
            if EVAL_STEP in row and not self._own_axis:
                self._own_axis = True
                self._run.define_metric("eval/*", step_metric=EVAL_STEP)
            # The package drops rows of earlier steps, and an evaluation belongs to the step at
            # which it began: it is drawn over a step of its own.
            self._step = max(self._step, step)
            # Logged inside the block: the package copies files while it logs them.
            if row:
                self._run.log(row, step=self._step)

    def _convert(self, value: Any, path: Path) -> Any:
        kind = kind_of(value)
        if kind == "scalar":
            return float(value)
        if kind == "histogram":
            values = np.asarray(value, np.float64)
            # A single NaN would make the package refuse the whole row.
            finite = values[np.isfinite(values)]
            return self._wandb.Histogram(finite) if finite.size else None
        if kind == "image":
            return self._wandb.Image(as_frames(value))
        if kind == "video":
            # Given as a file, because from an array the package needs moviepy.
            path.write_bytes(encode_gif(as_frames(value), self._fps))
            return self._wandb.Video(str(path), format="gif")
        return value if kind == "text" else None

    def close(self) -> None:
        self._run.finish()
