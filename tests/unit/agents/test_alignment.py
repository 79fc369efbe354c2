"""Which steps meet in the losses of actor and critic: imagination starts, bootstraps, rewards."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, config

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer import losses
from dreamfleet.agents.dreamer.config import LossConfig
from dreamfleet.agents.dreamer.features import embed_actions
from dreamfleet.agents.dreamer.learning import init_state
from dreamfleet.agents.dreamer.losses import ReturnRange
from dreamfleet.agents.dreamer.rssm import State

BATCH, TIME, STARTS = 3, 5, 2


def test_imagination_and_replay_meet_at_the_last_states(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def watch(name: str) -> None:
        original = getattr(losses, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen[f"{name} of"] = args
            seen[name] = original(*args, **kwargs)
            return seen[name]

        monkeypatch.setattr(losses, name, call)

    for name in ("imagine", "imagination_targets", "replay_value_losses"):
        watch(name)
    nets = init_state(config(), VECTOR, ACTIONS, seed=0).nets
    rng = np.random.default_rng(0)
    # Critics begin with zeros, which would make all returns equal.
    critic = jax.tree.map(
        lambda x: x + jnp.asarray(rng.standard_normal(x.shape, np.float32)), nets.critic
    )
    nets = replace(nets, critic=critic)
    model = config().model
    state = State(
        jnp.asarray(rng.standard_normal((BATCH, TIME, model.deter), np.float32)),
        jnp.asarray(rng.random((BATCH, TIME, model.stoch * model.classes), np.float32)),
    )
    obs = {
        "reward": jnp.asarray(rng.standard_normal((BATCH, TIME), np.float32)),
        "is_last": jnp.asarray(rng.random((BATCH, TIME)) < 0.5),
        "is_terminal": jnp.asarray(rng.random((BATCH, TIME)) < 0.5),
    }
    settings = LossConfig(imag_last=STARTS, imag_length=3)
    last = jax.tree.map(lambda x: x[:, -STARTS:], state)

    @jax.jit  # each operation alone would take longer to compile
    def meet(nets: Any, critic: Any, state: State, obs: Any, key: jax.Array) -> Any:
        range_ = ReturnRange.initial()
        losses.actor_critic_losses(nets, critic, state, obs, range_, settings, key)
        targets, _, _ = seen["imagination_targets"]
        found = (seen["imagine of"][2], seen["replay_value_losses of"][:6], targets)
        return *found, seen["imagine"]

    @jax.jit
    def expect(nets: Any, last: State, start: State, rollout: Any) -> Any:
        taken = {name: action[0] for name, action in rollout.actions.items()}
        dynamics = nets.dynamics
        vector = embed_actions(nets.actor.actions, taken, dynamics.dtype)
        following = dynamics.core(dynamics.enter(start), dynamics.embed_action(vector)).state
        return nets.critic(last), dist.twohot_mean(nets.critic(rollout.states)), following

    start, replayed, targets, rollout = meet(nets, critic, state, obs, jax.random.key(0))
    judged, values, following = expect(nets, last, start, rollout)
    for part, whole in zip(start, last, strict=True):
        np.testing.assert_array_equal(part, whole.reshape(BATCH * STARTS, -1))
    logits, slow, bootstrap, *rest = replayed
    np.testing.assert_allclose(logits, judged.swapaxes(0, 1), atol=1e-5)
    assert slow.shape == (STARTS, BATCH)
    assert not np.allclose(targets.returns[0], targets.returns[-1]), "or nothing is shown"
    np.testing.assert_array_equal(bootstrap.T.reshape(-1), targets.returns[0])
    for name, value in zip(("reward", "is_last", "is_terminal"), rest, strict=True):
        np.testing.assert_array_equal(value.T, obs[name][:, -STARTS:], err_msg=name)

    first = jax.tree.map(lambda x: x[0], rollout.states)
    for part, whole in zip(first, start, strict=True):
        np.testing.assert_array_equal(part, whole)
    np.testing.assert_allclose(rollout.value[:-1], values, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rollout.states.deter[1], following.deter, atol=1e-5)
