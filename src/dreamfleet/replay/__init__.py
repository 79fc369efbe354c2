"""The replay: memory-mapped, larger than RAM, loses nothing it acknowledged, rate-limited.

`Replay` stores steps and hands out sequences; a selector decides which; `SamplesPerInsert` keeps
writers and samplers in step; `Stream` cuts sequences into training batches.

The larger parts are looked up on first use: every process reads `ReplayConfig`, few need a replay.
"""

from __future__ import annotations

import typing
from importlib import import_module

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

if typing.TYPE_CHECKING:
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

_LATER = {
    "forecast": ("Forecast",),
    "limiter": ("SamplesPerInsert", "TrainRatio"),
    "replay": ("Replay",),
    "selectors": (
        *("Draw", "Fifo", "Mixture", "Prioritized", "Recency", "Selector", "SimpleSelector"),
        "Uniform",
    ),
    "stream": ("Stream",),
}
"""Names by the module that holds them."""


def __getattr__(name: str) -> object:
    for module, names in _LATER.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
