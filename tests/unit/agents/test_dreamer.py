"""The agent behind its protocol: acting, training, reports, saving, and bad numbers."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import ACTIONS, FLAGS, MIXED, VECTOR, config, observations, random_batch

from dreamfleet import ConfigError, Space
from dreamfleet.agents import (
    Agent,
    Dreamer,
    NonFiniteError,
    SpaceError,
    StateMismatchError,
    find_agent,
)
from dreamfleet.agents.dreamer.config import DreamerConfig, LossConfig, size_preset
from dreamfleet.agents.dreamer.runtime import footprint as footprint_module
from dreamfleet.agents.dreamer.runtime.agent import _AHEAD
from dreamfleet.agents.dreamer.runtime.footprint import check_fit
from dreamfleet.agents.dreamer.runtime.saving import named_leaves
from dreamfleet.agents.dreamer.train import state_shapes, weights

# Whole training steps are compiled, which takes minutes on a busy machine.


@pytest.fixture(scope="module")
def shared() -> Dreamer:
    """One compiled agent for the tests that do not change it in ways others notice."""
    return Dreamer(MIXED, ACTIONS, config(), seed=1)


@pytest.fixture(scope="module")
def compiled() -> tuple[Dreamer, dict]:
    agent = Dreamer(VECTOR, ACTIONS, config())
    return agent, agent.save()


@pytest.fixture
def fresh(compiled: tuple[Dreamer, dict], tmp_path: Path) -> Dreamer:
    """An agent as new, which need not be compiled again: programs take long and much memory."""
    agent, state = compiled
    agent.load(state)
    set_execution(agent, dump_dir=str(tmp_path))
    return agent


def set_execution(agent: Dreamer, **settings: Any) -> None:
    """Change settings that make no difference to programs."""
    object.__setattr__(agent.config, "execution", config(**settings).execution)


def test_it_is_an_agent(shared: Dreamer) -> None:
    assert isinstance(shared, Agent)


def test_policy_answers_in_the_action_space(shared: Dreamer) -> None:
    carry = shared.init_policy(3)
    for step in range(3):
        carry, actions, outs = shared.policy(carry, observations(MIXED, 3, step))
    assert set(actions) == {"move", "button", "keys"}
    assert actions["move"].shape == (3, 2)
    assert actions["move"].dtype == np.float32
    for key in ("button", "keys"):
        assert all(ACTIONS[key].contains(row) for row in actions[key])
    assert outs["dyn/deter"].shape == (3, 16)
    assert outs["dyn/stoch"].shape == (3, 4, 4)
    np.testing.assert_array_equal(outs["dyn/stoch"].sum(-1), 1.0)


def test_impossible_choices_are_never_taken(shared: Dreamer) -> None:
    """Elements with 2 and 4 choices share one table; the first never shows a 2 or a 3."""
    carry, seen = shared.init_policy(64), []
    for step in range(4):
        carry, actions, _ = shared.policy(carry, observations(MIXED, 64, step))
        seen.append(actions["keys"])
    keys = np.concatenate(seen)
    assert keys[:, 0].max() == 1
    assert keys[:, 1].max() == 3


def test_greedy_actions_are_the_mode_at_sampled_states() -> None:
    sampling, greedy = (Dreamer(VECTOR, ACTIONS, config(), seed=3) for _ in range(2))
    obs = observations(VECTOR, 64)
    _, sampled, outs = sampling.policy(sampling.init_policy(64), obs, "eval")
    carry, actions, same = greedy.policy(greedy.init_policy(64), obs, "greedy")
    np.testing.assert_array_equal(outs["dyn/stoch"], same["dyn/stoch"])
    features = jnp.asarray(same["dyn/deter"]), jnp.asarray(same["dyn/stoch"].reshape(64, -1))
    choices = greedy._state.nets.actor(features)
    np.testing.assert_allclose(actions["move"], choices["move"].mean, rtol=1e-4, atol=1e-6)
    for name in ("button", "keys"):
        np.testing.assert_array_equal(actions[name], np.argmax(choices[name], -1))
        assert actions[name].dtype == sampled[name].dtype
        assert np.any(actions[name] != sampled[name])
    np.testing.assert_array_equal(carry["previous"]["move"], actions["move"])


def test_a_first_step_forgets_the_past(shared: Dreamer) -> None:
    fresh, used = shared.init_policy(2), shared.init_policy(2)
    for step in range(2):
        used, _, _ = shared.policy(used, observations(MIXED, 2, step))
    obs = observations(MIXED, 2, 9)
    obs["is_first"][:] = True
    _, _, left = shared.policy(fresh, obs)
    _, _, right = shared.policy(used, obs)
    np.testing.assert_array_equal(left["dyn/deter"], right["dyn/deter"])


def test_training_lowers_the_loss(fresh: Dreamer) -> None:
    agent = fresh
    carry, batch = agent.init_train(4), random_batch(VECTOR, ACTIONS)
    losses = []
    for _ in range(40):
        carry, outs, metrics = agent.train(carry, batch)
        losses.append(float(metrics["loss/reconstruction/vector"]))
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_array_equal(outs["replay"]["stepid"], batch["stepid"][:, 1:])
    assert outs["replay"]["dyn/deter"].shape == (4, 6, 16)
    assert outs["replay"]["dyn/stoch"].shape == (4, 6, 4, 4)
    assert int(metrics["opt/updates"]) == 40


@pytest.mark.timeout(900)  # the one optimised program among these tests takes longest to compile
def test_optimised_programs_compute_what_plain_ones_do() -> None:
    """All other tests compile without most optimisations; real runs compile with them."""

    def run() -> tuple[dict, dict, dict]:
        agent = Dreamer(VECTOR, ACTIONS, config())
        carry, batch = agent.init_train(4), random_batch(VECTOR, ACTIONS)
        # The second update is the first that moves parameters; after more, a rounding error may
        # tip a sample of the discrete latent state over.
        carry, _, _ = agent.train(carry, batch)
        _, outs, metrics = agent.train(carry, batch)
        return outs["replay"], metrics, agent.save()

    assert jax.config.values["jax_disable_most_optimizations"]
    plain = run()
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        optimised = run()
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    for left, right in zip(plain, optimised, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            np.testing.assert_allclose(left[key], right[key], rtol=2e-3, atol=1e-4, err_msg=key)


def test_the_first_update_changes_no_parameter(fresh: Dreamer) -> None:
    agent = fresh
    before = agent.save()
    agent.train(agent.init_train(4), random_batch(VECTOR, ACTIONS))
    after = agent.save()
    changed = {k for k in before if not np.array_equal(before[k], after[k])}
    assert not [name for name in changed if name.startswith("nets/")]
    for name in before:
        if name.startswith("slow_critic/"):
            np.testing.assert_allclose(before[name], after[name], rtol=1e-6)
    assert [name for name in changed if name.startswith("optimizer/")]


def test_an_update_carries_over_what_the_next_one_needs(fresh: Dreamer) -> None:
    agent = fresh
    carry, batch = agent.init_train(4), random_batch(VECTOR, ACTIONS)
    for _ in range(5):  # heads begin with zeros, and so do their returns
        carry, _, _ = agent.train(carry, batch)
    before = agent.save()
    agent.train(carry, batch)
    after = agent.save()
    slow = [name for name in before if name.startswith("slow_critic/")]
    for name in slow:
        learned = after[name.replace("slow_critic", "nets/critic", 1)]
        expected = 0.02 * learned + 0.98 * before[name]
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-7, err_msg=name)
    assert not all(np.array_equal(before[name], after[name]) for name in slow)
    returns = [name for name in before if name.startswith("returns/")]
    assert len(returns) == 2
    assert all(before[name] != after[name] for name in returns)


def test_the_actor_gets_new_parameters_and_knows_their_age(fresh: Dreamer) -> None:
    agent = fresh
    set_execution(agent, publish_every=2)
    carry, batch = agent.init_train(4), random_batch(VECTOR, ACTIONS)
    ages = []
    for _ in range(6):
        carry, _, _ = agent.train(carry, batch)
        agent._publisher.wait()
        agent.policy(agent.init_policy(1), observations(VECTOR, 1))
        ages.append(agent.metrics()["policy/updates_behind"])
    assert ages == [1, 0, 1, 0, 1, 0]
    acting = agent._publisher.newest().actor.mlp.layers[0].kernel
    np.testing.assert_array_equal(acting, agent._state.nets.actor.mlp.layers[0].kernel)
    agent.train(carry, batch)
    assert agent.metrics()["policy/updates_behind"] == 1
    agent.settle()
    assert agent.metrics()["policy/updates_behind"] == 0


def test_report_shows_losses_and_videos(shared: Dreamer) -> None:
    batch = random_batch(MIXED, ACTIONS, 4, 8)
    before = shared.save()
    _, metrics = shared.report(shared.init_report(4), batch)
    after = shared.save()
    assert all(np.array_equal(before[k], after[k]) for k in before), "a report changes nothing"
    for key in ("image", "depth"):
        video = metrics.pop(f"openloop/{key}")
        assert video.dtype == np.uint8
        # A frame a step; three images of 16 below each other, 4 beside.
        assert video.shape == (8, 3 * 16 + 4, 4 * 20, MIXED[key].shape[-1])
        truth = video[:, 2:18, 2:18]
        np.testing.assert_array_equal(truth, batch[key][0, 1:])
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())
    terms = {k.removeprefix("loss/"): v for k, v in metrics.items() if k.startswith("loss/")}
    scales = weights({name: jnp.asarray(x) for name, x in terms.items()}, batch, shared.config)
    assert metrics["loss"] == pytest.approx(sum(scales[name] * terms[name] for name in terms))


def test_every_loss_has_its_own_weight() -> None:
    loss = LossConfig(
        reconstruction_scale=2.0,
        float_scale=3.0,
        reward_scale=5.0,
        continue_scale=7.0,
        dynamics_scale=11.0,
        representation_scale=13.0,
        policy_scale=17.0,
        value_scale=19.0,
        replay_value_scale=23.0,
        mask_scale=29.0,
    )
    expected = {
        "reconstruction/vector": 6,
        "reconstruction/token": 2,
        "reconstruction/image": 2,
        "reconstruction/depth": 2,
        "reward": 5,
        "continue": 7,
        "dynamics": 11,
        "representation": 13,
        "policy": 17,
        "value": 19,
        "replay_value": 23,
        "mask": 29,
    }
    terms = dict.fromkeys(expected, jnp.zeros(()))
    found = weights(terms, random_batch(MIXED, ACTIONS), DreamerConfig(loss=loss))
    assert found == expected


def test_floats_are_weighed_by_the_variance_of_their_errors_up_to_a_bound() -> None:
    """1 / (2 variance): a key's loss is the sum over its elements, so the variance is its share."""
    batch = random_batch(MIXED, ACTIONS)
    terms = {"reconstruction/vector": 0.5, "reconstruction/token": 0.5, "reward": 0.5}

    def found(vector: float, **loss: Any) -> dict[str, float]:
        given = {**terms, "reconstruction/vector": vector}
        arrays = {name: jnp.asarray(value) for name, value in given.items()}
        settings = LossConfig(float_variance=True, reconstruction_scale=2.0, **loss)
        return jax.device_get(weights(arrays, batch, DreamerConfig(loss=settings)))

    # 5 elements with 0.1 each: 2 x 1 / 0.2.
    assert found(0.5, float_scale=100.0)["reconstruction/vector"] == pytest.approx(10.0)
    assert found(5.0, float_scale=100.0)["reconstruction/vector"] == pytest.approx(1.0)
    assert found(0.001, float_scale=100.0)["reconstruction/vector"] == pytest.approx(200.0)
    assert found(0.0, float_scale=100.0)["reconstruction/vector"] == pytest.approx(200.0)
    others = found(0.5, float_scale=100.0)
    assert (others["reconstruction/token"], others["reward"]) == (2.0, 1.0)
    # The weight is a number to the gradient.
    slope = jax.grad(
        lambda x: (
            weights(
                {"reconstruction/vector": x},
                batch,
                DreamerConfig(loss=LossConfig(float_variance=True, float_scale=100.0)),
            )["reconstruction/vector"]
            * x
        )
    )(jnp.asarray(0.5))
    assert float(slope) == pytest.approx(5.0)


