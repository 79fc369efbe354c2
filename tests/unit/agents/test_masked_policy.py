"""Dreamer with a mask of actions: acting, both ways to compute it, learning and imagining."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import FLAGS, VECTOR, config, observations, random_batch
from fleet_parts import parts, rows, small_run
from masked_parts import DOORS, Doors, doors_of

from dreamfleet import Space
from dreamfleet.agents import Dreamer, LossConfig, OptimizerConfig
from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.actor_critic import behaviour_gradient
from dreamfleet.agents.dreamer.features import action_features
from dreamfleet.agents.dreamer.heads import (
    Policy,
    action_entropies,
    action_log_prob,
    predicted_mask,
    sample_actions,
)
from dreamfleet.agents.dreamer.imagination import Rollout, Targets, imagine
from dreamfleet.agents.dreamer.train import init_state
from dreamfleet.agents.dreamer.world_model import mask_loss
from dreamfleet.envs import make_env
from dreamfleet.masks import ActionMask
from dreamfleet.parallel import combined

BUTTON = (
    VECTOR | {"action_mask": Space(np.int32, (4,), 0, 2)},
    {"button": Space(np.int32, (), 1, 5), "reset": Space(bool)},
)
KEYS = (
    VECTOR | {"action_mask": Space(bool, (7,))},
    {"keys": Space(np.int32, (3,), 0, [2, 4, 1]), "reset": Space(bool)},
)
WORLDS = pytest.mark.parametrize(("obs", "act"), [BUTTON, KEYS], ids=["one", "several"])
Spaces = dict[str, Space]


def mask_of(obs: Spaces, act: Spaces) -> ActionMask:
    found = ActionMask.of(obs, act)
    assert found is not None
    return found


def eager(agent: Dreamer) -> None:
    """Give the policy strong preferences, so that only the mask keeps it from some actions."""
    nets = agent._state.nets
    louder = jax.tree.map(lambda leaf: 300.0 * leaf, nets.actor.outputs)
    nets = eqx.tree_at(lambda each: each.actor.outputs, nets, louder)
    agent._state = agent._state._replace(nets=nets)
    agent.load(agent.save())


@WORLDS
def test_forbidden_actions_are_never_taken(obs: Spaces, act: Spaces) -> None:
    agent = Dreamer(obs, act, config(), seed=1)
    eager(agent)
    mask = mask_of(obs, act)
    carry, taken = agent.init_policy(256), set()
    for step, mode in enumerate(("train", "eval", "greedy", "train")):
        inputs = observations(obs, 256, step)
        carry, actions, _ = agent.policy(carry, inputs, mode)  # type: ignore[arg-type]
        chosen = actions[mask.name]
        for row, given in zip(chosen, inputs["action_mask"], strict=True):
            assert mask.allows(given, row)
        taken |= set(chosen.ravel().tolist())
    assert len(taken) > 2
    empty = {**inputs, "action_mask": np.zeros_like(inputs["action_mask"])}
    before = agent.metrics()["policy/empty_masks"]
    agent.policy(carry, {**empty, "is_last": np.ones(256, bool)})
    assert agent.metrics()["policy/empty_masks"] == before
    agent.policy(carry, {**empty, "is_last": np.zeros(256, bool)})
    assert agent.metrics()["policy/empty_masks"] == before + 1


def test_rounding_never_draws_what_has_no_probability() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5000, 17)).astype(np.float32)
    allowed = rng.random((5000, 17)) < 0.3
    allowed[:, 0], allowed[:, -1] = False, False
    allowed[:, 5] |= ~allowed.any(-1)
    probs = np.array(jax.nn.softmax(jnp.where(allowed, logits, -1e9), -1))
    assert np.all(probs[~allowed] == 0.0)
    largest = np.nextafter(np.float32(1), np.float32(0))
    for uniform in (0.0, float(largest), 0.5):
        numbers = np.full(5000, uniform, np.float32)
        # As if the sums had been rounded down by more than they ever are.
        for scale in (1.0, 0.999):
            table = probs * np.float32(scale)
            index = np.asarray(dist.sample_possible(jnp.asarray(table), jnp.asarray(numbers)))
            assert allowed[np.arange(5000), index].all()
    random, plain = jnp.asarray(rng.random(5000, np.float32)), jax.nn.softmax(logits, -1)
    np.testing.assert_array_equal(
        dist.sample_possible(plain, random), dist.sample_index(plain, random)
    )


def test_log_probabilities_entropies_and_gradients_are_those_of_the_allowed() -> None:
    obs, act = KEYS
    mask, features = mask_of(obs, act), action_features(act)
    nets = init_state(config(), obs, act, seed=0).nets
    rng = np.random.default_rng(0)
    parts = (jnp.asarray(rng.normal(size=(6, 16)), jnp.float32), jnp.zeros((6, 16), jnp.float32))
    given = np.stack([obs["action_mask"].sample(rng) for _ in range(6)])
    given[0], given[1] = 0, 1
    allowed = jnp.asarray(mask.allowed(given))
    noise = {mask.name: jnp.asarray(rng.random((6, *act[mask.name].shape)), jnp.float32)}

    def score(actor: Policy) -> tuple[jax.Array, Any]:
        choices = actor(parts, allowed)
        actions = sample_actions(features, choices, noise, masked=True)
        log_prob = action_log_prob(features, choices, actions, rank=1)
        entropy = action_entropies(choices, rank=1)[mask.name]
        return jnp.sum(log_prob + entropy), (choices[mask.name], log_prob, entropy)

    (_, (logits, log_prob, entropy)), grads = jax.value_and_grad(score, has_aux=True)(nets.actor)
    probs = np.asarray(jax.nn.softmax(logits, -1))
    assert np.all(probs[~np.asarray(allowed)] == 0.0)
    assert np.all(np.isfinite(jax.nn.log_softmax(logits, -1)))
    assert np.all(np.isfinite(log_prob))
    # The policy begins almost uniform.
    expected = np.log(np.asarray(allowed).sum(-1)).reshape(6, -1).sum(-1)
    np.testing.assert_allclose(entropy, expected, atol=0.01)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


def test_the_predicted_mask_allows_what_is_likely_and_at_least_the_likeliest() -> None:
    mask = mask_of(*KEYS)
    logits = jnp.asarray([[-1.0, 2.0, -3.0, -0.5, -2.0, -4.0, -9.0]])
    expected = [[[0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]]
    np.testing.assert_array_equal(predicted_mask(mask, logits), expected)


def test_the_policy_learns_nothing_where_it_had_no_choice() -> None:
    """The policy loss is that of the masked distribution, which is certain of its only choice."""
    state = init_state(config(), *BUTTON, seed=0)
    nets, zeros, ones = state.nets, jnp.zeros((2, 3)), jnp.ones((2, 3))
    start = nets.dynamics.initial(3)
    shapes = jax.eval_shape(lambda: imagine(nets, state.slow_critic, start, 2, jax.random.key(0)))
    index = jnp.asarray([[0, 1, 2], [3, 2, 1]], jnp.int32)
    rollout: Rollout = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)._replace(
        actions={"button": index + 1}, allowed=jax.nn.one_hot(index, 4, dtype=bool)
    )
    targets = Targets(ones, ones, ones, zeros)

    @jax.jit
    def learn(actor: Policy, rollout: Rollout) -> Any:
        found, (grads, _) = behaviour_gradient(actor, nets.critic, rollout, targets, LossConfig())
        return found.losses["policy"], found.entropies["button"], grads

    loss, entropy, grads = learn(nets.actor, rollout)
    assert float(loss) == float(entropy) == 0.0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))
    free = rollout._replace(allowed=jnp.ones((2, 3, 4), bool))
    _, entropy, grads = learn(nets.actor, free)
    assert float(entropy) > 1.0
    assert any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_an_empty_mask_teaches_nothing() -> None:
    mask, logits = mask_of(*BUTTON), jnp.zeros((2, 4))
    given = jnp.asarray([[1, 0, 0, 1], [0, 0, 0, 0]], jnp.int32)
    np.testing.assert_allclose(mask_loss(mask, logits, given), [4 * np.log(2), 0.0], rtol=1e-6)


def test_nothing_changes_for_tasks_without_a_mask() -> None:
    act = BUTTON[1]
    with_mask, without = (init_state(config(), o, act, seed=0).nets for o in (BUTTON[0], VECTOR))
    assert without.mask is None
    assert without.actor.mask is None
    assert with_mask.mask is not None
    assert "action_mask" not in with_mask.decoder.outputs
    # A mask alone is enough to observe.
    alone = {"action_mask": BUTTON[0]["action_mask"], **FLAGS}
    assert init_state(config(), alone, act, seed=0).nets.mask is not None


def doors(number: int = 0) -> Any:
    return make_env(Doors, seed=number)


def doors_batch(agent: Dreamer, size: int = 4, length: int = 6) -> dict[str, np.ndarray]:
    """What a replay would hold of environments that are played by the agent."""
    batch = random_batch(agent.obs_space, agent.act_space, size, length)
    for row in range(size):
        env, carry = doors(row), agent.init_policy(1)
        action: dict[str, Any] = {"door": 0, "reset": True}
        for step in range(length + 1):
            obs = env.step(action)
            inputs = {key: np.asarray(value)[None] for key, value in obs.items()}
            carry, chosen, outs = agent.policy(carry, inputs)
            for key, value in {**inputs, **chosen, **outs}.items():
                batch[key][row, step] = value[0]
            action = {"door": chosen["door"][0], "reset": obs["is_last"]}
    return batch


def test_it_learns_the_mask_imagines_with_it_and_plays_in_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Doors, "tried", [])
    env = doors()
    quick = replace(config(), optimizer=OptimizerConfig(learning_rate=1e-2, warmup=2))
    agent = Dreamer(env.obs_space, env.act_space, quick)
    batch = doors_batch(agent, length=11)
    assert batch["is_last"].any(), "masks of last steps are empty"
    carry, losses = agent.init_train(4), []
    for _ in range(200):
        carry, _, metrics = agent.train(carry, batch)
        losses.append(float(metrics["loss/mask"]))
        assert np.isfinite(float(metrics["loss/policy"]))
    assert losses[0] > 2.0
    assert losses[-1] < 0.3, losses[::20]
    carry, outs, _ = agent.train(agent.init_train(4), batch)
    latent, nets = outs["replay"], agent._state.nets
    assert nets.mask is not None
    assert nets.actor.mask is not None
    entries = {
        name: jnp.asarray(latent[name]).reshape(44, 1, *latent[name].shape[2:])
        for name in agent.stored_space
    }
    start = nets.dynamics.truncate(entries)
    rooms, ended = (batch[key][:, 1:].ravel() for key in ("room", "is_last"))
    logits = nets.mask(nets.dynamics.features(start))
    predicted = np.asarray(predicted_mask(nets.actor.mask, logits))
    truth = np.stack([doors_of(room) for room in rooms]).astype(bool)
    assert (predicted == truth)[~ended].mean() > 0.95
    rollout = imagine(nets, agent._state.slow_critic, start, 3, jax.random.key(0))
    assert rollout.allowed is not None
    allowed = np.asarray(rollout.allowed)
    assert allowed.shape == (3, 44, DOORS)
    assert not allowed.all()
    taken = np.asarray(rollout.actions["door"])
    assert np.take_along_axis(allowed, taken[..., None], -1).all()
    run = small_run(
        tmp_path, launcher="serial", steps=300, eval_envs=1, train_ratio=11.0,
        batch_size=4, batch_length=11, report_every=0.0,
    )  # fmt: skip
    run = run.changed({"agent": "dreamer", "dreamer.model": "debug"})
    fleet = parts(run, make_agent=lambda: agent, make_env_train=doors, make_env_eval=doors)
    updates = agent._updates
    combined(**fleet, args=run)
    assert agent._updates > updates
    assert agent.metrics()["policy/empty_masks"] == 0
    assert Doors.tried == []
    metrics = rows(tmp_path / "metrics.jsonl")
    assert any("train/loss/mask" in row for row in metrics)
