"""What low precision may not change: who can be drawn, and where gradients point."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from agent_worlds import ACTIONS, MIXED, VECTOR, config, random_batch

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.actor_critic import behaviour_gradient
from dreamfleet.agents.dreamer.config import LossConfig, ModelConfig
from dreamfleet.agents.dreamer.forms import scan
from dreamfleet.agents.dreamer.imagination import Targets, imagine
from dreamfleet.agents.dreamer.layers import Dense, Norm, cast
from dreamfleet.agents.dreamer.rssm import RSSM
from dreamfleet.agents.dreamer.train import init_state, train_step

# --- products as accelerators round them ----------------------------------------------------------


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Rounded to the 11 significant bits of a GPU's tensor cores, to nearest, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0xFFF + ((bits >> 13) & 1)
    return (bits & ~np.uint64(0x1FFF)).astype(np.uint32).view(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to 8 significant bits, as a TPU's matrix unit takes float32 by default."""
    return np.asarray(x, ml_dtypes.bfloat16).astype(np.float32)


def with_rounded_products(
    function: Callable[..., Any], rounding: Callable[[np.ndarray], np.ndarray]
) -> Callable[..., Any]:
    """The function on a device whose matrix products round what they multiply, unless they are
    told to be precise."""

    def evaluate(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            inputs = [x.val if hasattr(x, "val") else values[x] for x in eqn.invars]
            params = dict(eqn.params)
            if "jaxpr" in params:
                inner = params["jaxpr"]
                outputs = evaluate(inner.jaxpr, inner.consts, inputs)
            else:
                if eqn.primitive.name == "dot_general":
                    highest = jax.lax.Precision.HIGHEST
                    if params["precision"] != (highest, highest):
                        inputs = [jnp.asarray(rounding(np.asarray(x))) for x in inputs]
                found = eqn.primitive.bind(*inputs, **params)
                outputs = found if eqn.primitive.multiple_results else [found]
            values |= dict(zip(eqn.outvars, outputs, strict=True))
        return [values[x] for x in jaxpr.outvars]

    def run(*args: Any) -> Any:
        closed = jax.make_jaxpr(function)(*args)
        (result,) = evaluate(closed.jaxpr, closed.consts, args)
        return result

    return run


def test_the_simulated_device_rounds() -> None:
    third = jnp.full((1, 1), 1 / 3, jnp.float32)
    product = with_rounded_products(lambda x: x @ jnp.ones((1, 1)), to_tf32)
    assert float(product(third)[0, 0]) == np.float32(0.33325195)
    assert float(to_bfloat16(np.float32(1 / 3))) == np.float32(0.33398438)


@pytest.mark.parametrize("rounding", [to_tf32, to_bfloat16], ids=["tf32", "bfloat16"])
@pytest.mark.parametrize("sample", [dist.sample_index, dist.sample_possible])
def test_every_class_can_be_drawn_where_products_are_rounded(
    sample: Callable[..., Any], rounding: Callable[..., Any]
) -> None:
    """Rounded sums reach one before the last classes have had their share."""
    rng = np.random.default_rng(0)
    for classes in (4, 32, 96):
        logits = 3.0 * rng.standard_normal((256, classes), np.float32)
        probs = np.asarray(dist.unimix_probs(jnp.asarray(logits), 0.01))
        exact = probs.astype(np.float64)
        total = np.cumsum(exact, -1)
        middle = (total - 0.5 * exact) / total[:, -1:]  # of each class's share of [0, 1]
        repeated = jnp.asarray(np.repeat(probs[:, None], classes, 1))
        draw = with_rounded_products(sample, rounding)
        drawn = draw(repeated, jnp.asarray(middle, jnp.float32))
        np.testing.assert_array_equal(drawn, np.broadcast_to(np.arange(classes), drawn.shape))


# --- which parameters are narrow ------------------------------------------------------------------


class OwnScale(eqx.Module):
    """A layer of a user, whose field is called as that of norms."""

    scale: jax.Array
    layer: Dense
    norm: Norm


def test_the_scales_of_norms_stay_in_float32_and_no_others() -> None:
    rng = np.random.default_rng(0)
    own = narrow(OwnScale(jnp.ones(3), Dense.init(rng, 3, 4), Norm.init(4)))
    assert own.scale.dtype == own.layer.kernel.dtype == own.layer.bias.dtype == jnp.bfloat16
    assert own.layer.scale.dtype == own.norm.scale.dtype == jnp.float32
    nets = narrow(init_state(config(), MIXED, ACTIONS, seed=0).nets)
    wide = {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nets)
        if leaf.dtype == jnp.float32
    }
    every = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(nets)}
    assert wide == {name for name in every if name.endswith(".scale")}
    for part in (".encoder.mlp", ".encoder.cnn", ".dynamics.hidden", ".decoder.image.norms"):
        assert any(name.startswith(part) for name in wide), part


# --- gradients ------------------------------------------------------------------------------------


