"""Probability distributions as pure functions of their parameters, all in float32.

unimix categorical   stochastic state:  p = (1 - m) softmax(l) + m / classes
two-hot              reward and value:  a mean over bins that are dense around zero
Bernoulli            continuation
categorical, normal  actions
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_LOG_TWO_PI = math.log(2.0 * math.pi)
_SMALLEST = 1e-30
_CLOSE = 0.1**2  # where the next term of the series is below what float32 holds


def symlog(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """sign(x) ln(1 + |x|): squashes large values, keeps small ones."""
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The inverse of symlog."""
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


# --- categorical ---------------------------------------------------------------------------------


def unimix_probs(
    logits: Float[Array, "*batch classes"], unimix: float
) -> Float[Array, "*batch classes"]:
    """Probabilities of a categorical with a share of the uniform distribution mixed in."""
    probs = jax.nn.softmax(logits.astype(jnp.float32), -1)
    # Without a share no probability is zero either: logarithms are taken of them.
    return (1.0 - unimix) * probs + max(unimix / logits.shape[-1], _SMALLEST)


def entropy_of_probs(probs: Float[Array, "*batch classes"]) -> Float[Array, "*batch"]:
    """Entropy of a categorical, from its probabilities."""
    return -jnp.sum(probs * jnp.log(probs), -1)


def sample_index(
    probs: Float[Array, "*batch classes"], uniform: Float[Array, "*batch"]
) -> Int[Array, "*batch"]:
    """Inverse-CDF sampling: one uniform number a draw, instead of one a class."""
    below = _cumulative(probs) <= uniform[..., None]
    # Rounding can leave the last cumulative sum below one.
    return jnp.minimum(jnp.sum(below, -1, dtype=jnp.int32), probs.shape[-1] - 1)


def sample_possible(
    probs: Float[Array, "*batch classes"], uniform: Float[Array, "*batch"]
) -> Int[Array, "*batch"]:
    """`sample_index` that never draws a class without probability, whatever the rounding."""
    possible = probs > 0.0
    reached = (_cumulative(probs) > uniform[..., None]) & possible
    last = probs.shape[-1] - 1 - jnp.argmax(possible[..., ::-1], -1)
    index = jnp.where(jnp.any(reached, -1), jnp.argmax(reached, -1), last)
    return index.astype(jnp.int32)


def _cumulative(probs: Float[Array, "*batch classes"]) -> Float[Array, "*batch classes"]:
    """Running sums; as a product with a triangle, which CPUs and GPUs do faster than a scan.

    In full precision: accelerators round what they multiply to 11 or 8 bits by default, and sums
    that reach one too early would leave the last classes without a chance.
    """
    classes = probs.shape[-1]
    triangle = jnp.triu(jnp.ones((classes, classes), probs.dtype))
    return jnp.matmul(probs, triangle, precision=jax.lax.Precision.HIGHEST)


def straight_through(
    onehot: Float[Array, "*batch classes"], probs: Float[Array, "*batch classes"]
) -> Float[Array, "*batch classes"]:
    """The sample forward, the probabilities' gradient backward."""
    # The difference first: it is exactly zero, so the sample stays an exact one-hot.
    return jax.lax.stop_gradient(onehot) + (probs - jax.lax.stop_gradient(probs))


def categorical_kl(
    left: Float[Array, "*batch classes"], right: Float[Array, "*batch classes"]
) -> Float[Array, "*batch"]:
    """KL[left || right] of two tables of probabilities."""
    return jnp.sum(left * (jnp.log(left) - jnp.log(right)), -1)


def sample_onehots(
    logits: Float[Array, "*batch variables classes"],
    uniform: Float[Array, "*batch variables"],
    unimix: float,
) -> Float[Array, "*batch variables classes"]:
    """One-hot samples of unimix categoricals, with the straight-through gradient."""
    probs = unimix_probs(logits, unimix)
    index = sample_index(jax.lax.stop_gradient(probs), uniform)
    return straight_through(jax.nn.one_hot(index, probs.shape[-1], dtype=jnp.float32), probs)