SMALL_IMAGES = [
    ("cpu-tiny", 16, 2, 4),
    ("cpu-tiny", 24, 3, 3),
    ("cpu-tiny", 32, 3, 4),
    ("cpu-tiny", 64, 4, 4),
    ("cpu-tiny", 96, 4, 6),
    ("debug", 16, 2, 4),
    ("debug", 8, 1, 4),
]


@pytest.mark.parametrize(("size", "pixels", "stages", "smallest"), SMALL_IMAGES)
def test_small_images_go_through_fewer_stages(
    size: str, pixels: int, stages: int, smallest: int
) -> None:
    """The network needs 3 to 16 pixels at its end."""
    obs = {"image": Space(np.uint8, (pixels, pixels, 3))} | FLAGS
    settings = DreamerConfig(model=size_preset(size))
    nets = state_shapes(settings, obs, ACTIONS).nets
    encoder, decoder = nets.encoder, nets.decoder
    assert len(encoder.cnn) == len(decoder.image.stages) == stages
    assert decoder.image.size == (smallest, smallest)
    assert encoder.width == smallest**2 * encoder.cnn[-1].bias.shape[0]
    steps = jax.ShapeDtypeStruct((2, 3, pixels, pixels, 3), np.uint8)
    tokens = jax.eval_shape(lambda net, x: net({"image": x}), encoder, steps)
    assert tokens.shape == (2, 3, encoder.width)
    features = tuple(jnp.zeros((2, 3, width)) for width in nets.dynamics.widths)
    images = jax.eval_shape(lambda net: net(features)["image"], decoder)
    assert images.shape == steps.shape