def test_a_scan_sums_gradients_in_float32() -> None:
    """In bfloat16 a sum of ones ends at 256."""

    def total(weight: jax.Array) -> jax.Array:
        def step(weight: jax.Array, carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return carry + (weight * x).astype(jnp.float32), None

        return scan(step, weight, jnp.zeros(()), jnp.ones(1000, jnp.bfloat16))[0]

    gradient = jax.grad(total)(jnp.ones((), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient) == 1000.0


def relative_errors(left: Any, right: Any) -> dict[str, float]:
    """How far each tensor is off, as a share of its norm."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(left), jax.tree_util.tree_leaves(right), strict=True
    )
    return {
        jax.tree_util.keystr(path): float(
            np.linalg.norm(np.asarray(one, np.float32) - np.asarray(two, np.float32))
            / np.linalg.norm(np.asarray(two, np.float32))
        )
        for (path, one), two in pairs
        if np.any(np.asarray(two, np.float32))
    }


def narrow(tree: Any) -> Any:
    return cast(tree, jnp.dtype(jnp.bfloat16))


def widened(tree: Any) -> Any:
    """The same numbers in float32: what is compared is arithmetic, not rounded parameters."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), narrow(tree))


def test_gradients_of_a_long_sequence_in_bfloat16() -> None:
    """Steps that add the same again and again, 600 of them."""
    model = ModelConfig(deter=16, hidden=8, stoch=4, classes=4, blocks=4, units=8)
    rssm = RSSM.init(np.random.default_rng(0), model, 3, 5)
    rng, time = np.random.default_rng(1), 600
    one = [rng.standard_normal((2, 1, width)).astype(np.float32) for width in (5, 3)]
    tokens, action = (jnp.asarray(np.repeat(each, time, 1)) for each in one)
    hot = np.eye(4, dtype=np.float32)[rng.integers(4, size=(2, 1, 4))].reshape(2, 1, 16)
    teacher = jnp.asarray(np.repeat(hot, time, 1))
    first = jnp.ones((2, time), bool)  # every step starts from zeros

    def loss(rssm: RSSM, dtype: Any) -> jax.Array:
        inputs = [x.astype(dtype) for x in (tokens, action)]
        observed = rssm.observe(rssm.initial(2), *inputs, first, teacher=teacher)
        return jnp.sum(observed.posterior.astype(jnp.float32)[..., 0])

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    low, high = gradient(narrow(rssm), jnp.bfloat16), gradient(widened(rssm), jnp.float32)
    errors = relative_errors(low, high)
    assert "." in next(iter(errors))
    assert max(errors.values()) < 0.03, errors


def test_gradients_of_actor_and_critic_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and in the form of other devices."""
    state = init_state(config(), VECTOR, ACTIONS, seed=0)
    rng = np.random.default_rng(0)
    steps, rows = 400, 3

    def repeated(*shape: int) -> jax.Array:
        row = rng.standard_normal((1, rows, *shape)).astype(np.float32)
        return jnp.asarray(np.repeat(row, steps, 0))

    actions = {
        "button": jnp.ones((steps, rows), jnp.int32),
        "keys": jnp.ones((steps, rows, 2), jnp.int32),
        "move": repeated(2),
    }
    targets = Targets(repeated(), jnp.ones((steps, rows)), 9.0 * repeated(), repeated())
    nets, critic, start = state.nets, state.slow_critic, state.nets.dynamics.initial(rows)
    shapes = jax.eval_shape(lambda: imagine(nets, critic, start, steps, jax.random.key(0)))
    rollout = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    features = tuple(jnp.resize(repeated(x.shape[-1])[:1], x.shape) for x in rollout.features)

    def gradient(models: Any, dtype: Any) -> Any:
        parts = tuple(x.astype(dtype) for x in features)
        same = rollout._replace(features=parts, actions=actions)
        return behaviour_gradient(*models, same, targets, LossConfig())[1]

    models = (nets.actor, nets.critic)
    high = jax.jit(gradient, static_argnums=1)(widened(models), jnp.float32)
    found = [jax.jit(gradient, static_argnums=1)(narrow(models), jnp.bfloat16)]
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    elsewhere = jax.jit(lambda *args: gradient(*args), static_argnums=1)
    found.append(elsewhere(narrow(models), jnp.bfloat16))
    for low in found:
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(low))
        assert max((errors := relative_errors(low, high)).values()) < 0.03, errors


def test_no_sum_of_a_training_step_is_taken_in_bfloat16() -> None:
    """Compilers of some devices would add the numbers as they are."""
    settings = config(compute_dtype="bfloat16")
    state = jax.eval_shape(lambda: init_state(settings, VECTOR, ACTIONS, 0))
    jaxpr = jax.make_jaxpr(lambda *args: train_step(*args, config=settings))(
        state, random_batch(VECTOR, ACTIONS)
    )
    sums = list(operations(jaxpr.jaxpr, "reduce_sum", "cumsum"))
    assert len(sums) > 50
    assert not [eqn for eqn in sums if eqn.invars[0].aval.dtype == jnp.bfloat16]


def operations(jaxpr: Any, *names: str) -> Iterator[Any]:
    """The operations of these kinds, also inside of loops and functions."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            yield eqn
        for value in eqn.params.values():
            for each in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    yield from operations(inner, *names)
