"""Losses of one's own beside those of Dreamer, without touching its code.

    dreamfleet train --logdir runs/own-loss \
        --dreamer.loss.extra examples.own_loss:InverseDynamics=0.1

`InverseDynamics` predicts the action between two states from their features. `Contrast` compares
the features of a step with the tokens of all steps of the batch. Rows of the batch meet in it,
which it says with `couples_rows`, so that several devices give the numbers of one.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dreamfleet.agents import ModelConfig
from dreamfleet.agents.dreamer.layers import MLP, Linear, init_kernel, matmul_parts
from dreamfleet.agents.dreamer.world_model import Seen


class InverseDynamics(eqx.Module):
    """The squared error of predicted action vectors, [B, T - 1]."""

    mlp: MLP
    out: Linear
    couples_rows: bool = eqx.field(static=True, default=False)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        model: ModelConfig,
        widths: tuple[int, ...],
        tokens: int,
        actions: int,
    ) -> InverseDynamics:
        mlp = MLP.init(rng, 2 * sum(widths), model.units, 1)
        return cls(mlp, Linear.init(rng, model.units, actions))

    def __call__(self, seen: Seen) -> Array:
        before = [part[:, :-1] for part in seen.features]
        after = [part[:, 1:] for part in seen.features]
        predicted = self.out(self.mlp(*before, *after))
        error = jnp.sum(jnp.square(predicted - seen.actions[:, 1:]).astype(jnp.float32), -1)
        # A new episode does not follow from an action.
        return jnp.where(seen.obs["is_first"][:, 1:], 0.0, error)


class Contrast(eqx.Module):
    """InfoNCE: which tokens of the batch belong to these features?"""

    kernel: Array
    couples_rows: bool = eqx.field(static=True, default=True)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        model: ModelConfig,
        widths: tuple[int, ...],
        tokens: int,
        actions: int,
    ) -> Contrast:
        return cls(init_kernel(rng, (sum(widths), tokens), sum(widths)))

    def __call__(self, seen: Seen) -> Array:
        left = matmul_parts(seen.features, self.kernel).reshape(-1, seen.tokens.shape[-1])
        right = jax.lax.stop_gradient(seen.tokens).reshape(left.shape)
        scores = (left @ right.T).astype(jnp.float32) / jnp.sqrt(jnp.float32(left.shape[-1]))
        return -jnp.diagonal(jax.nn.log_softmax(scores, -1))  # [B * T]
