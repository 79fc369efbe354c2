"""Operations of the agent's programs for GPUs and TPUs, counted without a device.

Every program is lowered from shapes alone: nothing is allocated or compiled. An accelerator starts
most operations outside of a fusion as a kernel of its own, and those inside of a loop once per
iteration, so a program with many operations in its loops waits for the host.

FLOPs are counted in the jaxpr, because XLA's own analysis counts the body of a loop once. Counted
are matrix products and convolutions; all else is small beside them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.agent import spaces
from benchmarks.report import Row
from dreamfleet.agents import DreamerConfig, ExecutionConfig, size_preset
from dreamfleet.agents.dreamer.acting import ActingNetworks, Draws, policy_step
from dreamfleet.agents.dreamer.config import PUBLISHED_SIZES
from dreamfleet.agents.dreamer.interfaces import stored_space
from dreamfleet.agents.dreamer.runtime.report import report_step
from dreamfleet.agents.dreamer.train import state_shapes, train_step
from dreamfleet.spaces import Space

PLATFORMS = ("cuda", "tpu")
_shape: Any = jax.ShapeDtypeStruct
# They are no kernels.
_FREE = ("constant", "return", "reshape", "broadcast_in_dim", "iota", "call", "func", "while")


@dataclass(frozen=True)
class Operations:
    """How many operations a program has."""

    outside: Counter[str]
    """By kind, those that run once."""
    inside: Counter[str]
    """Those inside of loops, which run once for each step of their loop."""

    def __str__(self) -> str:
        products = [self.products(counts) for counts in (self.outside, self.inside)]
        return (
            f"{self.outside.total()} outside of loops ({products[0]} of them products), "
            f"{self.inside.total()} inside ({products[1]})"
        )

    @staticmethod
    def products(counts: Counter[str]) -> int:
        """Matrix products and convolutions."""
        return counts["dot_general"] + counts["convolution"]


def run(quick: bool = False) -> Iterator[Row]:
    """Lower everything in every published size; a quick run takes one of them."""
    for kind in ("vector", "image"):
        for dtype in ("float32", "bfloat16"):
            for size in PUBLISHED_SIZES[:1] if quick else PUBLISHED_SIZES:
                for (program, platform), found in lower(kind, dtype, size).items():
                    name = f"{kind}, {dtype}, {size}, {platform}: {program}"
                    total = float(found.outside.total() + found.inside.total())
                    yield Row(name, total, "operations", note=str(found))


def lower(
    kind: str,
    dtype: str,
    size: str,
    *,
    programs: Sequence[str] = ("train", "report", "policy", "publish"),
    platforms: Sequence[str] = PLATFORMS,
) -> dict[tuple[str, str], Operations]:
    """The operations of each program on each platform, with batches of 16 x 64."""
    obs, act = spaces(kind)
    execution = replace(ExecutionConfig(), compute_dtype=dtype)  # type: ignore[arg-type]
    config = DreamerConfig(size_preset(size), execution=execution)
    programs_of = calls(config, obs, act)
    found = {}
    for program in programs:
        function, arguments = programs_of[program]
        traced = jax.jit(function).trace(*arguments)
        for platform in platforms:
            lowered = traced.lower(lowering_platforms=(platform,))
            found[program, platform] = count(lowered.compiler_ir("stablehlo"))
    return found


def calls(
    config: DreamerConfig,
    obs: Mapping[str, Any],
    act: Mapping[str, Any],
    rows: int = 16,
    length: int = 64,
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Every program with the shapes of its arguments, for batches of `rows` sequences."""
    model, dtype = config.model, config.execution.compute_dtype
    act = {name: space for name, space in act.items() if name != "reset"}
    stored = stored_space(model)
    state = state_shapes(config, obs, act)
    acting = 16

    def array(space: Any, *batch: int) -> Any:
        return _shape((*batch, *space.shape), space.dtype)

    def sequences(length: int) -> dict[str, Any]:
        steps = (rows, length + config.execution.replay_context)
        return {
            **{name: array(space, *steps) for name, space in {**obs, **act, **stored}.items()},
            "stepid": _shape((*steps, 20), np.uint8),
        }

    nets = jax.eval_shape(lambda nets: ActingNetworks.of(nets, dtype), state.nets)
    actions = {name: array(space, acting) for name, space in act.items()}
    before = jax.eval_shape(lambda nets: nets.dynamics.initial(acting), state.nets)
    observed = {name: array(space, acting) for name, space in obs.items()}
    draws = Draws(_shape((acting, nets.dynamics.draws), np.float32), actions)
    return {
        "train": (functools.partial(train_step, config=config), (state, sequences(length))),
        "report": (functools.partial(report_step, config=config), (state, sequences(32))),
        "policy": (policy_step, (nets, {"state": before, "previous": actions}, observed, draws)),
        "publish": (
            lambda nets: jax.tree.map(jnp.copy, ActingNetworks.of(nets, dtype)),
            (state.nets,),
        ),
    }


def count(module: Any) -> Operations:
    """The operations of a module, those of functions where they are called."""
    functions = {each.name.value: each for each in module.body.operations}

    def visit(block: Any, inside: bool, counts: Operations) -> None:
        for operation in block.operations:
            name = operation.operation.name.rpartition(".")[2]
            if name == "call":
                callee = functions[operation.attributes["callee"].value]
                for body in callee.regions[0].blocks:
                    visit(body, inside, counts)
            elif name not in _FREE:
                (counts.inside if inside else counts.outside)[name] += 1
            if name in ("while", "case", "if"):
                for region in operation.regions:
                    for body in region.blocks:
                        visit(body, inside or name == "while", counts)

    result = Operations(Counter(), Counter())
    for body in functions["main"].regions[0].blocks:
        visit(body, False, result)
    return result


def train_step_flops(
    config: DreamerConfig,
    obs_space: Mapping[str, Space],
    act_space: Mapping[str, Space],
    rows: int,
    length: int,
) -> float:
    """Of one training step, in the form for accelerators, from shapes alone.

    The form for CPUs computes the same with other convolutions, so its operations are not
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
        raise ValueError("A loop of unknown length holds products, which cannot be counted.")
    return float(parameters.get("length", 1)) * sum(inside) if name == "scan" else sum(inside)


def _bodies(parameters: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an operation consists of."""
    for value in parameters.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            body = getattr(each, "jaxpr", each)  # a closed one holds another
            if hasattr(body, "eqns"):
                yield body
