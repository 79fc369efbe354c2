"""The form in which loops and means are computed, where devices differ.

The algorithm calls these helpers and says nothing else about devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from dreamfleet.agents.dreamer.layers import cast

Model = TypeVar("Model")


def scan(
    step: Callable[[Model, Any, Any], tuple[Any, Any]], model: Model, init: Any, xs: Any
) -> tuple[Any, Any]:
    """`jax.lax.scan` of step(model, carry, x), with the model's gradient summed in float32.

    A gradient is summed over the steps in the precision of what the loop is given. In bfloat16 the
    sum would stop growing at 256 times what a step adds. So the loop is given float32, and narrows
    it; compilers narrow once, before the loop. A single step is no loop.
    """
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        carry, y = step(model, init, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda x: x[None], y)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), model)

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        narrow = jax.tree.map(lambda value, like: value.astype(like.dtype), wide, model)
        return step(narrow, carry, x)

    return jax.lax.scan(body, init, xs)


def per_device(function: Callable[..., Any], *, rows: int = 0, mean: bool = False) -> Any:
    """function(model, *arrays), which every device of the mesh computes for its own rows.

    Without this a compiler sums the model's gradient over the devices in every step of a loop. Here
    it is summed once. What couples rows of a batch has to be computed outside of it.

    Args:
        function: Computes rows from rows, or means over its rows.
        rows: The axis along which the arrays have them.
        mean: Whether results are means over rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return function
    untyped: Any = jax
    spec = untyped.sharding.PartitionSpec
    whole, split = spec(), spec(*[None] * rows, mesh.axis_names)

    def here(model: Any, *arrays: Any) -> Any:
        results = function(model, *arrays)
        return untyped.lax.pmean(results, mesh.axis_names) if mean else results

    def everywhere(model: Any, *arrays: Any) -> Any:
        specs = (whole, *[split] * len(arrays))
        out = whole if mean else split
        return jax.shard_map(here, in_specs=specs, out_specs=out, check_vma=False)(model, *arrays)

    return everywhere


def gradient_over_steps(
    loss: Callable[[Model, Any], tuple[Any, Any]], model: Model, steps: Any
) -> tuple[Any, Model]:
    """The mean of what `loss(model, steps)` gives beside the loss, and the loss's gradient in
    float32, for arrays [H, N, ...] and a loss that is a mean over them.

    A CPU takes one step after the other, while activations are in its cache: at size 1m the whole
    training step takes three quarters of the time. Accelerators take all at once.
    """
    gradient = jax.grad(loss, has_aux=True)
    wide = jnp.dtype(jnp.float32)

    def step_by_step(model: Model, steps: Any) -> tuple[Any, Model]:
        def body(total: Any, step: Any) -> tuple[Any, Any]:
            grads, beside = gradient(model, step)
            return jax.tree.map(jnp.add, total, cast(grads, wide)), beside

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), model)
        count = jax.tree.leaves(steps)[0].shape[0]
        grads, beside = jax.lax.scan(body, zeros, steps)
        mean = jax.tree.map(lambda x: x.mean(0), beside)
        return mean, jax.tree.map(lambda x: x / count, grads)

    def at_once(model: Model, steps: Any) -> tuple[Any, Model]:
        grads, beside = gradient(model, steps)
        return beside, cast(grads, wide)

    on_cpu = per_device(step_by_step, rows=1, mean=True)
    result: tuple[Any, Model] = jax.lax.platform_dependent(
        model, steps, cpu=on_cpu, default=at_once
    )
    return result
