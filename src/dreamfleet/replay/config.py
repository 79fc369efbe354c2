"""Settings of the replay, with the reference's defaults for how sequences are chosen.

Importable without the rest of the package: every process passes the configuration around.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from dreamfleet.errors import ConfigError
from dreamfleet.settings import Count, Fraction, Incidental, PerHost, validate


@dataclass(frozen=True)
class Fractions:
    """Probability that a sequence is chosen by each of three rules. They add up to 1."""

    uniform: Fraction = 1.0
    """Every stored sequence is equally likely."""
    priority: Fraction = 0.0
    """Sequences that the agent models badly are more likely; see `replay.priority`."""
    recency: Fraction = 0.0
    """Newer sequences are more likely; see `replay.recency_exponent`."""

    def __post_init__(self) -> None:
        validate(self)
        total = self.uniform + self.priority + self.recency
        if not math.isclose(total, 1.0, rel_tol=1e-6):
            raise ConfigError(
                f"replay.fractions add up to {total:g} (uniform={self.uniform:g}, "
                f"priority={self.priority:g}, recency={self.recency:g}): make them add up to 1."
            )


@dataclass(frozen=True)
class PriorityConfig:
    """How the priorities of steps become the weight of a sequence.

    weight = max_fraction * max(p ** exponent) + (1 - max_fraction) * mean(p ** exponent), over the
    priorities p of the sequence's steps.
    """

    exponent: Annotated[float, Meta(ge=0, le=4)] = 0.8
    """Power applied to the priority of each step; 0 makes all sequences equally likely."""
    max_fraction: Fraction = 0.5
    """Share of the largest priority in the weight of a sequence; the rest is the mean priority."""
    initial: Annotated[float, Meta(ge=0, le=1e38)] | None = None
    """Priority of a step that was never trained on. None: such sequences are sampled before all
    others."""
    zero_on_sample: bool = True
    """Set the priorities of a sampled sequence to 0 until the agent sends new ones."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class ReplayConfig:
    """What the replay keeps, and which sequences it samples."""

    capacity: PerHost[Count] = 1_000_000
    """Sequences to keep, one for each step; the oldest are removed first. Evaluation data keeps a
    tenth."""
    chunk: Incidental[PerHost[Annotated[int, Meta(ge=1, le=1 << 19)]]] = 1024
    """Steps in a file of the replay. A directory that has files already keeps their size."""
    max_bytes: PerHost[Count | None] = None
    """Limit of the files' size in bytes; None for no limit."""
    online: bool = True
    """Whether each new sequence that overlaps no earlier one is trained on once, before others."""
    fractions: Fractions = field(default_factory=Fractions)
    """How sequences are chosen otherwise."""
    priority: PriorityConfig = field(default_factory=PriorityConfig)
    """Prioritised sampling, which `fractions.priority` turns on."""
    recency_exponent: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Recency sampling: a sequence with n newer ones has the weight 1 / (n + 1) ** exponent."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def evaluation_capacity(self) -> int:
        """Sequences of evaluation data that are kept."""
        return math.ceil(self.capacity / 10)
