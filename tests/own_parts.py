"""Losses and a sequence model that settings of tests name."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dreamfleet.agents.dreamer.layers import Linear, init_kernel, matmul_parts
from dreamfleet.agents.dreamer.rssm import RSSM, State
from dreamfleet.agents.dreamer.world_model import Seen


class Forward(eqx.Module):
    """The squared error of the next step's tokens, [B, T - 1]."""

    layer: Linear
    couples_rows: bool = eqx.field(static=True, default=False)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        model: Any,
        widths: tuple[int, ...],
        tokens: int,
        *others: int,
    ) -> Forward:
        return cls(Linear.init(rng, sum(widths), tokens))

    def __call__(self, seen: Seen) -> Array:
        predicted = self.layer(*(part[:, :-1] for part in seen.features))
        return jnp.square(predicted - jax.lax.stop_gradient(seen.tokens[:, 1:])).sum(-1)


class Contrast(eqx.Module):
    """Which tokens of the batch belong to these features? [B * T]"""

    kernel: Array
    couples_rows: bool = eqx.field(static=True, default=True)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        model: Any,
        widths: tuple[int, ...],
        tokens: int,
        *others: int,
    ) -> Contrast:
        return cls(init_kernel(rng, (sum(widths), tokens), sum(widths)))

    def __call__(self, seen: Seen) -> Array:
        left = matmul_parts(seen.features, self.kernel).reshape(-1, seen.tokens.shape[-1])
        right = jax.lax.stop_gradient(seen.tokens).reshape(left.shape)
        return -jnp.diagonal(jax.nn.log_softmax(left @ right.T, -1))


class Quiet(eqx.Module):
    """Small features, [B, T]; it has no parameters."""

    couples_rows: bool = eqx.field(static=True, default=False)

    @classmethod
    def init(cls, *_: Any) -> Quiet:
        return cls()

    def __call__(self, seen: Seen) -> Array:
        return jnp.square(seen.features[0]).mean(-1)


class Whole(Quiet):
    """The mean over all rows as one number, without saying that they meet in it."""

    def __call__(self, seen: Seen) -> Array:
        return super().__call__(seen).mean()


OWN_LOSSES = {"own_parts:Forward": 0.5, "own_parts:Contrast": 0.2, "own_parts:Quiet": 10.0}
BARLOW = {"dreamfleet.agents.dreamer.world_model:Barlow": 0.05}


class Forgetful(RSSM):
    """A sequence model that stores nothing: it starts from the steps before a sequence."""

    @classmethod
    def entry_space(cls, model: Any) -> dict[str, Any]:
        return {}

    def entries(self, states: State) -> dict[str, Array]:
        return {}

    def truncate(self, entries: Any) -> State:
        raise AssertionError("nothing is stored")
