"""Losses and sequence models of one's own, and the built-in loss that is written as one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, config, observations, random_batch
from own_parts import OWN_LOSSES

from dreamfleet import ConfigError, RunConfig
from dreamfleet.agents import Dreamer, DreamerConfig, find_agent
from dreamfleet.agents.dreamer.dynamics import Observed
from dreamfleet.agents.dreamer.features import embed_actions
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.rssm import State
from dreamfleet.agents.dreamer.train import init_state, without_context
from dreamfleet.agents.dreamer.world_model import Barlow, Seen


def with_losses(extra: dict[str, float], **loss: Any) -> DreamerConfig:
    base = config()
    return replace(base, loss=replace(base.loss, extra=extra, **loss))


# --- losses --------------------------------------------------------------------------------------


def test_losses_of_ones_own_train_with_their_weights() -> None:
    """Of steps, of rows and of the whole batch; with and without parameters; beside barlow."""
    settings = with_losses(OWN_LOSSES, representation="barlow", barlow_scale=0.3)
    assert set(OWN_LOSSES) == set(RunConfig(agent_config=settings).named_code)
    agent = Dreamer(VECTOR, ACTIONS, settings)
    before = agent.save()
    own = {name for name in before if name.startswith("nets/extra/")}
    assert {name.split("/")[2] for name in own} == {"Forward", "Contrast", "barlow"}
    carry, batch, losses = agent.init_train(4), random_batch(VECTOR, ACTIONS), []
    for _ in range(60):
        carry, _, metrics = agent.train(carry, batch)
        losses.append({name: float(x) for name, x in metrics.items()})
    for name in ("loss/Forward", "loss/Contrast", "loss/Quiet", "loss/barlow"):
        assert losses[-1][name] < losses[0][name], name
    after = agent.save()
    assert all(not np.array_equal(before[name], after[name]) for name in own)
    first = losses[0]
    scales = {"Forward": 0.5, "Contrast": 0.2, "Quiet": 10.0, "barlow": 0.3}
    scales |= {"representation": 0.1, "replay_value": 0.3}
    terms = {name.removeprefix("loss/"): x for name, x in first.items() if name[:5] == "loss/"}
    expected = sum(scales.get(name, 1.0) * x for name, x in terms.items())
    assert first["opt/loss"] == pytest.approx(expected, rel=1e-5)


def test_barlow_is_the_published_formula() -> None:
    rng = np.random.default_rng(0)
    deter, stoch, tokens = (rng.standard_normal((3, 7, n), np.float32) for n in (4, 6, 5))
    tokens = 3.0 * tokens + 1.0
    kernel = rng.standard_normal((10, 5), np.float32)
    seen = Seen({}, None, jnp.asarray(tokens), None, (jnp.asarray(deter), jnp.asarray(stoch)), {})
    found = Barlow(jnp.asarray(kernel))(seen)

    def standardised(x: np.ndarray) -> np.ndarray:
        flat = x.reshape(21, 5).astype(np.float64)
        return (flat - flat.mean(0)) / (flat.std(0) + 1e-8)

    left = standardised(np.concatenate([deter, stoch], -1) @ kernel)
    correlation = left.T @ standardised(tokens) / 21
    diagonal = np.diag(correlation)
    others = correlation - np.diag(diagonal)
    expected = np.square(diagonal - 1).sum() + 5e-4 * np.square(others).sum()
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_barlow_survives_a_coordinate_that_does_not_vary() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((3, 7, 5), np.float32)
    tokens[..., 2] = 4.0
    features = jnp.asarray(rng.standard_normal((3, 7, 10), np.float32)).at[..., 1].set(0.0)
    kernel = jnp.asarray(rng.standard_normal((10, 5), np.float32)).at[:, 3].set(0.0)

    def loss(barlow: Barlow, features: jax.Array) -> jax.Array:
        return barlow(Seen({}, None, jnp.asarray(tokens), None, (features,), {}))

    value, grads = jax.value_and_grad(loss, (0, 1))(Barlow(kernel), features)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((value, grads)))


class NoLoss(eqx.Module):
    @classmethod
    def init(cls, *_: Any) -> Any:
        return cls()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_own_parts:NoLoss", r"loss\.extra=.*lacks couples_rows, .*interfaces\.ExtraLoss"),
        ("test_own_parts:VECTOR", "is not a class"),
    ],
)
def test_what_is_no_loss_is_refused_with_the_fix(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(ConfigError, match=words):
        Dreamer(VECTOR, ACTIONS, with_losses({name: 1.0}))


def test_losses_that_would_hide_each_other_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """Metrics and checkpoints name a loss by its class."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "other_parts.py").write_text(
        "from own_parts import Quiet\nclass reward(Quiet):\n    pass\n"
    )
    for extra in ({"own_parts:Quiet": 1.0, "other_parts:Quiet": 2.0}, {"other_parts:reward": 1.0}):
        with pytest.raises(ConfigError, match="two losses are called"):
            Dreamer(VECTOR, ACTIONS, with_losses(extra))


