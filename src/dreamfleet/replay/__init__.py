"""The replay: memory-mapped, larger than RAM, loses nothing it acknowledged, rate-limited.

`Replay` stores steps and hands out sequences; a selector decides which; `SamplesPerInsert` keeps
writers and samplers in step; `Stream` cuts sequences into training batches.
"""

from dreamfleet.replay.config import Fractions, PriorityConfig, ReplayConfig
from dreamfleet.replay.errors import (
    BatchOrderError,
    DirectoryInUseError,
    NotEnoughDataError,
    RateLimitedError,
    ReplayClosedError,
    ReplayError,
    SchemaError,
    StorageFullError,
)
from dreamfleet.replay.forecast import Forecast
from dreamfleet.replay.limiter import SamplesPerInsert, TrainRatio
from dreamfleet.replay.replay import Replay
from dreamfleet.replay.selectors import (
    Draw,
    Fifo,
    Mixture,
    Prioritized,
    Recency,
    Selector,
    SimpleSelector,
    Uniform,
)
from dreamfleet.replay.stream import Stream

__all__ = [
    "BatchOrderError",
    "DirectoryInUseError",
    "Draw",
    "Fifo",
    "Forecast",
    "Fractions",
    "Mixture",
    "NotEnoughDataError",
    "Prioritized",
    "PriorityConfig",
    "RateLimitedError",
    "Recency",
    "Replay",
    "ReplayClosedError",
    "ReplayConfig",
    "ReplayError",
    "SamplesPerInsert",
    "SchemaError",
    "Selector",
    "SimpleSelector",
    "StorageFullError",
    "Stream",
    "TrainRatio",
    "Uniform",
]