def balanced_kl(
    posterior: Float[Array, "*batch variables classes"],
    prior: Float[Array, "*batch variables classes"],
    unimix: float,
    free_nats: float,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """max(free, KL[sg(post) || prior]) and max(free, KL[post || sg(prior)]), from logits: the KL is
    summed over the variables, and flat below `free_nats`."""
    post, pri = (unimix_probs(logits, unimix) for logits in (posterior, prior))
    stop = jax.lax.stop_gradient
    dynamics = jnp.sum(categorical_kl(stop(post), pri), -1)
    representation = jnp.sum(categorical_kl(post, stop(pri)), -1)
    return jnp.maximum(dynamics, free_nats), jnp.maximum(representation, free_nats)


def categorical_log_prob(
    logits: Float[Array, "*batch classes"], index: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Log-probability of an index under a categorical."""
    return select(jax.nn.log_softmax(logits.astype(jnp.float32), -1), index)


def categorical_entropy(logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch"]:
    """Entropy of a categorical, from its logits."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -jnp.sum(jnp.exp(logp) * logp, -1)


def select(
    values: Float[Array, "*batch classes"], index: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """values[..., index], as a masked sum: its gradient is elementwise, never a scatter."""
    hit = index[..., None] == jax.lax.broadcasted_iota(index.dtype, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(hit, values, 0.0), -1)


# --- two-hot -------------------------------------------------------------------------------------


def symexp_bins(count: int) -> Float[np.ndarray, " count"]:
    """Bin centres from -(e^20 - 1) to e^20 - 1, exactly antisymmetric."""
    if count % 2 == 1:
        half = _symexp64(np.linspace(-20.0, 0.0, (count - 1) // 2 + 1))
        bins = np.concatenate([half, -half[:-1][::-1]])
    else:
        half = _symexp64(np.linspace(-20.0, 0.0, count // 2))
        bins = np.concatenate([half, -half[::-1]])
    return bins.astype(np.float32)


def _symexp64(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.sign(x) * np.expm1(np.abs(x)))


def twohot_mean(logits: Float[Array, "*batch bins"]) -> Float[Array, "*batch"]:
    """sum p b, precise also where bins of half a billion nearly cancel; equal logits give zero.

    Bins are mirrored, so a pair of them counts with the difference of its two probabilities. If
    these are close, subtracting them leaves their roundings times e^20, which early in training
    is more than what actions differ in. So it is (p_j + p_i) tanh((l_j - l_i) / 2) there, with
    the beginning of the series.
    """
    count = logits.shape[-1]
    half = count // 2
    logits = logits.astype(jnp.float32)
    weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))

    def mirrored(values: Float[Array, "*batch bins"]) -> tuple[Array, Array]:
        return values[..., count - half :][..., ::-1], values[..., :half]

    (upper, lower), (logit, mirror) = mirrored(weights), mirrored(logits)
    x = (logit - mirror) / 2.0
    square = x * x
    tanh = x * (1.0 - square * (1 / 3 - square * (2 / 15)))
    pairs = jnp.where(square < _CLOSE, (upper + lower) * tanh, upper - lower)
    bins = jnp.asarray(symexp_bins(count)[count - half :][::-1])
    return jnp.sum(pairs * jnp.broadcast_to(bins, pairs.shape), -1) / jnp.sum(weights, -1)


def twohot_target(value: Float[Array, "*batch"], count: int) -> Float[Array, "*batch bins"]:
    """Weights of the two bins around a value, linear in raw value space."""
    bins = jnp.asarray(symexp_bins(count))
    table = jnp.broadcast_to(bins, (*value.shape, count))
    reached = jnp.sum(table <= value[..., None], -1, dtype=jnp.int32)
    lower = jnp.maximum(reached - 1, 0)
    upper = jnp.minimum(reached, count - 1)
    to_lower = jnp.where(lower == upper, 1.0, jnp.abs(bins[lower] - value))
    to_upper = jnp.where(lower == upper, 1.0, jnp.abs(bins[upper] - value))
    share = to_upper / (to_lower + to_upper)
    iota = jax.lax.broadcasted_iota(jnp.int32, table.shape, table.ndim - 1)
    on_lower = jnp.where(iota == lower[..., None], share[..., None], 0.0)
    return on_lower + jnp.where(iota == upper[..., None], 1.0 - share[..., None], 0.0)


def twohot_loss(
    logits: Float[Array, "*batch bins"], target: Float[Array, "*batch bins"]
) -> Float[Array, "*batch"]:
    """Cross entropy with weights from `twohot_target`, which may sum to more than one."""
    logits = logits.astype(jnp.float32)
    target = jax.lax.stop_gradient(target)
    mass = jnp.sum(target, -1)
    return mass * jax.nn.logsumexp(logits, -1) - jnp.sum(target * logits, -1)


# --- Bernoulli and normal ------------------------------------------------------------------------


def bernoulli_loss(
    logit: Float[Array, "*batch"], target: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """-[y ln s(l) + (1 - y) ln s(-l)], for soft targets too."""
    logit = logit.astype(jnp.float32)
    return -(target * jax.nn.log_sigmoid(logit) + (1.0 - target) * jax.nn.log_sigmoid(-logit))


def bounded_std(raw: Float[Array, "..."], min_std: float, max_std: float) -> Float[Array, "..."]:
    """A standard deviation between two bounds, from any number."""
    return (max_std - min_std) * jax.nn.sigmoid(raw.astype(jnp.float32) + 2.0) + min_std


def normal_log_prob(
    mean: Float[Array, "..."], std: Float[Array, "..."], value: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Log-density of a normal, element by element."""
    return -0.5 * jnp.square((value - mean) / std) - jnp.log(std) - 0.5 * _LOG_TWO_PI


def normal_entropy(std: Float[Array, "..."]) -> Float[Array, "..."]:
    """Entropy of a normal, element by element."""
    return jnp.log(std) + 0.5 * (_LOG_TWO_PI + 1.0)
