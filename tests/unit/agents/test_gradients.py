"""Each loss moves exactly the networks that the table names, with its weight."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, config, random_batch

from dreamfleet import ConfigError, Space
from dreamfleet.agents.dreamer import world_model
from dreamfleet.agents.dreamer.actor_critic import behaviour_gradient, policy_loss, value_loss
from dreamfleet.agents.dreamer.config import DreamerConfig, LossConfig
from dreamfleet.agents.dreamer.heads import action_entropies, action_log_prob
from dreamfleet.agents.dreamer.imagination import Rollout, Targets, imagine
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.rssm import State
from dreamfleet.agents.dreamer.train import (
    TERMS,
    Sequence,
    TrainState,
    all_gradients,
    init_state,
    learn_behaviour,
    total_loss,
    weights,
    without_context,
)

# Whole training steps are compiled, which takes minutes on a busy machine.
FIELDS = ("encoder", "dynamics", "decoder", "reward", "cont", "actor", "critic", "mask", "extra")
WORLD = {"encoder", "dynamics"}
MASKED = (
    VECTOR | {"action_mask": Space(bool, (3,))},
    {"button": Space(np.int32, (), 0, 3), "reset": Space(bool)},
)


def settings(**loss: Any) -> DreamerConfig:
    base = config()
    return replace(base, loss=replace(base.loss, **loss))


def perturbed(state: TrainState) -> TrainState:
    """Zero-initialised output layers would hide gradients behind them."""
    rng = np.random.default_rng(0)
    nets, slow = jax.tree.map(
        lambda x: x + 0.3 * jnp.asarray(rng.standard_normal(x.shape, np.float32)),
        (state.nets, state.slow_critic),
    )
    return state._replace(nets=nets, slow_critic=slow)


def world(
    obs: dict[str, Space], act: dict[str, Space], agent_config: DreamerConfig
) -> tuple[TrainState, Sequence]:
    state = perturbed(init_state(agent_config, obs, act, seed=0))
    batch = {k: jnp.asarray(v) for k, v in random_batch(obs, act, length=4).items()}
    return state, without_context(state, batch, agent_config)


def gradients(state: TrainState, sequence: Sequence, agent_config: DreamerConfig) -> Any:
    """The gradient of each loss alone: a tree with a leading axis, in the order of the names."""

    def losses(nets: Networks) -> Any:
        _, outcome = total_loss(nets, state, sequence, agent_config, update=True)
        return outcome.losses, outcome

    values, pullback, outcome = jax.vjp(losses, state.nets, has_aux=True)
    # One backward pass is compiled, and run for each loss.
    chosen = dict(zip(values, jnp.eye(len(values)), strict=True))
    stacked = jax.lax.map(lambda seeds: pullback(seeds)[0], chosen)
    found = {name: jax.tree.map(lambda x, i=i: x[i], stacked) for i, name in enumerate(values)}
    for name in ("policy", "value"):
        scales = {"policy_scale": 0.0, "value_scale": 0.0, f"{name}_scale": 1.0}
        alone = replace(agent_config, loss=replace(agent_config.loss, **scales))
        _, _, (actor, critic) = learn_behaviour(state.nets, jnp.zeros(()), outcome, alone)
        nothing = jax.tree.map(jnp.zeros_like, state.nets)
        found[name] = replace(nothing, actor=actor, critic=critic)
    return found


def all_alone(
    obs: dict[str, Space], act: dict[str, Space], agent_config: DreamerConfig
) -> tuple[TrainState, Sequence, dict[str, Networks]]:
    state, sequence = world(obs, act, agent_config)
    find = jax.jit(lambda state, sequence: gradients(state, sequence, agent_config))
    return state, sequence, jax.device_get(find(state, sequence))


UNEVEN = {
    "policy_scale": 2.0,
    "value_scale": 0.5,
    "replay_value_scale": 0.7,
    "reward_scale": 3.0,
    "float_scale": 4.0,
}


@pytest.fixture(scope="module")
def vectors() -> tuple[TrainState, Sequence, dict[str, Networks]]:
    """Computed once, for two tests."""
    with jax.numpy_rank_promotion("raise"):
        return all_alone(VECTOR, ACTIONS, settings(**UNEVEN))


def reached(grads: Any) -> dict[str, set[str]]:
    return {
        loss: {
            field
            for field in FIELDS
            if any(np.any(leaf) for leaf in jax.tree.leaves(getattr(each, field)))
        }
        for loss, each in grads.items()
    }


@pytest.mark.parametrize(
    ("obs", "act", "loss", "others"),
    [
        (VECTOR, ACTIONS, UNEVEN, {}),
        (
            *MASKED,
            {"reward_grad": False, "replay_value_grad": False},
            {"reward": {"reward"}, "replay_value": {"critic"}},
        ),
        (
            VECTOR,
            ACTIONS,
            {"representation": "barlow"},
            {
                "reconstruction/vector": {"decoder"},
                "reconstruction/token": {"decoder"},
                "barlow": WORLD | {"extra"},
            },
        ),
    ],
    ids=["vectors", "masks", "barlow"],
)
def test_losses_move_the_networks_that_the_table_names(
    obs: dict[str, Space],
    act: dict[str, Space],
    loss: dict[str, Any],
    others: dict[str, set[str]],
    vectors: Any,
) -> None:
    """`others` are those of which the settings make an exception."""
    known = vectors if loss is UNEVEN else all_alone(obs, act, settings(**loss))
    state, _, grads = known
    found = reached(grads)
    stated = {
        name: set(TERMS[name.partition("/")[0]].trains.split()) for name in found.keys() - others
    }
    assert found == {**stated, **others}
    groups = {name.partition("/")[0] for name in found}
    absent = {"mask"} if state.nets.mask is None else set()
    assert groups - {"barlow"} == TERMS.keys() - absent, "each row of the table is shown"


def test_the_gradient_is_that_of_the_weighted_losses(vectors: Any) -> None:
    """Also where two losses move the critic, with weights of their own."""
    agent_config = settings(**UNEVEN)
    state, sequence, alone = vectors
    scales = weights(dict.fromkeys(alone, jnp.zeros(())), sequence.obs, agent_config)
    assert scales["value"] != scales["replay_value"]
    found = jax.jit(lambda *args: all_gradients(*args, agent_config)[2])(state, sequence)
    each = zip(*(jax.tree.leaves(alone[name]) for name in scales), strict=True)
    for (path, leaf), parts in zip(jax.tree_util.tree_leaves_with_path(found), each, strict=True):
        expected = sum(scale * part for scale, part in zip(scales.values(), parts, strict=True))
        limit = 1e-5 * np.abs(expected).max() + 1e-6
        np.testing.assert_allclose(leaf, expected, rtol=1e-3, atol=limit, err_msg=str(path))


def test_a_loss_that_the_table_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise be trained with the weight of another one."""
    row = world_model.Term(
        lambda nets, seen, config: seen.tokens.sum(-1), "reward_scale", "encoder"
    )
    monkeypatch.setitem(world_model.TERMS, "smoothness", row)  # type: ignore[arg-type]
    agent_config = settings()
    state, sequence = world(VECTOR, ACTIONS, agent_config)
    with pytest.raises(ConfigError, match=r"'smoothness'.*loss\.extra.*table"):
        jax.eval_shape(lambda state: all_gradients(state, sequence, agent_config)[0], state)


