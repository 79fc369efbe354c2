"""The world model: what it sees in a replayed sequence, and what it learns from it.

    tokens    x_t = enc(o_t)
    state     s_t = dyn(s_{t-1}, a_{t-1}, x_t)
    prior     p(z_t | h_t), posterior q(z_t | h_t, x_t), where h_t and z_t are parts of s_t
    predicts  o_t, r_t and whether the episode continues, from the features of s_t

Arrays begin with [B, T].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import LossConfig, ModelConfig
from dreamfleet.agents.dreamer.dynamics import Observed, Parts, State
from dreamfleet.agents.dreamer.layers import init_kernel, matmul_parts
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.errors import ConfigError
from dreamfleet.masks import ACTION_MASK, ActionMask


class Seen(NamedTuple):
    """A replayed sequence as the world model sees it: what losses are computed from."""

    obs: Mapping[str, Array]
    actions: Float[Array, "B T A"]
    """The action before each step, as vectors."""
    tokens: Float[Array, "B T E"]
    observed: Observed
    features: Parts
    predictions: dict[str, Array]
    """Of the decoder; empty if it is not trained."""


class Term(NamedTuple):
    """One loss of the table."""

    loss: Callable[..., Any]
    scale: Callable[[LossConfig], float]
    """The setting that weighs it."""
    trains: str
    """The networks that it moves."""

    def __call__(self, *args: Any) -> Any:
        """The loss, as its module has it now: a script may have replaced it there."""
        module = sys.modules[self.loss.__module__]
        return getattr(module, self.loss.__name__, self.loss)(*args)


def observe(
    nets: Networks,
    carry: State,
    obs: Mapping[str, Array],
    actions: Float[Array, "B T A"],
    uniform: Float[Array, "B T draws"],
    config: LossConfig,
) -> Seen:
    """Encode, follow the sequence, decode."""
    tokens = nets.encoder(obs)
    observed = nets.dynamics.observe(carry, tokens, actions, obs["is_first"], uniform)
    features = nets.dynamics.features(observed.states)
    # Beside another objective the decoder only shows what the model knows.
    shown = features if config.representation == "reconstruction" else stop(features)
    predictions = nets.decoder(shown) if config.reconstruction_scale else {}
    return Seen(obs, actions, tokens, observed, features, predictions)


def reconstruction_losses(
    nets: Networks,
    seen: Seen,
    config: LossConfig,  # noqa: ARG001 - the table's
) -> dict[str, Float[Array, "B T"]]:
    """Squared errors and cross entropies of every decoded key."""
    if not seen.predictions:
        return {}
    losses = nets.decoder.losses(seen.predictions, seen.obs)
    return {f"reconstruction/{key}": loss for key, loss in losses.items()}


def reward_loss(nets: Networks, seen: Seen, config: LossConfig) -> Float[Array, "B T"]:
    """Two-hot cross entropy of r_t, from the features of step t."""
    logits = nets.reward(seen.features if config.reward_grad else stop(seen.features))
    return dist.twohot_loss(logits, dist.twohot_target(seen.obs["reward"], logits.shape[-1]))


def continue_loss(nets: Networks, seen: Seen, config: LossConfig) -> Float[Array, "B T"]:
    """Bernoulli cross entropy of the episode going on, with the discount learned into it."""
    target = continue_target(seen.obs["is_terminal"], config)
    return dist.bernoulli_loss(nets.cont(seen.features)[..., 0], target)


def continue_target(terminal: Array, config: LossConfig) -> Float[Array, "..."]:
    """(1 - terminal) (1 - 1/horizon), or without the discount where it is not learned."""
    alive = 1.0 - terminal.astype(jnp.float32)
    return alive * (1.0 - 1.0 / config.horizon) if config.continue_discount else alive


def dynamics_loss(nets: Networks, seen: Seen, config: LossConfig) -> Float[Array, "B T"]:
    """max(free, KL[sg(posterior) || prior])."""
    return nets.dynamics.kl_losses(seen.observed, config.free_nats)[0]


def representation_loss(nets: Networks, seen: Seen, config: LossConfig) -> Float[Array, "B T"]:
    """max(free, KL[posterior || sg(prior)])."""
    return nets.dynamics.kl_losses(seen.observed, config.free_nats)[1]


def mask_loss(
    mask: ActionMask, logits: Float[Array, "*batch choices"], target: Array
) -> Float[Array, "*batch"]:
    """Loss of the choices that are predicted to be allowed; an empty mask teaches nothing."""
    each = dist.bernoulli_loss(logits, target.astype(bool).astype(jnp.float32))
    return jnp.where(mask.empty(target), 0.0, jnp.sum(each, -1))


def predicted_mask_loss(
    nets: Networks,
    seen: Seen,
    config: LossConfig,  # noqa: ARG001 - the table's
) -> dict[str, Float[Array, "B T"]]:
    """The loss of the mask's head, for tasks with a mask of actions."""
    if nets.mask is None or nets.actor.mask is None:
        return {}
    return {"mask": mask_loss(nets.actor.mask, nets.mask(seen.features), seen.obs[ACTION_MASK])}


