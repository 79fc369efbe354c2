"""Metrics: episodes, aggregates, timers, and where they are written."""

from dreamfleet.errors import MetricsError
from dreamfleet.metrics.aggregate import Aggregate
from dreamfleet.metrics.episodes import Episode, EpisodeStats
from dreamfleet.metrics.outputs.base import Output, Outputs, kind_of
from dreamfleet.metrics.outputs.jsonl import JsonlOutput, ScoresFile, read_jsonl
from dreamfleet.metrics.outputs.media import MediaOutput
from dreamfleet.metrics.outputs.prometheus import PrometheusOutput
from dreamfleet.metrics.outputs.trackers import MlflowOutput, TensorBoardOutput, WandbOutput
from dreamfleet.metrics.timing import Timer, Usage

__all__ = [
    "Aggregate",
    "Episode",
    "EpisodeStats",
    "JsonlOutput",
    "MediaOutput",
    "MetricsError",
    "MlflowOutput",
    "Output",
    "Outputs",
    "PrometheusOutput",
    "ScoresFile",
    "TensorBoardOutput",
    "Timer",
    "Usage",
    "WandbOutput",
    "kind_of",
    "read_jsonl",
]
