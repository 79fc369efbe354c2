"""What a sequence model offers, with defaults. `rssm.RSSM` is one.

The dynamics own their state, a pytree of float arrays with one row for each sequence. Nothing else
looks into it: carries, the replay's context, dreams, saving and publishing pass it on. Decoder,
heads and policy read `features(state)`, a tuple of arrays.

Shapes: B sequences, T steps, N rows, A numbers in an action vector, E in the tokens of a step.
Random numbers come from outside: `draws` uniform numbers for each row and step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.spaces import Space

State = Any
"""The state of a sequence model: a pytree whose leaves begin with [N] or [B, T]."""
Parts = tuple[Float[Array, "..."], ...]
"""What the other networks read of a state; they see the concatenation of its last axes."""


class Observed(NamedTuple):
    """An observed sequence."""

    states: State
    """[B, T, ...]"""
    posterior: Any
    """The belief with the observation, in the form that `kl_losses` takes; [B, T, ...]."""
    prior: Any
    """The prediction without it, in the same form."""


class Dynamics(eqx.Module):
    """The base class of sequence models."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, ...]:
        """The width of each part of `features`."""

    @property
    @abstractmethod
    def draws(self) -> int:
        """Uniform random numbers that a step takes."""

    @classmethod
    @abstractmethod
    def init(
        cls, rng: np.random.Generator, model: ModelConfig, actions: int, tokens: int
    ) -> Dynamics:
        """Fresh parameters, for action vectors and tokens of these widths."""

    @classmethod
    @abstractmethod
    def entry_space(cls, model: ModelConfig) -> dict[str, Space]:
        """What the replay stores of the state of each step. Empty if a state is too large to be
        stored: training then starts from `initial` and observes the context first."""

    @abstractmethod
    def initial(self, rows: int) -> State:
        """The state before an episode, [N, ...]."""

    @abstractmethod
    def observe(
        self,
        carry: State,
        tokens: Float[Array, "B T E"],
        action: Float[Array, "B T A"],
        is_first: Bool[Array, "B T"],
        uniform: Float[Array, "B T draws"],
    ) -> Observed:
        """Follow a sequence. `action` holds the action before each step. Where `is_first` is set,
        an episode begins: the step starts from `initial`, and its action counts as zeros."""

    @abstractmethod
    def step(
        self, state: State, action: Float[Array, "N A"], uniform: Float[Array, "N draws"]
    ) -> State:
        """The next state without an observation."""

    @abstractmethod
    def features(self, state: State) -> Parts:
        """What the other networks read of a state."""

    @abstractmethod
    def kl_losses(
        self, observed: Observed, free_nats: float
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """KL losses: one moves the prior towards the posterior, one the posterior to the prior."""

    def metrics(self, observed: Observed) -> dict[str, Float[Array, ""]]:  # noqa: ARG002
        """Numbers to log about an observed sequence."""
        return {}

    def entries(self, states: State) -> dict[str, Float[Array, "..."]]:  # noqa: ARG002
        """States in the form of `entry_space`, in float32."""
        return {}

    def truncate(self, entries: Mapping[str, Float[Array, "B K ..."]]) -> State:  # noqa: ARG002
        """The state after K stored steps, from their entries."""
        raise TypeError(f"{type(self).__name__} stores entries and lacks truncate(): add it.")

    def starts(self, states: State, last: int) -> State:
        """Rows to imagine from, the last states of each sequence: [B, T, ...] to [N, ...]."""
        return jax.tree.map(lambda x: x[:, -last:].reshape(-1, *x.shape[2:]), states)

    def imagine(
        self,
        start: State,
        act: Callable[[Parts, Any], tuple[Float[Array, "N A"], Any]],
        noise: Any,
        uniform: Float[Array, "H N draws"],
    ) -> tuple[Parts, Parts, Any]:
        """Follow `act(features, noise)`, which gives an action vector and anything beside it.

        Returns:
            The features of the states that actions were taken at, [H, N, ...], those of the last
            state, [N, ...], and what `act` gave beside the actions, [H, N, ...].
        """

        def step(state: State, draws: tuple[Any, Array]) -> tuple[State, tuple[Parts, Any]]:
            features = self.features(state)
            action, beside = act(features, draws[0])
            return self.step(state, action, draws[1]), (features, beside)

        last, (features, beside) = jax.lax.scan(step, start, (noise, uniform))
        return features, self.features(last), beside
