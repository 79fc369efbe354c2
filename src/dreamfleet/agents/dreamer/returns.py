"""Returns, and the normaliser that keeps the policy's advantages in scale."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dreamfleet.agents.dreamer.config import LossConfig


def lambda_return(
    reward: Float[Array, "steps *batch"],
    last: Float[Array, "steps *batch"],
    terminal: Float[Array, "steps *batch"],
    bootstrap: Float[Array, "steps *batch"],
    discount: float,
    lambda_: float,
) -> Float[Array, "steps_minus_one *batch"]:
    """Returns of all steps but the last; time comes first.

        live_t = discount (1 - terminal_t)
        cont_t = lambda (1 - last_t)
        R_t = r_{t+1} + live_{t+1} [(1 - cont_{t+1}) b_{t+1} + cont_{t+1} R_{t+1}]

    and R at the final step is the bootstrap b.
    """
    live = discount * (1.0 - terminal[1:])
    cont = lambda_ * (1.0 - last[1:])
    # R_t = base_t + slope_t R_{t+1}
    base = reward[1:] + live * (1.0 - cont) * bootstrap[1:]
    slope = live * cont

    def step(following: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        base, slope = inputs
        value = base + slope * following
        return value, value

    _, returns = jax.lax.scan(step, bootstrap[-1], (base, slope), reverse=True)
    return returns


class ReturnRange(NamedTuple):
    """Running percentiles of the returns."""

    low: Float[Array, ""]
    high: Float[Array, ""]

    @classmethod
    def initial(cls) -> ReturnRange:
        return cls(jnp.zeros(()), jnp.zeros(()))

    def update(self, returns: Float[Array, "..."], config: LossConfig) -> ReturnRange:
        """Follow the data; without debiasing, so early returns are hardly scaled."""
        quantiles = jnp.array([config.return_low, config.return_high], jnp.float32)
        low, high = jnp.percentile(jax.lax.stop_gradient(returns).reshape(-1), quantiles)
        rate = config.return_rate
        return ReturnRange(
            (1.0 - rate) * self.low + rate * low, (1.0 - rate) * self.high + rate * high
        )

    def scale(self, config: LossConfig) -> Float[Array, ""]:
        return jax.lax.stop_gradient(jnp.maximum(config.return_limit, self.high - self.low))
