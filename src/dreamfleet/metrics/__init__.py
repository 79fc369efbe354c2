"""Metrics: episodes, aggregates, timers, and where they are written."""

from dreamfleet.errors import MetricsError
from dreamfleet.metrics.aggregate import Aggregate
from dreamfleet.metrics.episodes import Episode, EpisodeStats
from dreamfleet.metrics.outputs import (
    JsonlOutput,
    MediaOutput,
    Output,
    Outputs,
    ScoresFile,
    TensorBoardOutput,
    WandbOutput,
    kind_of,
    read_jsonl,
)
from dreamfleet.metrics.timing import Timer, Usage

__all__ = [
    "Aggregate",
    "Episode",
    "EpisodeStats",
    "JsonlOutput",
    "MediaOutput",
    "MetricsError",
    "Output",
    "Outputs",
    "ScoresFile",
    "TensorBoardOutput",
    "Timer",
    "Usage",
    "WandbOutput",
    "kind_of",
    "read_jsonl",
]