def test_a_loss_without_rows_has_to_say_that_they_meet_in_it() -> None:
    """One device would not notice; several would each compute something else."""
    agent = Dreamer(VECTOR, ACTIONS, with_losses({"own_parts:Whole": 1.0}))
    with pytest.raises(ConfigError, match=r"Whole .*shape \(\).*couples_rows=True"):
        agent.train(agent.init_train(4), random_batch(VECTOR, ACTIONS))


# --- a sequence model that stores nothing --------------------------------------------------------


def forgetful(context: int) -> DreamerConfig:
    base = config(replay_context=context)
    return replace(base, model=replace(base.model, dynamics="own_parts:Forgetful"))


def unstored(context: int) -> dict[str, np.ndarray]:
    """A batch as a replay sends it, which marks the first step of every sequence."""
    batch = random_batch(VECTOR, ACTIONS, context=context)
    batch["is_first"][:, 0] = True
    return {key: value for key, value in batch.items() if not key.startswith("dyn/")}


def test_a_sequence_starts_from_the_context_where_no_states_are_stored() -> None:
    context, settings = 3, forgetful(3)
    state = init_state(settings, VECTOR, ACTIONS, seed=0)
    batch = {key: jnp.asarray(value) for key, value in unstored(context).items()}

    @jax.jit
    def observed(nets: Networks, batch: dict[str, jax.Array]) -> Observed:
        """Step by step, as the policy does."""
        carry: State = nets.dynamics.initial(4)
        for step in range(context):
            at = slice(step, step + 1)
            obs = {key: batch[key][:, at] for key in VECTOR}
            before = {
                key.name: batch[key.name][:, slice(step - 1, step) if step else at]
                for key in nets.actor.actions
            }
            actions = embed_actions(nets.actor.actions, before, jnp.dtype("float32"))
            uniform = jnp.full((4, 1, nets.dynamics.draws), 0.5)
            found = nets.dynamics.observe(
                carry, nets.encoder(obs), actions, obs["is_first"], uniform
            )
            carry = jax.tree.map(lambda x: x[:, 0], found.states)
        return carry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "uniform", lambda key, shape: jnp.full(shape, 0.5))
        sequence = without_context(state, batch, settings)
    expected = observed(state.nets, batch)
    for one, two in zip(sequence.carry, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    assert np.any(expected.deter)
    np.testing.assert_array_equal(sequence.obs["vector"], batch["vector"][:, context:])
    np.testing.assert_array_equal(sequence.previous["move"], batch["move"][:, context - 1 : -1])


def test_a_sequence_model_without_stored_states_trains_and_acts() -> None:
    context, settings = 3, forgetful(3)
    dreamer = find_agent("dreamer")
    assert dreamer.stored_space(VECTOR, ACTIONS, settings) == {}
    assert dreamer.context(settings) == context
    agent = Dreamer(VECTOR, ACTIONS, settings)
    carry, losses = agent.init_train(4), []
    for _ in range(30):
        carry, outs, metrics = agent.train(carry, unstored(context))
        losses.append(float(metrics["loss/reconstruction/vector"]))
    assert losses[-1] < 0.8 * losses[0]
    assert outs == {}, "there is nothing to write back"
    _, reported = agent.report(agent.init_report(4), unstored(context))
    assert np.isfinite(reported["loss"])
    memory = agent.init_policy(3)
    for step in range(2):
        memory, actions, stored = agent.policy(memory, observations(VECTOR, 3, step))
    assert actions["move"].shape == (3, 2)
    assert stored == {}
    seen = {key: np.asarray(value[0]) for key, value in observations(VECTOR, 1).items()}
    taken = {key: np.asarray(value[0]) for key, value in actions.items()}
    _, guess = agent.world_model().observe(None, seen, taken, 1, 0)
    assert np.isfinite(guess.reward)
    assert agent.world_model().stored({"dyn/deter": np.zeros(16)}) is None
