"""Each loss moves exactly the networks it should."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, config, random_batch

from dreamfleet.agents.dreamer.config import DreamerConfig, LossConfig
from dreamfleet.agents.dreamer.heads import action_entropies, action_log_prob
from dreamfleet.agents.dreamer.learning import TrainState, apply_context, init_state, sequence_loss
from dreamfleet.agents.dreamer.losses import (
    Predictions,
    Rollout,
    Targets,
    _features,
    imagine,
    learn_from,
    policy_loss,
    value_loss,
)
from dreamfleet.agents.dreamer.rssm import State

# Whole training steps are compiled, which takes minutes on a busy machine.
WORLD = {"encoder", "dynamics"}
REACH = {
    "reconstruction/vector": WORLD | {"decoder"},
    "reconstruction/token": WORLD | {"decoder"},
    "reward": WORLD | {"reward"},
    "continue": WORLD | {"cont"},
    "dynamics": WORLD,
    "representation": WORLD,
    "policy": {"actor"},
    "value": {"critic"},
    "replay_value": WORLD | {"critic"},
}


def perturbed(state: TrainState) -> TrainState:
    """Zero-initialised output layers would hide gradients behind them."""
    rng = np.random.default_rng(0)
    nets, slow = jax.tree.map(
        lambda x: x + 0.3 * jnp.asarray(rng.standard_normal(x.shape, np.float32)),
        (state.nets, state.slow_critic),
    )
    return state._replace(nets=nets, slow_critic=slow)


def gradients() -> dict[str, dict[str, float]]:
    """Norm of each loss's gradient for each network."""
    agent_config: DreamerConfig = config()
    state = perturbed(init_state(agent_config, VECTOR, ACTIONS, seed=0))
    batch = {k: jnp.asarray(v) for k, v in random_batch(VECTOR, ACTIONS).items()}
    carry = State(jnp.zeros((4, 16)), jnp.zeros((4, 16)))
    sequence = apply_context(carry, batch, 1, ("button", "keys", "move"))

    def norms(state: TrainState) -> Any:
        def losses(nets: Any) -> Any:
            return sequence_loss(nets, state, sequence, agent_config, update=True)[1].losses

        values, pullback = jax.vjp(losses, state.nets)
        assert set(values) == set(REACH)
        chosen = dict(zip(sorted(values), jnp.eye(len(values)), strict=True))
        # One backward pass is compiled, and run for each loss.
        return jax.lax.map(lambda seeds: sizes(pullback(seeds)[0]), chosen)

    def sizes(grads: Any) -> Any:
        return {
            field: sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(getattr(grads, field)))
            for field in ("encoder", "dynamics", "decoder", "reward", "cont", "actor", "critic")
        }

    found = jax.device_get(jax.jit(norms)(state))
    names = sorted(REACH)
    return {
        name: {field: sums[index] for field, sums in found.items()}
        for index, name in enumerate(names)
    }


def test_losses_reach_exactly_their_networks() -> None:
    reached = {
        loss: {field for field, norm in norms.items() if norm > 0}
        for loss, norms in gradients().items()
    }
    assert reached == REACH


def test_learning_step_by_step_equals_learning_at_once() -> None:
    """The gradient passed on by `learn_from` is that of the plain losses."""
    agent_config = config()
    nets = perturbed(init_state(agent_config, VECTOR, ACTIONS, seed=1)).nets
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    targets = Targets(normal(5, 6), jnp.abs(normal(5, 6)), 3.0 * normal(5, 6), normal(5, 6))
    states = State(normal(5, 6, 16), normal(5, 6, 16))
    actions = {
        "button": jnp.asarray(rng.integers(3, size=(5, 6)).astype(np.int32)),
        "keys": jnp.asarray(rng.integers(2, size=(5, 6, 2)).astype(np.int32)),
        "move": normal(5, 6, 2),
    }
    nothing = jnp.zeros((6, 6))
    rollout = Rollout(states, actions, nothing, Predictions(nothing, nothing, nothing))
    loss_config = LossConfig()

    def stepwise(models: Any) -> jax.Array:
        learned = learn_from(*models, rollout, targets, loss_config)
        return 2.0 * learned.policy + 0.5 * learned.value

    def at_once(models: Any) -> jax.Array:
        actor, critic = models
        acting, judging = _features([actor.mlp, critic.mlp], states)
        choices = actor.choices(acting)
        logp = action_log_prob(actor.actions, choices, actions, rank=2)
        entropy = sum(action_entropies(choices, rank=2).values(), jnp.zeros_like(logp))
        policy = policy_loss(logp, entropy, targets, loss_config).mean()
        return 2.0 * policy + 0.5 * value_loss(critic.out(judging), targets, loss_config).mean()

    models = (nets.actor, nets.critic)
    left, left_grads = jax.jit(jax.value_and_grad(stepwise))(models)
    right, right_grads = jax.jit(jax.value_and_grad(at_once))(models)
    np.testing.assert_allclose(left, right, rtol=1e-5)
    for one, two in zip(jax.tree.leaves(left_grads), jax.tree.leaves(right_grads), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_imagination_is_the_same_in_the_form_of_every_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert on_cpu.value.shape == (5, 6)
    assert jax.tree.structure(on_cpu) == jax.tree.structure(elsewhere)
    for one, two in zip(jax.tree.leaves(on_cpu), jax.tree.leaves(elsewhere), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