@pytest.mark.parametrize(
    ("size", "shape", "words"),
    [
        ("cpu-tiny", (512, 512, 3), r"512x512.*multiples of 16 from 48 to 256.*size=\[64,64\]"),
        ("cpu-tiny", (64, 512, 3), "from 48 to 256"),
        ("cpu-tiny", (72, 72, 3), "multiples of 16.*resize it"),
        ("cpu-tiny", (30, 30, 3), "multiples of 8 .*because 3 stages"),
        ("cpu-tiny", (4, 4, 3), "multiples of 2 from 6 to 32"),
        ("debug", (128, 128, 3), "from 12 to 64"),
    ],
)
def test_images_that_do_not_fit_are_refused_with_the_fix(
    size: str, shape: tuple[int, int, int], words: str
) -> None:
    obs, settings = {"image": Space(np.uint8, shape)} | FLAGS, DreamerConfig(size_preset(size))
    with pytest.raises(SpaceError, match=words):
        find_agent("dreamer").check(obs, ACTIONS, settings)


def test_a_loaded_agent_continues_bit_for_bit(fresh: Dreamer) -> None:
    one = fresh
    carry, batch = one.init_train(4), random_batch(VECTOR, ACTIONS)
    for _ in range(3):
        carry, _, _ = one.train(carry, batch)
    saved = one.save()
    assert all(isinstance(v, np.ndarray | int | float | str) for v in saved.values())
    two = Dreamer(VECTOR, ACTIONS, config(), seed=7)
    two.load(saved)
    again = two.save()
    assert saved.keys() == again.keys()
    for key in saved:
        np.testing.assert_array_equal(saved[key], again[key])
    one.train(carry, batch)
    two.train(carry, batch)
    left, right = one.save(), two.save()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key])
    obs = observations(VECTOR, 2)
    _, action_one, _ = one.policy(one.init_policy(2), obs)
    _, action_two, _ = two.policy(two.init_policy(2), obs)
    np.testing.assert_array_equal(action_one["move"], action_two["move"])


