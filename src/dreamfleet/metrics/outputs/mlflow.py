"""MLflow."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamfleet.errors import import_extra
from dreamfleet.files import atomic_write
from dreamfleet.metrics.frames import as_frames, encode_gif, encode_png
from dreamfleet.metrics.outputs.base import Output, kind_of

_MOST = 1000
"""Metrics, and parameters a tenth of it, that the server takes at once."""
_LONGEST = 500


class MlflowOutput(Output):
    """Scalars as metrics, images and videos as artifacts, and the settings as parameters.

    The server is the one that MLFLOW_TRACKING_URI names; without it, the file mlflow.db in the
    run's directory. A resumed run goes on in the same place, which the file mlflow_run names.

    Args:
        directory: Of the run.
        settings: Parameters by their path.
        fps: Of videos.
    """

    def __init__(
        self, directory: Path | str, *, settings: Mapping[str, Any] | None = None, fps: float = 20
    ) -> None:
        mlflow: Any = import_extra("mlflow", "Logs in MLflow", "mlflow")
        self._metric: Any = mlflow.entities.Metric
        folder = Path(directory).absolute()
        server = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        folder.mkdir(parents=True, exist_ok=True)
        self._client: Any = mlflow.MlflowClient(tracking_uri=server)
        self._fps = fps
        kept = folder / "mlflow_run"
        if kept.is_file():
            self._run = kept.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "dreamfleet"
        found = self._client.get_experiment_by_name(name)
        artifacts = None if "MLFLOW_TRACKING_URI" in os.environ else (folder / "mlflow").as_uri()
        experiment = (
            found.experiment_id
            if found
            else self._client.create_experiment(name, artifact_location=artifacts)
        )
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        atomic_write(kept, self._run + "\n")
        parameters = [
            mlflow.entities.Param(key, str(value)[:_LONGEST])
            for key, value in (settings or {}).items()
        ]
        for first in range(0, len(parameters), _MOST // 10):
            self._client.log_batch(self._run, params=parameters[first : first + _MOST // 10])

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        now, rows = int(1000 * time.time()), []
        for key, value in metrics.items():
            kind = kind_of(value)
            if kind == "scalar" and math.isfinite(float(value)):
                rows.append(self._metric(key, float(value), now, step))
            elif kind in ("image", "video"):
                self._add_picture(step, key, value, video=kind == "video")
        for first in range(0, len(rows), _MOST):
            self._client.log_batch(self._run, metrics=rows[first : first + _MOST])

    def _add_picture(self, step: int, key: str, value: Any, *, video: bool) -> None:
        frames = as_frames(value)
        data = encode_gif(frames, self._fps) if video else encode_png(frames)
        with tempfile.TemporaryDirectory(prefix="dreamfleet-mlflow-") as folder:
            path = Path(folder) / f"{step:09d}.{'gif' if video else 'png'}"
            path.write_bytes(data)
            self._client.log_artifact(self._run, str(path), key)

    def close(self) -> None:
        self._client.set_terminated(self._run)
