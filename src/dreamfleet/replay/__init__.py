"""The replay: memory-mapped, larger than RAM, loses nothing it acknowledged, rate-limited.

`Replay` stores steps and samples sequences; a selector chooses which; `SamplesPerInsert` keeps
collecting and training in step.

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
    from dreamfleet.replay.limiter import SamplesPerInsert
    from dreamfleet.replay.replay import Replay, Shares, Split
    from dreamfleet.replay.selectors import (
        Draw,
        Mixture,
        Prioritized,
        Recency,
        Selector,
        Uniform,
        make_selector,
        used_fractions,
    )

__all__ = [
    "BatchOrderError",
    "DirectoryInUseError",
    "Draw",
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
    "Shares",
    "Split",
    "StorageFullError",
    "Uniform",
    "make_selector",
    "used_fractions",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in ("limiter", "selectors", "replay"):
            found = vars(import_module(f"{__name__}.{module}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
