"""Heads, returns, actor-critic losses and optimizer reproduce the reference's numbers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_data import assert_close, fill, golden_name, loss_of, model_of, optimizer_of
from golden_files import Arrays, load, numbered, part

from dreamfleet import Space
from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.actor_critic import policy_loss, replay_value_losses, value_loss
from dreamfleet.agents.dreamer.config import DreamerConfig, LossConfig
from dreamfleet.agents.dreamer.features import Feature, action_features
from dreamfleet.agents.dreamer.heads import Head, Normal, Policy, action_entropies, action_log_prob
from dreamfleet.agents.dreamer.imagination import (
    Predicted,
    ReturnRange,
    imagined_targets,
    lambda_return,
)
from dreamfleet.agents.dreamer.optimizer import make_optimizer, stages
from dreamfleet.agents.dreamer.runtime.saving import named_leaves
from dreamfleet.agents.dreamer.train import init_state
from dreamfleet.agents.dreamer.world_model import continue_target

RNG = np.random.default_rng(0)


def features(data: Arrays) -> tuple[jax.Array]:
    return (jnp.asarray(data["in/feat"]),)


def make_head(data: Arrays, name: str, outputs: int) -> Head:
    model, layers = model_of(data), int(data["cfg/layers"])
    head = Head.init(RNG, data["in/feat"].shape[-1], model.units, layers, outputs, 1.0)
    return fill(head, name, part(data, "param/"))


def make_policy(data: Arrays) -> tuple[Policy, Feature]:
    """A policy with the one action of a file."""
    (name,) = {key.split("/")[0] for key in part(data, "param/pol/head/")}
    action = data["in/action"]
    shape = action.shape[2:]
    discrete = action.dtype.kind == "i"
    space = Space(np.int32, shape, 0, int(data["cfg/classes"])) if discrete else None
    (feature,) = action_features({name: space or Space(np.float32, shape)})
    policy = Policy.init(RNG, data["in/feat"].shape[-1], model_of(data), (feature,))
    return fill(policy, "actor", part(data, "param/")), feature


def assert_mean_close(logits: Any, expected: np.ndarray) -> None:
    """Two-hot means are sums of huge terms: compared to the sum of their magnitudes."""
    probs = np.asarray(jax.nn.softmax(jnp.asarray(logits), -1), np.float64)
    size = (probs * np.abs(dist.symexp_bins(probs.shape[-1]))).sum(-1)
    actual = np.asarray(dist.twohot_mean(jnp.asarray(logits)))
    assert np.all(np.abs(actual - expected) <= 1e-5 * size + 1e-6)


@pytest.mark.parametrize(
    ("file", "name"), [("07a_head_reward", "reward"), ("07e_head_value", "critic")]
)
def test_twohot_heads(file: str, name: str) -> None:
    data = load(file)
    bins = int(data["cfg/bins"])
    logits = make_head(data, name, bins)(features(data))
    assert_close(logits, data["out/logits"])
    target = dist.twohot_target(jnp.asarray(data["in/target"]), bins)
    assert_close(dist.twohot_loss(logits, target), data["out/loss"])
    assert_mean_close(logits, data["out/pred"])


@pytest.mark.parametrize("kind", ["wide", "peaked"])
def test_twohot_on_special_values(kind: str) -> None:
    data = load("07a_head_reward")
    logits, targets = jnp.asarray(data[f"direct/logits_{kind}"]), jnp.asarray(data["direct/target"])
    bins = logits.shape[-1]
    weights = dist.twohot_target(targets, bins)
    assert_close(weights, data["direct/target_weights_approx"])

    def losses(logits: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(logits[:, None], (len(logits), len(targets), bins))
        return dist.twohot_loss(rows, jnp.broadcast_to(weights[None], rows.shape))

    both = jax.jit(jax.grad(lambda x: (losses(x).sum(), losses(x)), has_aux=True))
    gradient, found = both(logits)
    assert_close(found, data[f"direct/loss_{kind}"])
    assert_mean_close(logits, data[f"direct/pred_{kind}"])
    assert_close(gradient, data[f"direct/grad_sum_loss_{kind}"], 1e-4)
    np.testing.assert_array_equal(
        dist.twohot_mean(jnp.zeros((1, bins))), data["direct/pred_zero_logits"]
    )


def test_continue_head() -> None:
    data = load("07b_head_continue")
    logit = make_head(data, "cont", 1)(features(data))[..., 0]
    assert_close(logit, data["out/logit"])
    target = continue_target(jnp.asarray(data["in/is_terminal"]), loss_of(data))
    assert_close(target, data["in/target"])
    assert_close(dist.bernoulli_loss(logit, target), data["out/loss"])
    assert_close(jax.nn.sigmoid(logit), data["out/prob"])
    logits, targets = jnp.meshgrid(data["direct/logit"], data["direct/targets"])
    assert_close(dist.bernoulli_loss(logits, targets), data["direct/loss"])


def test_categorical_policy() -> None:
    data = load("07c_policy_categorical")
    policy, action = make_policy(data)
    choices = policy(features(data))
    assert_close(choices[action.name], data["out/logits"])
    taken = {action.name: jnp.asarray(data["in/action"])}
    assert_close(action_log_prob((action,), choices, taken, 2), data["out/logp"])
    assert_close(action_entropies(choices, 2)[action.name], data["out/entropy"])
    # The published code leaves the uniform share out of the actor; with it, it would say this.
    mixed = {action.name: jnp.log(dist.unimix_probs(choices[action.name], 0.01))}
    assert_close(action_log_prob((action,), mixed, taken, 2), data["out/logp_if_unimix"])
    assert_close(action_entropies(mixed, 2)[action.name], data["out/entropy_if_unimix"])


def test_bounded_normal_policy() -> None:
    data = load("07d_policy_bounded_normal")
    policy, action = make_policy(data)
    choices = policy(features(data))
    choice = choices[action.name]
    assert isinstance(choice, Normal)
    assert_close(choice.mean, data["out/mean"])
    assert_close(choice.std, data["out/stddev"])
    taken = {action.name: jnp.asarray(data["in/action"])}
    assert_close(action_log_prob((action,), choices, taken, 2), data["out/logp"])
    assert_close(action_entropies(choices, 2)[action.name], data["out/entropy"])
    for name in ("min", "max"):
        expected = data[f"out/{name}ent_per_dim"]
        std = jnp.full(expected.shape, float(data[f"cfg/{name}std"]))
        assert_close(dist.normal_entropy(std), expected)


def test_bins_and_symlog() -> None:
    data = load("08_twohot_bins")
    for count in numbered(data, "out/bins_"):
        np.testing.assert_allclose(
            dist.symexp_bins(count), data[f"out/bins_{count}"], rtol=5e-6, atol=0
        )
    assert_close(dist.symlog(jnp.asarray(data["in/x"])), data["out/symlog"])
    assert_close(dist.symexp(jnp.asarray(data["in/y"])), data["out/symexp"])


def test_lambda_return() -> None:
    data = load("09_lambda_return")
    last, term, reward, boot, cont = (
        jnp.asarray(data[f"in/{name}"].astype(np.float32).T)
        for name in ("last", "term", "rew", "boot", "soft_con")
    )
    for i in numbered(data, "cfg/disc_"):
        disc, lam = float(data[f"cfg/disc_{i}"]), float(data[f"cfg/lam_{i}"])
        result = lambda_return(reward, last, term, boot, disc, lam)
        assert_close(result.T, data[f"out/ret_{i}"])
    soft = lambda_return(reward, jnp.zeros_like(last), 1.0 - cont, boot, 1.0, 0.95)
    assert_close(soft.T, data["out/ret_soft"])


def time_first(value: np.ndarray) -> jax.Array:
    return jnp.asarray(value).swapaxes(0, 1)


METRICS = {
    "adv": "adv",
    "adv_mag": "adv_mag",
    "adv_std": "adv_std",
    "ret": "return",
    "ret_max": "return_max",
    "ret_min": "return_min",
    "ret_rate": "return_rate",
    "slowval": "slow_value",
    "tar": "target",
    "val": "value",
    "weight": "weight",
}


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_imagination_losses(kind: str) -> None:
    discrete = kind == "discrete"
    data = load("10a_imag_loss_discrete" if discrete else "10b_imag_loss_continuous")
    choices_of = data["in/policy_logits"].shape[-1] if discrete else None
    shape = data["in/action"].shape[2:]
    space = Space(np.int32, shape, 0, choices_of) if discrete else Space(np.float32, shape)
    keys = action_features({"action": space})
    raw_names = ["policy_logits"] if discrete else ["policy_mean_raw", "policy_stddev_raw"]
    raw = [time_first(data[f"in/{name}"]) for name in raw_names]
    value_logits = time_first(data["in/value_logits"])
    actions = {"action": time_first(data["in/action"])}
    slow = dist.twohot_mean(time_first(data["in/slowvalue_logits"]))
    config = loss_of(data)
    before = ReturnRange(*(jnp.asarray(data[f"in/retnorm_{name}"]) for name in ("lo", "hi")))

    def run(raw: list[jax.Array], value_logits: jax.Array) -> Any:
        if discrete:
            choices: Any = {"action": raw[0]}
        else:
            choices = {"action": Normal(jnp.tanh(raw[0]), dist.bounded_std(raw[1], 0.1, 1.0))}
        logp = action_log_prob(keys, choices, actions, 2)
        entropy = action_entropies(choices, 2)["action"]
        heads = (time_first(data["in/rew"]), time_first(data["in/con"]))
        predicted = Predicted(*heads, dist.twohot_mean(value_logits), slow)
        targets, after, metrics = imagined_targets(predicted, before, config)
        targets = jax.lax.stop_gradient(targets)  # as imagination has none
        policy = policy_loss(logp[:-1], entropy[:-1], targets, config)
        value = value_loss(value_logits[:-1], targets, config)
        return policy.mean() + value.mean(), (policy, value, targets, after, metrics, logp, entropy)

    grads, results = jax.jit(jax.grad(run, (0, 1), has_aux=True))(raw, value_logits)
    policy, value, targets, after, metrics, logp, entropy = results
    assert_close(policy.T, data["out/loss_policy"])
    assert_close(value.T, data["out/loss_value"])
    assert_close(targets.returns.T, data["out/ret"])
    assert_close(logp.T, data["out/logp"])
    assert_close(entropy.T, data["out/entropy"])
    assert_close(after.low, data["out/retnorm_lo"])
    assert_close(after.high, data["out/retnorm_hi"])
    for name, gradient in zip(raw_names, grads[0], strict=True):
        assert_close(gradient.swapaxes(0, 1), data[f"out/grad_mean_{name}"], 1e-4)
    assert_close(grads[1].swapaxes(0, 1), data["out/grad_mean_value_logits"], 1e-4)
    for theirs, ours in METRICS.items():
        assert_close(metrics[ours], data[f"out/metric/{theirs}"])


def test_replay_value_losses() -> None:
    data = load("10c_repl_loss")

    def run(logits: jax.Array) -> Any:
        loss, returns = replay_value_losses(
            logits,
            dist.twohot_mean(time_first(data["in/slowvalue_logits"])),
            *(time_first(data[f"in/{name}"]) for name in ("boot", "rew", "is_last", "is_terminal")),
            loss_of(data),
        )
        return loss.mean(), (loss, returns)

    logits = time_first(data["in/value_logits"])
    grad, (loss, returns) = jax.jit(jax.grad(run, has_aux=True))(logits)
    assert_close(loss.T, data["out/loss_repval"])
    assert_close(returns.T, data["out/ret"])
    assert_close(grad.swapaxes(0, 1), data["out/grad_mean_value_logits"], 1e-4)


def test_optimizer() -> None:
    data = load("11_optimizer")
    config = optimizer_of(data)
    assert config.decay == 0, "the reference's annealing is another one"
    params = {k: jnp.asarray(v) for k, v in part(data, "in/param0/").items()}
    whole, single = make_optimizer(config), stages(config)
    state, states = whole.init(params), [stage.init(params) for stage in single]
    assert len(data["out/lr_at_update"]) > 0
    for n in range(len(data["out/lr_at_update"])):
        grads = {k: jnp.asarray(v) for k, v in part(data, f"in/grad{n}/").items()}
        x = grads
        for i, name in enumerate(("after_agc", "after_rms", "after_momentum")):
            with jax.numpy_dtype_promotion("standard"):
                x, states[i] = single[i].update(x, states[i], params)
            for key, expected in part(data, f"out/{name}{n}/").items():
                assert_close(x[key], expected, 5e-5)
        updates, state = whole.update(grads, state, params)
        for key, expected in part(data, f"out/update{n}/").items():
            assert_close(updates[key], expected, 5e-5)
        params = optax.apply_updates(params, updates)
        for key, expected in part(data, f"out/param{n + 1}/").items():
            assert_close(params[key], expected, 5e-5)


def test_return_normaliser() -> None:
    data = load("12_normalizer")
    kinds = {name.split("/")[0] for name in part(data, "cfg/")} - {"perc_debias"}
    assert kinds
    for kind in kinds:
        config = normaliser(data, kind)
        current = ReturnRange.initial()
        for n, batch in enumerate(data["in/x"]):
            current = current.update(jnp.asarray(batch), config)
            assert_close(current.low, data[f"out/{kind}/lo"][n])
            assert_close(current.high, data[f"out/{kind}/hi"][n])
            assert_close(current.low, data[f"out/{kind}/offset"][n])
            assert_close(current.scale(config), data[f"out/{kind}/scale"][n])


def normaliser(data: Arrays, kind: str) -> LossConfig:
    rate, limit = (float(data[f"cfg/{kind}/{name}"]) for name in ("rate", "limit"))
    return replace(LossConfig(), return_rate=rate, return_limit=limit)


def test_return_normaliser_leaves_only_the_debiasing_out() -> None:
    """No preset debiases; what is left out is one factor, known after each update."""
    data = load("12_normalizer")
    config = normaliser(data, "perc_debias")
    current = ReturnRange.initial()
    for n, batch in enumerate(data["in/x"]):
        current = current.update(jnp.asarray(batch), config)
        assert_close(current.low, data["out/perc_debias/lo"][n])
        assert_close(current.high, data["out/perc_debias/hi"][n])
        share = 1.0 - (1.0 - config.return_rate) ** (n + 1)
        debiased = ReturnRange(*(value / share for value in current))
        assert_close(debiased.low, data["out/perc_debias/offset"][n])
        assert_close(debiased.scale(config), data["out/perc_debias/scale"][n])


def world_of(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Space], dict[str, Space]]:
    """The observation with one square image and vectors, and the actions, of these parameters."""
    spaces, actions = {}, {}
    for name, shape in shapes.items():
        network, *rest, leaf = name.split("/")
        if leaf != "bias" or rest[:1] not in (["head"], ["vec"], ["imgout"]):
            continue
        if (network, rest[0]) == ("dec", "imgout"):
            stages = sum(each.startswith("enc/cnn") for each in shapes) // 3
            pixels = shapes["dec/sp2/bias"][0] // shapes["dec/spnorm/scale"][0]
            side = int(np.sqrt(pixels)) * 2**stages
            spaces["image"] = Space(np.uint8, (side, side, shape[0]))
        elif network in ("dec", "pol"):
            kind = Space(np.int32, (), 0, shape[0]) if rest[2] == "logits" else None
            where = spaces if network == "dec" else actions
            where[rest[1]] = kind or Space(np.float32, shape)
    return spaces, actions


def test_initial_parameters() -> None:
    data = load("19_init_stats")
    names = data["name"].tolist()
    shapes = {
        name: tuple(int(size) for size in shape.split(","))
        for name, shape in zip(names, data["shape"].tolist(), strict=True)
    }
    config = DreamerConfig(
        model=replace(model_of({}, shapes), stoch=shapes["dyn/dynin1/kernel"][0], classes=1)
    )
    state = init_state(config, *world_of(shapes), seed=0)
    ours = {
        golden_name(name.removeprefix("nets/"), names): np.asarray(leaf)
        for name, leaf in named_leaves(state).items()
        if name.startswith(("nets/", "slow_critic/"))
    }
    assert {name: value.shape for name, value in ours.items()} == shapes
    for name, mean, std in zip(names, data["mean"], data["expected_std"], strict=True):
        values = ours[name]
        if std == 0:
            np.testing.assert_array_equal(values, np.float32(mean))
            continue
        # Five standard errors of a standard deviation, and of a mean.
        assert abs(values.std() / std - 1) < 5 / np.sqrt(2 * values.size)
        assert abs(values.mean()) < 5 * std / np.sqrt(values.size)
        assert np.abs(values).max() <= 2 * 1.1368 * std * 1.001