def test_a_state_is_kept_while_training_goes_on(fresh: Dreamer) -> None:
    """Without a copy that training would wait for, and without looking at the last steps."""
    batch = random_batch(VECTOR, ACTIONS)
    carry = fresh.init_train(4)
    for _ in range(3):
        carry, _, _ = fresh.train(carry, batch)
    # A copy: what has no other reference may be overwritten.
    now = {name: np.array(value) for name, value in fresh.save().items()}
    later = fresh.save_later()
    for _ in range(2):
        carry, _, _ = fresh.train(carry, batch)
    kept, after = later(), fresh.save()
    assert kept.keys() == now.keys()
    for name, value in now.items():
        np.testing.assert_array_equal(kept[name], value, err_msg=name)
    assert any(not np.array_equal(kept[name], after[name]) for name in kept if "nets/" in name)
    assert not any(kept[name].flags.writeable for name in kept if "nets/" in name)
    shared = jax.tree.leaves(fresh._state.nets)[0]
    assert np.shares_memory(after["nets/" + _first_name(fresh)], np.asarray(shared)), "no copy"


def _first_name(agent: Dreamer) -> str:
    return next(iter(named_leaves(agent._state.nets)))


def test_a_state_that_is_kept_is_healthy_whatever_a_step_under_way_meets(fresh: Dreamer) -> None:
    before = fresh.save()
    bad = random_batch(VECTOR, ACTIONS)
    bad["vector"][:] = np.nan
    fresh.train(fresh.init_train(4), bad)
    step = fresh._unchecked.pop()  # as if it were under way, and not checked yet
    kept = fresh.save_later()()
    assert not fresh._state.healthy
    names = [name for name in before if not name.startswith("counters/")]
    for name in names:
        np.testing.assert_array_equal(kept[name], before[name], err_msg=name)
    fresh._unchecked.append(step)
    with pytest.raises(NonFiniteError):
        fresh.save_later()


