"""The optimizer: adaptive gradient clipping, RMS scaling, momentum, a learning rate that
warms up and may fall again.

Momentum comes after the scaling (LaProp's order), and the first update has a learning rate of
zero: it only fills the statistics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dreamfleet.agents.dreamer.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    stages = [
        clip_by_parameter_norm(config.clip, config.clip_floor),
        scale_by_rms(config.beta2, config.eps),
        scale_by_momentum(config.beta1),
    ]
    if config.weight_decay:
        stages.append(optax.add_decayed_weights(config.weight_decay, _is_kernel))
    stages.append(scale_by_rate(config))
    return optax.chain(*stages)


def clip_by_parameter_norm(clip: float, floor: float) -> optax.GradientTransformation:
    """g / max(1, |g| / (clip max(floor, |p|))), one norm a tensor."""

    def update(grads: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, Any]:
        def leaf(grad: Array, param: Array) -> Array:
            limit = clip * jnp.maximum(floor, norm(param))
            return grad / jnp.maximum(1.0, norm(grad) / limit)

        return jax.tree.map(leaf, grads, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


class AverageState(NamedTuple):
    """A running average and how many updates it has seen."""

    seen: Int[Array, ""]
    average: Any


def scale_by_rms(decay: float, eps: float) -> optax.GradientTransformation:
    """g / (sqrt(debiased average of g^2) + eps)."""

    def update(grads: Any, state: AverageState, _: Any = None) -> tuple[Any, AverageState]:
        count = state.seen + 1
        average = jax.tree.map(
            lambda mean, grad: decay * mean + (1.0 - decay) * jnp.square(grad), state.average, grads
        )
        debias = 1.0 - jnp.float32(decay) ** count.astype(jnp.float32)
        scaled = jax.tree.map(lambda g, mean: g / (jnp.sqrt(mean / debias) + eps), grads, average)
        return scaled, AverageState(count, average)

    return optax.GradientTransformation(_zeros, update)


def scale_by_momentum(decay: float) -> optax.GradientTransformation:
    """Debiased running average."""

    def update(grads: Any, state: AverageState, _: Any = None) -> tuple[Any, AverageState]:
        count = state.seen + 1
        average = jax.tree.map(
            lambda mean, grad: decay * mean + (1.0 - decay) * grad, state.average, grads
        )
        debias = 1.0 - jnp.float32(decay) ** count.astype(jnp.float32)
        return jax.tree.map(lambda mean: mean / debias, average), AverageState(count, average)

    return optax.GradientTransformation(_zeros, update)


class CountState(NamedTuple):
    """Updates made so far."""

    seen: Int[Array, ""]


def scale_by_rate(config: OptimizerConfig) -> optax.GradientTransformation:
    """Times -rate min(1, n / warmup) after n earlier updates, falling linearly to `final_rate` of
    that at update `decay`."""

    def update(grads: Any, state: CountState, _: Any = None) -> tuple[Any, CountState]:
        seen = state.seen.astype(jnp.float32)
        scale = jnp.float32(-config.learning_rate)
        if config.warmup:
            scale *= jnp.minimum(1.0, seen / config.warmup)
        if config.decay:
            scale *= 1.0 - (1.0 - config.final_rate) * jnp.minimum(1.0, seen / config.decay)
        return jax.tree.map(lambda g: scale * g, grads), CountState(state.seen + 1)

    return optax.GradientTransformation(lambda _: CountState(jnp.zeros((), jnp.int32)), update)


def norm(x: Float[Array, "..."]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.sum(jnp.square(x)))


def tree_norm(tree: Any) -> Float[Array, ""]:
    return jnp.sqrt(
        sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), jnp.zeros(()))
    )


def tree_rms(tree: Any) -> Float[Array, ""]:
    count = sum(leaf.size for leaf in jax.tree.leaves(tree))
    return tree_norm(tree) / jnp.sqrt(jnp.float32(count))


def _is_kernel(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _zeros(params: Any) -> AverageState:
    return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))
