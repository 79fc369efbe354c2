"""TensorBoard event files, without TensorFlow."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.errors import import_extra
from dreamfleet.metrics.frames import as_frames, encode_gif, encode_png
from dreamfleet.metrics.outputs.base import kind_of


class TensorBoardOutput:
    """Scalars, histograms, images, videos (as animated GIFs) and text.

    Args:
        directory: Where event files go.
        settings: Hyperparameters of the run, by their path, for TensorBoard's page of them.
        results: Keys of the metrics that this page shows next to them.
        fps: Of videos.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        settings: Mapping[str, Any] | None = None,
        results: Sequence[str] = ("eval/score", "episode/score"),
        fps: float = 20,
    ) -> None:
        tensorboard: Any = import_extra("tensorboardX", "TensorBoard files", "tensorboard")
        messages: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._summary = messages.Summary
        self._writer = tensorboard.SummaryWriter(str(directory))
        self._fps = fps
        if settings is not None:
            module: Any = importlib.import_module("tensorboardX.summary")
            plain = {
                key: value if isinstance(value, bool | int | float) else str(value)
                for key, value in settings.items()
            }
            # Into this very file: the package's own way makes a directory, and so a second run.
            for summary in module.hparams(plain, dict.fromkeys(results)):
                self._writer.file_writer.add_summary(summary)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for key, value in metrics.items():
            kind = kind_of(value)
            if kind == "scalar":
                self._writer.add_scalar(key, float(value), step)
            elif kind == "histogram":
                finite = np.asarray(value, np.float64)
                finite = finite[np.isfinite(finite)]
                if finite.size:
                    self._writer.add_histogram(key, finite, step)
            elif kind == "image":
                image = as_frames(value)
                self._add_picture(key, image.shape, encode_png(image), step)
            elif kind == "video":
                video = as_frames(value)
                self._add_picture(key, video.shape[1:], encode_gif(video, self._fps), step)
            elif kind == "text":
                self._writer.add_text(key, value, step)

    def _add_picture(self, key: str, shape: tuple[int, ...], data: bytes, step: int) -> None:
        # The package's own way to write videos needs moviepy.
        height, width, channels = shape
        picture = self._summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=data
        )
        summary = self._summary(value=[self._summary.Value(tag=key, image=picture)])
        self._writer.file_writer.add_summary(summary, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
