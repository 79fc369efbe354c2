"""Experiment trackers: TensorBoard event files (without TensorFlow), Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import import_extra
from dreamfleet.files import atomic_write
from dreamfleet.metrics.frames import as_frames, encode_gif, encode_png
from dreamfleet.metrics.outputs.base import EVAL_STEP, Kind, Output, kind_of

_MAX_METRICS, _MAX_PARAMETERS, _MAX_TEXT = 1000, 100, 500
"""What a server of MLflow takes at once."""
_RESULTS = ("eval/score", "episode/score")
"""What TensorBoard shows next to the hyperparameters."""


def _by_kind(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Kind, Any]]:
    """Keys, kinds and values: a float, finite samples, uint8 frames, or text."""
    for key, value in metrics.items():
        kind = kind_of(value)
        if kind == "histogram":
            samples = np.asarray(value, np.float64)
            value = samples[np.isfinite(samples)]  # packages refuse NaN
            if not value.size:
                continue
        elif kind in ("image", "video"):
            value = as_frames(value)
        if kind is not None:
            yield key, kind, float(value) if kind == "scalar" else value


def _encoded(kind: Kind, frames: NDArray[np.uint8]) -> bytes:
    """A PNG, or an animated GIF: the packages' own ways to write videos need moviepy."""
    return encode_gif(frames) if kind == "video" else encode_png(frames)


class TensorBoardOutput(Output):
    """Scalars, histograms, images, videos (as animated GIFs) and text.

    Args:
        directory: Where event files go.
        settings: Hyperparameters of the run, by their path, for TensorBoard's page of them.
    """

    def __init__(self, directory: Path | str, *, settings: Mapping[str, Any] | None = None) -> None:
        tensorboard: Any = import_extra("tensorboardX", "TensorBoard files", "tensorboard")
        self._summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        self._writer = tensorboard.SummaryWriter(str(directory))
        if settings is not None:
            plain = {
                key: value if isinstance(value, bool | int | float) else str(value)
                for key, value in settings.items()
            }
            module: Any = importlib.import_module("tensorboardX.summary")
            # Into this very file: the package's own way makes a directory, and so a second run.
            for summary in module.hparams(plain, dict.fromkeys(_RESULTS)):
                self._writer.file_writer.add_summary(summary)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        adds = {"scalar": self._writer.add_scalar, "histogram": self._writer.add_histogram}
        for key, kind, value in _by_kind(metrics):
            if kind in ("image", "video"):
                height, width, channels = value.shape[-3:]
                picture = self._summary.Image(
                    height=height,
                    width=width,
                    colorspace=channels,
                    encoded_image_string=_encoded(kind, value),
                )
                summary = self._summary(value=[self._summary.Value(tag=key, image=picture)])
                self._writer.file_writer.add_summary(summary, step)
            else:
                adds.get(kind, self._writer.add_text)(key, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbOutput(Output):
    """Scalars, histograms, images, videos and text.

    Args:
        init: Passed to `wandb.init`: project, name, dir, id, config and so on. An `id` with
            `resume="allow"` lets a resumed run continue there.
    """

    def __init__(self, **init: Any) -> None:
        self._wandb: Any = import_extra("wandb", "Logs in Weights & Biases", "wandb")
        self._run = self._wandb.init(**init)
        self._step = int(getattr(self._run, "step", 0))  # where a resumed run is
        self._own_axis = False

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="dreamfleet-wandb-") as folder:
            row: dict[str, Any] = {}
            for key, kind, value in _by_kind(metrics):
                if kind == "histogram":
                    value = self._wandb.Histogram(value)
                elif kind == "image":
                    value = self._wandb.Image(value)
                elif kind == "video":
                    path = Path(folder) / f"{len(row)}.gif"
                    path.write_bytes(_encoded(kind, value))
                    value = self._wandb.Video(str(path), format="gif")
                row[key] = value
            if EVAL_STEP in row and not self._own_axis:
                self._own_axis = True
                self._run.define_metric("eval/*", step_metric=EVAL_STEP)
            # The package drops rows of earlier steps, and an evaluation belongs to the step at
            # which it began: it is drawn over a step of its own.
            self._step = max(self._step, step)
            # Logged inside the block: the package copies files while it logs them.
            if row:
                self._run.log(row, step=self._step)

    def close(self) -> None:
        self._run.finish()


class MlflowOutput(Output):
    """Scalars as metrics, images and videos as artifacts, and the settings as parameters.

    The server is the one that MLFLOW_TRACKING_URI names; without it, the file mlflow.db in the
    run's directory. A resumed run goes on in the same place, which the file mlflow_run names.

    Args:
        directory: Of the run.
        settings: Parameters by their path.
    """

    def __init__(self, directory: Path | str, *, settings: Mapping[str, Any] | None = None) -> None:
        mlflow: Any = import_extra("mlflow", "Logs in MLflow", "mlflow")
        self._metric: Any = mlflow.entities.Metric
        folder = Path(directory).absolute()
        server = os.environ.get("MLFLOW_TRACKING_URI")
        folder.mkdir(parents=True, exist_ok=True)
        uri = server or f"sqlite:///{folder / 'mlflow.db'}"
        client = self._client = mlflow.MlflowClient(tracking_uri=uri)
        kept = folder / "mlflow_run"
        if kept.is_file():
            self._run = kept.read_text().strip()
            client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "dreamfleet"
        if found := client.get_experiment_by_name(name):
            experiment = found.experiment_id
        else:
            artifacts = None if server else (folder / "mlflow").as_uri()
            experiment = client.create_experiment(name, artifact_location=artifacts)
        self._run = client.create_run(experiment, run_name=folder.name).info.run_id
        atomic_write(kept, self._run + "\n")
        texts = ((key, str(value)[:_MAX_TEXT]) for key, value in (settings or {}).items())
        parameters = [mlflow.entities.Param(*each) for each in texts]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            client.log_batch(self._run, params=parameters[first : first + _MAX_PARAMETERS])

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        now, rows = int(1000 * time.time()), []
        for key, kind, value in _by_kind(metrics):
            if kind == "scalar" and math.isfinite(value):
                rows.append(self._metric(key, value, now, step))
            elif kind in ("image", "video"):
                with tempfile.TemporaryDirectory(prefix="dreamfleet-mlflow-") as folder:
                    path = Path(folder) / f"{step:09d}.{'gif' if kind == 'video' else 'png'}"
                    path.write_bytes(_encoded(kind, value))
                    self._client.log_artifact(self._run, str(path), key)
        for first in range(0, len(rows), _MAX_METRICS):
            self._client.log_batch(self._run, metrics=rows[first : first + _MAX_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._run)
