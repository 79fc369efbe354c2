"""Which steps meet in the losses of actor and critic: imagination starts, bootstraps, rewards."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, config, random_batch

from dreamfleet.agents.dreamer import actor_critic, train
from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import LossConfig
from dreamfleet.agents.dreamer.features import embed_actions
from dreamfleet.agents.dreamer.train import TrainState, init_state, total_loss, without_context

BATCH, TIME, STARTS, LENGTH = 3, 5, 2, 3


def test_imagination_and_replay_meet_at_the_last_states(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called[name] = args
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    watch(train, "imagine")
    watch(actor_critic, "replay_value_losses")
    settings = replace(config(), loss=LossConfig(imag_last=STARTS, imag_length=LENGTH))
    state = init_state(settings, VECTOR, ACTIONS, seed=0)
    rng = np.random.default_rng(0)
    # Critics begin with zeros, which would make all returns equal.
    critic = jax.tree.map(
        lambda x: x + jnp.asarray(rng.standard_normal(x.shape, np.float32)), state.nets.critic
    )
    state = state._replace(nets=replace(state.nets, critic=critic), slow_critic=critic)
    batch = {
        key: jnp.asarray(value) for key, value in random_batch(VECTOR, ACTIONS, BATCH, TIME).items()
    }
    sequence = without_context(state, batch, settings)

    @jax.jit  # each operation alone would take longer to compile
    def meet(state: TrainState, sequence: Any) -> Any:
        _, outcome = total_loss(state.nets, state, sequence, settings, update=True)
        return called["imagine"][2], called["replay_value_losses"][:6], outcome

    @jax.jit
    def expect(nets: Any, last: Any, start: Any, rollout: Any) -> Any:
        taken = {name: action[0] for name, action in rollout.actions.items()}
        dynamics = nets.dynamics
        vector = embed_actions(nets.actor.actions, taken, dynamics.dtype)
        following = dynamics.core(dynamics.enter(start), dynamics.embed_action(vector)).state
        acted = jax.tree.map(lambda x: x[:LENGTH], rollout.features)
        judged = nets.critic(dynamics.features(last))
        return judged, dist.twohot_mean(nets.critic(acted)), following

    start, replayed, outcome = meet(state, sequence)
    last = jax.tree.map(lambda x: x[:, -STARTS:], outcome.seen.observed.states)
    targets, rollout = outcome.targets, outcome.rollout
    judged, values, following = expect(state.nets, last, start, rollout)
    for part, whole in zip(start, last, strict=True):
        np.testing.assert_array_equal(part, whole.reshape(BATCH * STARTS, -1))
    logits, slow, bootstrap, *rest = replayed
    np.testing.assert_allclose(logits, judged.swapaxes(0, 1), atol=1e-4)
    assert slow.shape == (STARTS, BATCH)
    assert not np.allclose(targets.returns[0], targets.returns[-1]), "or nothing is shown"
    np.testing.assert_array_equal(bootstrap.T.reshape(-1), targets.returns[0])
    for name, value in zip(("reward", "is_last", "is_terminal"), rest, strict=True):
        np.testing.assert_array_equal(value.T, sequence.obs[name][:, -STARTS:], err_msg=name)

    for part, whole in zip(rollout.features, start, strict=True):
        np.testing.assert_array_equal(part[0], whole)
    judged = targets.returns - targets.advantage * outcome.metrics["return_scale"]
    np.testing.assert_allclose(judged, values, rtol=1e-4, atol=1e-4 * np.abs(values).max())
    np.testing.assert_allclose(rollout.features[0][1], following.deter, atol=1e-5)
