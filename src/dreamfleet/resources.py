"""What the workers of a run ask for, where a launcher places them on machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dreamfleet.errors import ConfigError
from dreamfleet.settings import CountOrZero, ZeroOrMore, validate


@dataclass(frozen=True)
class Resources:
    """What one worker asks for."""

    cpu: ZeroOrMore = 0.0
    """Processor cores; 0 goes wherever there is room for the rest."""
    gpu: ZeroOrMore = 0.0
    """Accelerators; a part of one, such as 0.5, may share it."""
    memory: CountOrZero = 0
    """Bytes of memory; 0 if it does not matter."""
    custom: dict[str, Any] = field(default_factory=dict)
    """Resources that the cluster has under names of its own, such as simulator=1."""

    def __post_init__(self) -> None:
        validate(self)
        for name, amount in self.custom.items():
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount <= 0:
                raise ConfigError(
                    f"{name}={amount} is no amount of a resource: use a number above 0."
                )

    def amounts(self) -> dict[str, float]:
        """Everything that is asked for, by its name in a cluster."""
        own = {"CPU": self.cpu, "GPU": self.gpu, "memory": float(self.memory)}
        return {name: float(each) for name, each in {**own, **self.custom}.items() if each}


@dataclass(frozen=True)
class RunResources:
    """What each role asks for, per process."""

    agent: Resources = field(default_factory=lambda: Resources(cpu=1))
    """The process that acts and learns."""
    actor: Resources = field(default_factory=lambda: Resources(cpu=1))
    """Each further actor, if there are several `actors`."""
    env: Resources = field(default_factory=lambda: Resources(cpu=1))
    """Each process of environments."""
    replay: Resources = field(default_factory=Resources)
    """Each shard of the replay."""
    evaluator: Resources = field(default_factory=Resources)
    """The evaluator, if there is `eval_every`."""
    logger: Resources = field(default_factory=Resources)
    """The logger."""

    def __post_init__(self) -> None:
        validate(self)
