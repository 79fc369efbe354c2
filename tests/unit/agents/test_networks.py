"""Networks that settings name: what they are asked, and when they are refused."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import ACTIONS, FLAGS, VECTOR, config, observations, random_batch

from dreamfleet import ConfigError, Space
from dreamfleet.agents import Dreamer, DreamerConfig, SpaceError, find_agent
from dreamfleet.agents.dreamer.decoder import DefaultDecoder
from dreamfleet.agents.dreamer.dynamics import Dynamics
from dreamfleet.agents.dreamer.encoder import DefaultEncoder
from dreamfleet.agents.dreamer.interfaces import Decoder, Encoder
from dreamfleet.agents.dreamer.layers import Linear
from dreamfleet.agents.dreamer.rssm import RSSM

GRID = {"grid": Space(np.float32, (3, 4, 2))} | FLAGS


class GridEncoder(eqx.Module):
    """Takes what the default encoder refuses: floats in three dimensions."""

    layer: Linear
    width: int = eqx.field(static=True)

    @classmethod
    def check(cls, spaces, model):
        if "grid" not in spaces:
            raise SpaceError("There is no grid.")

    @classmethod
    def init(cls, rng, model, spaces):
        return cls(Linear.init(rng, int(np.prod(spaces["grid"].shape)), 6), 6)

    def __call__(self, obs):
        grid = obs["grid"].astype(self.layer.kernel.dtype)
        return jnp.tanh(self.layer(grid.reshape(*grid.shape[:2], -1)))


class WrongWidth(GridEncoder):
    def __call__(self, obs):
        return super().__call__(obs)[..., :2]


class WithNumber(GridEncoder):
    number: int = 3


class SameEncoder(DefaultEncoder):
    """A subclass may compute something else, so numpy must not stand in for it."""


class NoEncoder:
    width = 3


@pytest.fixture(autouse=True, scope="module")
def importable() -> Iterator[None]:
    """This file under a name that settings can use."""
    sys.modules["own_networks"] = sys.modules[__name__]
    yield
    del sys.modules["own_networks"]


def with_networks(encoder: str = "default", **execution: object) -> DreamerConfig:
    base = config(**execution)
    return replace(base, model=replace(base.model, encoder=encoder))


def test_the_default_networks_offer_what_is_asked_for() -> None:
    nets = Dreamer(VECTOR, ACTIONS, config())._state.nets
    assert isinstance(nets.encoder, Encoder)
    assert isinstance(nets.decoder, Decoder)
    assert isinstance(nets.dynamics, Dynamics)
    kinds = (type(nets.encoder), type(nets.decoder), type(nets.dynamics))
    assert kinds == (DefaultEncoder, DefaultDecoder, RSSM)


@pytest.fixture(scope="module")
def own(importable: None) -> Dreamer:
    """An agent with an encoder of its own that sends priorities: one program for both."""
    return Dreamer(GRID, ACTIONS, with_networks("own_networks:GridEncoder", send_priority=True))


def test_priorities_are_the_world_models_loss_at_each_step(own: Dreamer) -> None:
    assert find_agent("dreamer").sends_priority(own.config)
    assert not find_agent("dreamer").sends_priority(config())
    _, outs, metrics = own.train(own.init_train(4), random_batch(GRID, ACTIONS))
    priority = np.asarray(outs["replay"]["priority"])
    assert priority.shape == outs["replay"]["stepid"].shape[:2] == (4, 6)
    names = ("reward", "continue", "dynamics", "reconstruction/grid")
    expected = sum(float(metrics[f"loss/{name}"]) for name in names)
    expected += 0.1 * float(metrics["loss/representation"])
    assert priority.mean() == pytest.approx(expected, rel=1e-5)
    assert np.all(priority > 0)
    assert len(np.unique(priority)) > 1


def test_an_own_encoder_trains_and_acts_compiled(own: Dreamer) -> None:
    agent = own
    carry, batch, losses = agent.init_train(4), random_batch(GRID, ACTIONS), []
    before = agent.save()["nets/encoder/layer/kernel"]
    for _ in range(30):
        carry, _, metrics = agent.train(carry, batch)
        losses.append(float(metrics["loss/reconstruction/grid"]))
    assert losses[-1] < losses[0]
    assert not np.array_equal(before, agent.save()["nets/encoder/layer/kernel"])
    _, actions, stored = agent.policy(agent.init_policy(3), observations(GRID, 3))
    assert actions["move"].shape == (3, 2)
    assert stored["dyn/deter"].shape == (3, 16)


def test_the_chosen_encoder_says_which_observations_it_takes() -> None:
    dreamer = find_agent("dreamer")
    with pytest.raises(SpaceError, match=r"model\.encoder"):
        dreamer.check(GRID, ACTIONS, with_networks())
    dreamer.check(GRID, ACTIONS, with_networks("own_networks:GridEncoder"))
    with pytest.raises(SpaceError, match="no grid"):
        dreamer.check(VECTOR, ACTIONS, with_networks("own_networks:GridEncoder"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_networks:NoEncoder", "lacks check, init.*interfaces.Encoder"),
        ("own_networks:GRID", "is not a class"),
        ("own_networks:Missing", "has no 'Missing'"),
        ("own_networks:WrongWidth", r"must return one array of shape \(2, 3, 6\)"),
        ("own_networks:WithNumber", r"number is not a float array.*static=True"),
    ],
)
def test_what_is_no_encoder_is_refused_with_the_fix(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Dreamer(GRID, ACTIONS, with_networks(name))


def test_states_saved_under_older_names_load(tmp_path: Path) -> None:
    agent = Dreamer(VECTOR, ACTIONS, config())
    agent.train(agent.init_train(4), random_batch(VECTOR, ACTIONS))
    saved = agent.save()
    old = {}
    for name, value in saved.items():
        if name.startswith("optimizer/"):
            name = name.replace("/count", "/seen").replace("/1/nu/", "/1/average/")
            name = name.replace("/2/ema/", "/2/average/")
        old[name] = value
    assert old.keys() != saved.keys()
    other = Dreamer(VECTOR, ACTIONS, config(), seed=4)
    other.load(old)
    assert jax.tree.all(jax.tree.map(np.array_equal, saved, other.save()))