def test_training_says_what_it_needs_and_is_refused_where_that_is_not_there(
    fresh: Dreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.train(fresh.init_train(4), random_batch(VECTOR, ACTIONS))
    found = fresh.memory()
    state, optimizer = jax.tree.leaves(fresh._state), jax.tree.leaves(fresh._state.optimizer)
    count = sum(leaf.nbytes for leaf in optimizer)
    assert found["optimizer"] == count
    assert found["parameters"] == sum(leaf.nbytes for leaf in state) - count
    assert found["activations"] > 0
    # The old state and the new one are there at the same time.
    assert found["step"] > 2 * sum(leaf.nbytes for leaf in state) + found["activations"]
    monkeypatch.setattr(footprint_module, "memory_limit", lambda: found["step"])
    check_fit(fresh.memory(), "cpu")
    monkeypatch.setattr(footprint_module, "memory_limit", lambda: found["step"] - 1)
    with pytest.raises(ConfigError, match=r"needs 0\.0 GB .*activations 0\.0 GB.*--batch-size"):
        fresh.compile(batch_size=4, batch_length=6)


def test_a_few_steps_are_profiled(fresh: Dreamer, tmp_path: Path) -> None:
    carry, batch = fresh.init_train(4), random_batch(VECTOR, ACTIONS)
    with fresh.trace(tmp_path):
        fresh.train(carry, batch)
    (profile,) = tmp_path.rglob("perfetto_trace.json.gz")
    assert profile.stat().st_size > 1000
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_regex_loads_a_part() -> None:
    one, two = (Dreamer(VECTOR, ACTIONS, config(), seed=seed) for seed in (0, 1))
    before = two.save()
    two.load(one.save(), regex=r"nets/(encoder|dynamics)/")
    after, source = two.save(), one.save()
    for key in after:
        expected = source if re.match(r"nets/(encoder|dynamics)/", key) else before
        np.testing.assert_array_equal(after[key], expected[key])
    with pytest.raises(StateMismatchError, match="No entry"):
        two.load(source, regex="nothing")


def test_every_mismatch_is_listed_at_once(shared: Dreamer) -> None:
    state = shared.save()
    names = sorted(name for name in state if name.startswith("nets/critic/"))
    missing, shape, dtype = names[:3]
    del state[missing]
    state[shape] = np.zeros((1, 2, 3), np.float32)
    state[dtype] = np.asarray(state[dtype]).astype(np.float64)
    state["surprise"] = np.zeros(1)
    with pytest.raises(StateMismatchError) as caught:
        shared.load(state)
    message = str(caught.value)
    assert "4 differences" in message
    for line in (
        f"missing: {missing}",
        f"shape of {shape}",
        f"dtype of {dtype}",
        "unknown: surprise",
    ):
        assert line in message


@pytest.mark.parametrize("bad", ["vector", "reward", "move", "dyn/deter"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_batches_stop_training(bad: str, value: float, tmp_path: Path, fresh: Dreamer) -> None:
    agent = fresh
    batch = random_batch(VECTOR, ACTIONS)
    batch["is_first"][:] = False
    index = 0 if bad == "dyn/deter" else 3
    batch[bad][1, index] = value
    before = np.array(agent._state.nets.dynamics.gates.kernel)
    carry, _, _ = agent.train(agent.init_train(4), random_batch(VECTOR, ACTIONS))
    carry, _, _ = agent.train(carry, batch)

    def go_on() -> None:
        for _ in range(1 + _AHEAD):
            agent.train(carry, random_batch(VECTOR, ACTIONS))

    with pytest.raises(NonFiniteError, match=f"batch/{bad}"):
        go_on()
    assert int(agent._state.updates) == 1, "nothing was learned since"
    np.testing.assert_array_equal(agent._state.nets.dynamics.gates.kernel, before)
    with pytest.raises(NonFiniteError, match=f"batch/{bad}"):
        agent.save()
    (dump,) = tmp_path.iterdir()
    with np.load(dump, allow_pickle=False) as data:
        assert json.loads(data["note"].tobytes())["first_bad"] == f"batch/{bad}"
        np.testing.assert_array_equal(data[bad.replace("/", ".")], batch[bad])


def test_the_devices_run_ahead_of_the_host(fresh: Dreamer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is sent although those before it are not done; the fourth before it has to be."""

    class Health:
        def __init__(self) -> None:
            self.ready = self.asked = False

        def is_ready(self) -> bool:
            return self.ready

        def __bool__(self) -> bool:
            self.asked = True
            return True

    sent: list[Health] = []

    def program(state: Any, *args: Any) -> tuple[Any, ...]:
        sent.append(Health())
        return state, sent[-1], {}, {}

    monkeypatch.setattr(fresh, "_train_program", program)
    batch = {"x": jnp.zeros(())}
    for _ in range(_AHEAD + 1):
        fresh.train(None, batch)
    assert [each.asked for each in sent] == [False] * (_AHEAD + 1)
    fresh.train(None, batch)
    assert [each.asked for each in sent] == [True] + [False] * (_AHEAD + 1)
    for each in sent:
        each.ready = True
    fresh.train(None, batch)
    assert [each.asked for each in sent] == [True] * (_AHEAD + 2) + [False]
    fresh._publisher.wait()


def test_nothing_is_updated_after_a_bad_number(fresh: Dreamer) -> None:
    agent = fresh
    before = agent.save()
    batch = random_batch(VECTOR, ACTIONS)
    batch["reward"][0, 2] = np.nan
    agent.train(agent.init_train(4), batch)
    with pytest.raises(NonFiniteError, match="updates"):
        agent.save()
    state = {**jax.device_get(agent._state)._asdict()}
    assert not state["healthy"]
    kernel = agent._state.nets.dynamics.gates.kernel
    np.testing.assert_array_equal(kernel, before["nets/dynamics/gates/kernel"])


def test_broken_parameters_are_named(fresh: Dreamer) -> None:
    agent = fresh
    state = agent.save()
    name = "nets/reward/out/bias"
    state[name] = np.full_like(state[name], np.nan)
    agent.load(state)
    agent.train(agent.init_train(4), random_batch(VECTOR, ACTIONS))
    with pytest.raises(NonFiniteError, match=name):
        agent.save()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_observations_are_refused(value: float, shared: Dreamer) -> None:
    obs = observations(MIXED, 2)
    obs["vector"][1, 0] = value
    with pytest.raises(NonFiniteError, match="Observation 'vector'"):
        shared.policy(shared.init_policy(2), obs)


def test_bad_actions_are_refused(fresh: Dreamer) -> None:
    agent = fresh
    state = agent.save()
    name = "nets/actor/outputs/move.mean/bias"
    state[name] = np.full_like(state[name], np.nan)
    agent.load(state)
    with pytest.raises(NonFiniteError, match="Action 'move'"):
        agent.policy(agent.init_policy(1), observations(VECTOR, 1))


def test_missing_values_are_allowed(fresh: Dreamer) -> None:
    agent = fresh
    batch = random_batch(VECTOR, ACTIONS)
    batch["vector"][0, 3] = -np.inf
    batch["token"][1, 2] = -1
    carry, _, _ = agent.train(agent.init_train(4), batch)
    _, _, metrics = agent.train(carry, batch)
    assert np.isfinite(float(metrics["opt/loss"]))


def test_stream_prefetches_and_passes_errors_on(shared: Dreamer) -> None:
    def batches():
        yield random_batch(MIXED, ACTIONS)
        raise OSError("the replay is gone")

    stream = shared.stream(batches())
    batch = next(stream)
    assert all(isinstance(value, jax.Array) for value in batch.values())
    with pytest.raises(OSError, match="gone"):
        next(stream)


@pytest.mark.parametrize(
    ("obs", "act", "words"),
    [
        ({"image": Space(np.uint8, (30, 30, 3))} | FLAGS, ACTIONS, "multiples of 4"),
        ({"image": Space(np.float32, (16, 16, 3))} | FLAGS, ACTIONS, "image_layout"),
        ({"cube": Space(np.float32, (2, 2, 2, 2))} | FLAGS, ACTIONS, "4 dimensions"),
        (FLAGS, ACTIONS, "holds only reward and flags"),
        ({"vector": Space(np.float32, (3,))}, ACTIONS, "lacks"),
        (VECTOR, {"reset": Space(bool)}, "holds only reset"),
        ({"big": Space(np.int32)} | FLAGS, ACTIONS, "split it into"),
    ],
)
def test_impossible_spaces_are_refused(obs: dict, act: dict, words: str) -> None:
    with pytest.raises(SpaceError, match=words):
        Dreamer(obs, act, config())


def test_an_unknown_platform_is_refused() -> None:
    with pytest.raises(ConfigError, match="no 'abacus' device"):
        Dreamer(VECTOR, ACTIONS, config(train_platform="abacus"))


def gradients(agent: Dreamer) -> dict[str, np.ndarray]:
    """Of the only update so far, up to a factor: what the optimizer has noted of them."""
    state = agent.save()
    squares, signs = "optimizer/1/nu/", "optimizer/2/ema/"
    return {
        name.removeprefix(squares): np.sqrt(value) * np.sign(state[name.replace(squares, signs)])
        for name, value in state.items()
        if name.startswith(squares)
    }


def test_bfloat16_computes_and_keeps_float32_parameters() -> None:
    """Losses and gradients are those of float32, but for rounding."""
    agent = Dreamer(VECTOR, ACTIONS, config(compute_dtype="bfloat16"))
    carry, batch = agent.init_train(4), random_batch(VECTOR, ACTIONS)
    carry, outs, metrics = agent.train(carry, batch)
    assert agent._publisher.newest().actor.mlp.layers[0].kernel.dtype == jnp.bfloat16
    assert outs["replay"]["dyn/deter"].dtype == jnp.float32
    assert all(v.dtype == np.float32 for k, v in agent.save().items() if k.startswith("nets/"))
    reference = Dreamer(VECTOR, ACTIONS, config())
    _, _, expected = reference.train(reference.init_train(4), batch)
    for name in ("loss/reconstruction/vector", "loss/reward", "loss/continue"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=0.03)
    low, high = gradients(agent), gradients(reference)
    for network in ("encoder", "dynamics", "decoder", "reward", "cont", "actor", "critic"):
        one, two = (
            np.concatenate([g.ravel() for k, g in grads.items() if k.startswith(f"{network}/")])
            for grads in (low, high)
        )
        lengths = np.linalg.norm(one), np.linalg.norm(two)
        assert one @ two / (lengths[0] * lengths[1]) > 0.97, network
        assert lengths[0] / lengths[1] == pytest.approx(1.0, abs=0.1), network
    _, actions, outs = agent.policy(agent.init_policy(2), observations(VECTOR, 2))
    assert outs["dyn/deter"].dtype == np.float32
    assert actions["move"].dtype == np.float32


def test_compiling_ahead_covers_what_follows_and_reports_measure_gradient_norms_on_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = Dreamer(VECTOR, ACTIONS, config(report_gradient_norms=True))
    with caplog.at_level("INFO", logger="dreamfleet.agents"):
        agent.compile(batch_size=4, batch_length=6, report_length=6, policy_batches=(2,))
        assert {"Compiling train", "Compiling report"} <= set(caplog.messages)
        caplog.clear()
        batch = random_batch(VECTOR, ACTIONS)
        _, metrics = agent.report(agent.init_report(4), batch)
        agent.train(agent.init_train(4), batch)
        agent.policy(agent.init_policy(2), observations(VECTOR, 2))
        assert not [message for message in caplog.messages if message.startswith("Compiling")]
    norms = {k: v for k, v in metrics.items() if k.startswith("gradient_norm/")}
    assert len(norms) == len([k for k in metrics if k.startswith("loss/")])
    assert all(value >= 0 for value in norms.values())
    assert norms["gradient_norm/reconstruction/vector"] > 0
