"""The optimizer: adaptive gradient clipping, RMS scaling, momentum, a learning-rate schedule.

Momentum comes after the scaling (LaProp's order), and the first update has a learning rate of
zero: it only fills the statistics.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dreamfleet.agents.dreamer.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer of all networks, as one Optax chain."""
    chain = optax.chain(*stages(config))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # Optax mixes dtypes, which our tests do not allow elsewhere.
        with jax.numpy_dtype_promotion("standard"):
            updates, following = chain.update(grads, state, params)
        return updates, following

    return optax.GradientTransformation(chain.init, update)


def stages(config: OptimizerConfig) -> list[optax.GradientTransformation]:
    """What the optimizer does to gradients, one after the other."""
    result = [
        clip_by_parameter_norm(config.clip, config.clip_floor),
        optax.scale_by_rms(config.beta2, config.eps, eps_in_sqrt=False, bias_correction=True),
        optax.ema(config.beta1),
    ]
    if config.weight_decay:
        result.append(optax.add_decayed_weights(config.weight_decay, _is_kernel))
    return [*result, optax.scale_by_learning_rate(learning_rate(config))]


def clip_by_parameter_norm(clip: float, floor: float) -> optax.GradientTransformation:
    """g / max(1, |g| / (clip max(floor, |p|))), one norm a tensor; a clip of 0 leaves g alone.

    Optax clips by the norm of each unit of a tensor instead.
    """
    if clip == 0:
        return optax.identity()

    def update(grads: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, Any]:
        def leaf(grad: Array, param: Array) -> Array:
            limit = clip * jnp.maximum(floor, tree_norm(param))
            return grad / jnp.maximum(1.0, tree_norm(grad) / limit)

        return jax.tree.map(leaf, grads, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """Rises linearly over `warmup` updates, then falls linearly to `final_rate` of its value at
    update `decay`."""
    rise = optax.linear_schedule(0.0, 1.0, config.warmup) if config.warmup else lambda _: 1.0
    fall = None
    if config.decay > 0:
        falling = max(1, config.decay - config.warmup)
        fall = optax.linear_schedule(1.0, config.final_rate, falling, config.warmup)

    def rate(count: Array) -> Float[Array, ""] | float:
        return config.learning_rate * rise(count) * (fall(count) if fall else 1.0)

    return rate


def tree_norm(tree: Any) -> Float[Array, ""]:
    """Euclidean norm of all numbers of a tree; Optax has had it under three names."""
    squares = (jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def tree_rms(tree: Any) -> Float[Array, ""]:
    """Root mean square of all numbers of a tree."""
    count = sum(leaf.size for leaf in jax.tree.leaves(tree))
    return tree_norm(tree) / jnp.sqrt(jnp.float32(count))


def _is_kernel(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
