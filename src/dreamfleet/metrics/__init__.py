"""Metrics: episodes, aggregates, timers, and where they are written."""

from dreamfleet.metrics.aggregate import Aggregate
from dreamfleet.metrics.episodes import Episode, EpisodeStats
from dreamfleet.metrics.errors import MetricsError, MissingOutputError
from dreamfleet.metrics.outputs import (
    JsonlOutput,
    MediaOutput,
    Output,
    Outputs,
    ScoresFile,
    TensorBoardOutput,
    TerminalOutput,
    WandbOutput,
    kind_of,
    read_jsonl,
)
from dreamfleet.metrics.timing import Rate, Timer, Usage

__all__ = [
    "Aggregate",
    "Episode",
    "EpisodeStats",
    "JsonlOutput",
    "MediaOutput",
    "MetricsError",
    "MissingOutputError",
    "Output",
    "Outputs",
    "Rate",
    "ScoresFile",
    "TensorBoardOutput",
    "TerminalOutput",
    "Timer",
    "Usage",
    "WandbOutput",
    "kind_of",
    "read_jsonl",
]