TERMS: Mapping[str, Term] = {
    "reconstruction": Term(
        reconstruction_losses, lambda loss: loss.reconstruction_scale, "encoder dynamics decoder"
    ),
    "reward": Term(reward_loss, lambda loss: loss.reward_scale, "encoder dynamics reward"),
    "continue": Term(continue_loss, lambda loss: loss.continue_scale, "encoder dynamics cont"),
    "mask": Term(predicted_mask_loss, lambda loss: loss.mask_scale, "encoder dynamics mask"),
    "dynamics": Term(dynamics_loss, lambda loss: loss.dynamics_scale, "encoder dynamics"),
    "representation": Term(
        representation_loss, lambda loss: loss.representation_scale, "encoder dynamics"
    ),
}
"""The losses of the world model, each of shape [B, T]; `train.weights` weighs them."""


def step_losses(nets: Networks, seen: Seen, config: LossConfig) -> dict[str, Float[Array, "B T"]]:
    """The losses of every step, by name. Each device computes those of its own rows."""
    losses: dict[str, Array] = {}
    for name, term in TERMS.items():
        found = term(nets, seen, config)
        losses |= found if isinstance(found, dict) else {name: found}
    return losses | extra_losses(nets, seen, couples_rows=False)


def extra_losses(nets: Networks, seen: Seen, *, couples_rows: bool) -> dict[str, Array]:
    """The losses with parameters of their own, of one kind (`interfaces.ExtraLoss`).

    Raises:
        ConfigError: One that is computed for rows of the batch has no axis of rows.
    """
    found = {
        name: loss(seen) for name, loss in nets.extra.items() if loss.couples_rows == couples_rows
    }
    rows = seen.tokens.shape[:1]
    for name, loss in found.items():
        if not couples_rows and loss.shape[:1] != rows:
            raise ConfigError(
                f"The loss {name} has shape {loss.shape}, and its first axis must be the {rows[0]} "
                "rows of the batch: keep that axis, or set couples_rows=True."
            )
    return found


class Barlow(eqx.Module):
    """Redundancy reduction instead of reconstruction (R2-Dreamer): features predict the tokens, and
    each of their coordinates alone.

        x = standardised over B and T:  a linear map of the features;  the tokens, without gradient
        C = x1^T x2 / (B T)
        loss = sum_i (C_ii - 1)^2 + 5e-4 sum_{i != j} C_ij^2
    """

    kernel: Float[Array, "F E"]
    couples_rows: bool = eqx.field(static=True, default=True)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        model: ModelConfig,  # noqa: ARG003 - the protocol's
        widths: tuple[int, ...],
        tokens: int,
        actions: int,  # noqa: ARG003 - the protocol's
    ) -> Barlow:
        return cls(init_kernel(rng, (sum(widths), tokens), sum(widths)))

    def __call__(self, seen: Seen) -> Float[Array, ""]:
        left = _standardise(matmul_parts(seen.features, self.kernel))
        right = _standardise(stop(seen.tokens))
        correlation = left.T @ right / left.shape[0]  # [E, E]
        diagonal = jnp.diagonal(correlation)
        others = jnp.sum(jnp.square(correlation)) - jnp.sum(jnp.square(diagonal))
        return jnp.sum(jnp.square(diagonal - 1.0)) + 5e-4 * others


def _standardise(x: Float[Array, "B T E"]) -> Float[Array, "rows E"]:
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    centred = rows - rows.mean(0, keepdims=True)
    # The square of 1e-8 inside of the root: a constant coordinate has a gradient too.
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), 0, keepdims=True) + 1e-16)


def stop(tree: Any) -> Any:
    """The same without a gradient."""
    return jax.lax.stop_gradient(tree)