def test_learning_step_by_step_equals_learning_at_once() -> None:
    """The gradient of `behaviour_gradient` is that of the plain losses, with their weights."""
    state = perturbed(init_state(config(), VECTOR, ACTIONS, seed=1))
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    rollout = rollout_of(state, 5, 6, normal)
    targets = Targets(normal(5, 6), jnp.abs(normal(5, 6)), 3.0 * normal(5, 6), normal(5, 6))
    loss_config = LossConfig(policy_scale=2.0, value_scale=0.5)

    @jax.jit
    def stepwise(models: Any) -> Any:
        learned, grads = behaviour_gradient(*models, rollout, targets, loss_config)
        return 2.0 * learned.losses["policy"] + 0.5 * learned.losses["value"], grads

    def at_once(models: Any) -> jax.Array:
        actor, critic = models
        features = jax.tree.map(lambda x: x[:5], rollout.features)
        choices = actor(features)
        logp = action_log_prob(actor.actions, choices, rollout.actions, rank=2)
        entropy = sum(action_entropies(choices, rank=2).values(), jnp.zeros_like(logp))
        policy = policy_loss(logp, entropy, targets, loss_config).mean()
        value = value_loss(critic(features), targets, loss_config).mean()
        return 2.0 * policy + 0.5 * value

    models = (state.nets.actor, state.nets.critic)
    left, left_grads = stepwise(models)
    right, right_grads = jax.jit(jax.value_and_grad(at_once))(models)
    np.testing.assert_allclose(left, right, rtol=1e-5)
    for one, two in zip(jax.tree.leaves(left_grads), jax.tree.leaves(right_grads), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def rollout_of(state: TrainState, steps: int, rows: int, normal: Any) -> Rollout:
    """A rollout with random features and actions, and nothing predicted."""
    start = state.nets.dynamics.initial(rows)
    shapes = jax.eval_shape(
        lambda: imagine(state.nets, state.slow_critic, start, steps, jax.random.key(0))
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    actions = {
        name: normal(*x.shape) if x.dtype == jnp.float32 else (normal(*x.shape) > 0).astype(x.dtype)
        for name, x in shapes.actions.items()
    }
    features = jax.tree.map(lambda x: normal(*x.shape), shapes.features)
    result: Rollout = zeros._replace(features=features, actions=actions)
    return result


def test_imagination_is_same_in_the_form_of_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    state = perturbed(init_state(config(), VECTOR, ACTIONS, seed=1))
    rng = np.random.default_rng(0)
    start = State(*(jnp.asarray(rng.standard_normal((6, 16), np.float32)) for _ in range(2)))

    def run() -> Any:
        return jax.jit(lambda *args: imagine(*args, 4, jax.random.key(0)))(
            state.nets, state.slow_critic, start
        )

    on_cpu = run()
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    elsewhere = run()
    assert on_cpu.actions["move"].shape == (4, 6, 2)
    assert jax.tree.structure(on_cpu) == jax.tree.structure(elsewhere)
    for one, two in zip(jax.tree.leaves(on_cpu), jax.tree.leaves(elsewhere), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
