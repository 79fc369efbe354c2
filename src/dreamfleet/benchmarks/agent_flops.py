"""Floating-point operations of a program, counted in its jaxpr.

XLA's own analysis counts the body of a loop once, however often it runs. Here a loop counts as
often as it is long. Counted are matrix products and convolutions, which is what FLOP utilisation is
about; all else is small beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest import mock

import jax

from dreamfleet.agents import DreamerConfig
from dreamfleet.benchmarks.lowering import calls
from dreamfleet.spaces import Space


def train_step_flops(
    config: DreamerConfig,
    obs_space: Mapping[str, Space],
    act_space: Mapping[str, Space],
    rows: int,
    length: int,
) -> float:
    """Of one training step, in the form for accelerators, from shapes alone.

    The form for processors computes the same with other convolutions, so its operations are not
    those that the model needs.
    """
    with form_of_accelerators():
        return flops(*calls(config, obs_space, act_space, rows, length)["train"])


@contextmanager
def form_of_accelerators() -> Iterator[None]:
    """Trace programs as for a GPU, whatever device is here."""

    def default(*args: Any, default: Callable[..., Any], **_: Any) -> Any:
        return default(*args)

    with mock.patch.object(jax.lax, "platform_dependent", default):
        yield


def flops(function: Callable[..., Any], arguments: Any) -> float:
    """Of a function with arguments of these shapes."""
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: Any) -> float:
    return sum(map(_operation, jaxpr.eqns), 0.0)


def _operation(equation: Any) -> float:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return float(2 * equation.outvars[0].aval.size * prod(shape[axis] for axis in contracted))
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        outputs = kernel.shape[parameters["dimension_numbers"].rhs_spec[0]]
        return float(2 * equation.outvars[0].aval.size * kernel.size / outputs)
    inside = [_count(each) for each in _bodies(parameters)]
    if not inside:
        return 0.0
    if name == "cond":
        return max(inside)
    if name == "while" and sum(inside):
        raise ValueError("A loop of unknown length holds products: nobody knows how many.")
    return float(parameters.get("length", 1)) * sum(inside) if name == "scan" else sum(inside)


def _bodies(parameters: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an operation consists of."""
    for value in parameters.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            body = getattr(each, "jaxpr", each)  # a closed one holds another
            if hasattr(body, "eqns"):
                yield body
