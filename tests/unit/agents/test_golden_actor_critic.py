"""Heads, returns, actor-critic losses and optimizer reproduce the reference's numbers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_data import assert_close, fill, golden_name, load, part

from dreamfleet import Space
from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import (
    DreamerConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    size_preset,
)
from dreamfleet.agents.dreamer.features import action_features
from dreamfleet.agents.dreamer.heads import Head, Normal, Policy, action_entropies, action_log_prob
from dreamfleet.agents.dreamer.learning import init_state
from dreamfleet.agents.dreamer.losses import (
    Predictions,
    ReturnRange,
    continue_target,
    imagination_targets,
    lambda_return,
    policy_loss,
    replay_value_losses,
    value_loss,
)
from dreamfleet.agents.dreamer.optimizer import make_optimizer, stages
from dreamfleet.agents.dreamer.rssm import State
from dreamfleet.agents.dreamer.saving import named_leaves

# The golden features are 24 wide; how they split into deter and stoch does not matter to a head.
MODEL = ModelConfig(deter=16, stoch=2, classes=4, blocks=4, units=16)
DISCRETE = action_features({"action": Space(np.int32, (), 0, 5)})
CONTINUOUS = action_features({"action": Space(np.float32, (2,))})


def features(data: dict[str, np.ndarray]) -> State:
    feature = jnp.asarray(data["in/feat"])
    return State(feature[..., :16], feature[..., 16:])


def make_head(data: dict[str, np.ndarray], name: str, layers: int, outputs: int) -> Head:
    head = Head.init(np.random.default_rng(0), MODEL, layers, outputs, 1.0)
    return fill(head, name, part(data, "param/"))


def assert_mean_close(logits: Any, expected: np.ndarray) -> None:
    """Two-hot means are sums of huge terms: compared to the sum of their magnitudes."""
    probs = np.asarray(jax.nn.softmax(jnp.asarray(logits), -1), np.float64)
    size = (probs * np.abs(dist.symexp_bins(probs.shape[-1]))).sum(-1)
    actual = np.asarray(dist.twohot_mean(jnp.asarray(logits)))
    assert np.all(np.abs(actual - expected) <= 1e-5 * size + 1e-6)


@pytest.mark.parametrize(
    ("file", "name", "layers"), [("07a_head_reward", "reward", 1), ("07e_head_value", "critic", 3)]
)
def test_twohot_heads(file: str, name: str, layers: int) -> None:
    data = load(file)
    logits = make_head(data, name, layers, 255)(features(data))
    assert_close(logits, data["out/logits"])
    target = dist.twohot_target(jnp.asarray(data["in/target"]), 255)
    assert_close(dist.twohot_loss(logits, target), data["out/loss"])
    assert_mean_close(logits, data["out/pred"])


@pytest.mark.parametrize("kind", ["wide", "peaked"])
def test_twohot_on_special_values(kind: str) -> None:
    data = load("07a_head_reward")
    logits, targets = jnp.asarray(data[f"direct/logits_{kind}"]), jnp.asarray(data["direct/target"])
    weights = dist.twohot_target(targets, 255)
    assert_close(weights, data["direct/target_weights_approx"])

    def losses(logits: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(logits[:, None], (6, 21, 255))
        return dist.twohot_loss(rows, jnp.broadcast_to(weights[None], rows.shape))

    both = jax.jit(jax.grad(lambda x: (losses(x).sum(), losses(x)), has_aux=True))
    gradient, found = both(logits)
    assert_close(found, data[f"direct/loss_{kind}"])
    assert_mean_close(logits, data[f"direct/pred_{kind}"])
    assert_close(gradient, data[f"direct/grad_sum_loss_{kind}"], 1e-4)
    np.testing.assert_array_equal(
        dist.twohot_mean(jnp.zeros((1, 255))), data["direct/pred_zero_logits"]
    )


def test_continue_head() -> None:
    data = load("07b_head_continue")
    logit = make_head(data, "cont", 1, 1)(features(data))[..., 0]
    assert_close(logit, data["out/logit"])
    target = continue_target(jnp.asarray(data["in/is_terminal"]), LossConfig())
    assert_close(target, data["in/target"])
    assert_close(dist.bernoulli_loss(logit, target), data["out/loss"])
    assert_close(jax.nn.sigmoid(logit), data["out/prob"])
    logits = jnp.broadcast_to(jnp.asarray(data["direct/logit"])[None], (3, 9))
    targets = jnp.broadcast_to(jnp.asarray(data["direct/targets"])[:, None], (3, 9))
    assert_close(dist.bernoulli_loss(logits, targets), data["direct/loss"])


def test_categorical_policy() -> None:
    data = load("07c_policy_categorical")
    policy = fill(
        Policy.init(np.random.default_rng(0), MODEL, DISCRETE), "actor", part(data, "param/")
    )
    choices = policy(features(data))
    assert_close(choices["action"], data["out/logits"])
    actions = {"action": jnp.asarray(data["in/action"])}
    assert_close(action_log_prob(DISCRETE, choices, actions, 2), data["out/logp"])
    assert_close(action_entropies(choices, 2)["action"], data["out/entropy"])
    # The published code leaves the uniform share out of the actor; with it, it would say this.
    mixed = {"action": jnp.log(dist.unimix_probs(choices["action"], 0.01))}
    assert_close(action_log_prob(DISCRETE, mixed, actions, 2), data["out/logp_if_unimix"])
    assert_close(action_entropies(mixed, 2)["action"], data["out/entropy_if_unimix"])


def test_bounded_normal_policy() -> None:
    data = load("07d_policy_bounded_normal")
    policy = fill(
        Policy.init(np.random.default_rng(0), MODEL, CONTINUOUS), "actor", part(data, "param/")
    )
    choices = policy(features(data))
    choice = choices["action"]
    assert isinstance(choice, Normal)
    assert_close(choice.mean, data["out/mean"])
    assert_close(choice.std, data["out/stddev"])
    actions = {"action": jnp.asarray(data["in/action"])}
    assert_close(action_log_prob(CONTINUOUS, choices, actions, 2), data["out/logp"])
    assert_close(action_entropies(choices, 2)["action"], data["out/entropy"])
    for name, std in (("min", 0.1), ("max", 1.0)):
        entropy = dist.normal_entropy(jnp.full((3, 5, 2), std))
        assert_close(entropy, data[f"out/{name}ent_per_dim"])


def test_bins_and_symlog() -> None:
    data = load("08_twohot_bins")
    for count in (255, 41, 8, 5):
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
    for i in range(4):
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
    keys = DISCRETE if discrete else CONTINUOUS
    raw_names = ["policy_logits"] if discrete else ["policy_mean_raw", "policy_stddev_raw"]
    raw = [time_first(data[f"in/{name}"]) for name in raw_names]
    value_logits = time_first(data["in/value_logits"])
    actions = {"action": time_first(data["in/action"])}
    slow = dist.twohot_mean(time_first(data["in/slowvalue_logits"]))
    config = LossConfig()
    before = ReturnRange(*(jnp.asarray(data[f"in/retnorm_{name}"]) for name in ("lo", "hi")))

    def run(raw: list[jax.Array], value_logits: jax.Array) -> Any:
        if discrete:
            choices: Any = {"action": raw[0]}
        else:
            choices = {"action": Normal(jnp.tanh(raw[0]), dist.bounded_std(raw[1], 0.1, 1.0))}
        logp = action_log_prob(keys, choices, actions, 2)
        entropy = action_entropies(choices, 2)["action"]
        predictions = Predictions(time_first(data["in/rew"]), time_first(data["in/con"]), slow)
        targets, after, metrics = imagination_targets(
            dist.twohot_mean(value_logits), predictions, before, config
        )
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
            LossConfig(),
        )
        return loss.mean(), (loss, returns)

    logits = time_first(data["in/value_logits"])
    grad, (loss, returns) = jax.jit(jax.grad(run, has_aux=True))(logits)
    assert_close(loss.T, data["out/loss_repval"])
    assert_close(returns.T, data["out/ret"])
    assert_close(grad.swapaxes(0, 1), data["out/grad_mean_value_logits"], 1e-4)


def test_optimizer() -> None:
    data = load("11_optimizer")
    config = OptimizerConfig(learning_rate=float(data["cfg/lr"]), warmup=int(data["cfg/warmup"]))
    params = {k: jnp.asarray(v) for k, v in part(data, "in/param0/").items()}
    whole, single = make_optimizer(config), stages(config)
    state, states = whole.init(params), [stage.init(params) for stage in single]
    steps = len(data["out/lr_at_update"])
    assert steps == 6
    for n in range(steps):
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


@pytest.mark.parametrize("kind", ["perc", "perc_fast"])
def test_return_normaliser(kind: str) -> None:
    data = load("12_normalizer")
    config = replace(
        LossConfig(),
        return_rate=float(data[f"cfg/{kind}/rate"]),
        return_limit=float(data[f"cfg/{kind}/limit"]),
    )
    current = ReturnRange.initial()
    for n, batch in enumerate(data["in/x"]):
        current = current.update(jnp.asarray(batch), config)
        assert_close(current.low, data[f"out/{kind}/lo"][n])
        assert_close(current.high, data[f"out/{kind}/hi"][n])
        assert_close(current.low, data[f"out/{kind}/offset"][n])
        assert_close(current.scale(config), data[f"out/{kind}/scale"][n])


def test_return_normaliser_leaves_only_the_debiasing_out() -> None:
    """No preset debiases; what is left out is one factor, known after each update."""
    data = load("12_normalizer")
    rate = float(data["cfg/perc_debias/rate"])
    config = replace(
        LossConfig(), return_rate=rate, return_limit=float(data["cfg/perc_debias/limit"])
    )
    current = ReturnRange.initial()
    for n, batch in enumerate(data["in/x"]):
        current = current.update(jnp.asarray(batch), config)
        assert_close(current.low, data["out/perc_debias/lo"][n])
        assert_close(current.high, data["out/perc_debias/hi"][n])
        share = 1.0 - (1.0 - rate) ** (n + 1)
        debiased = ReturnRange(*(value / share for value in current))
        assert_close(debiased.low, data["out/perc_debias/offset"][n])
        assert_close(debiased.scale(config), data["out/perc_debias/scale"][n])


def test_initial_parameters() -> None:
    data = load("19_init_stats")
    flags = {"reward": Space(np.float32)} | {
        name: Space(bool) for name in ("is_first", "is_last", "is_terminal")
    }
    spaces = {"image": Space(np.uint8, (64, 64, 3)), "vector": Space(np.float32, (24,))}
    config = DreamerConfig(model=size_preset("1m"))
    actions = {"action": Space(np.int32, (), 0, 17)}
    state = init_state(config, spaces | flags, actions, seed=0)
    ours = {
        golden_name(name.removeprefix("nets/")): np.asarray(leaf)
        for name, leaf in named_leaves(state).items()
        if name.startswith(("nets/", "slow_critic/"))
    }
    assert set(ours) == set(data["name"].tolist())
    for name, shape, mean, std in zip(
        data["name"], data["shape"], data["mean"], data["expected_std"], strict=True
    ):
        values = ours[str(name)]
        assert ",".join(map(str, values.shape)) == str(shape)
        if std == 0:
            np.testing.assert_array_equal(values, np.float32(mean))
            continue
        # Five standard errors of a standard deviation, and of a mean.
        assert abs(values.std() / std - 1) < 5 / np.sqrt(2 * values.size)
        assert abs(values.mean()) < 5 * std / np.sqrt(values.size)
        assert np.abs(values).max() <= 2 * 1.1368 * std * 1.001
