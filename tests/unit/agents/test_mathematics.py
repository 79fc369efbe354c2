"""Numbers worked out by hand, limits, and invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import ModelConfig, OptimizerConfig
from dreamfleet.agents.dreamer.images import DownConv, UpConv, over_images
from dreamfleet.agents.dreamer.imagination import lambda_return
from dreamfleet.agents.dreamer.optimizer import (
    clip_by_parameter_norm,
    learning_rate,
    make_optimizer,
)
from dreamfleet.agents.dreamer.rssm import RSSM, State


@pytest.mark.parametrize("compiled", [False, True])
def test_lambda_return_by_hand(compiled: bool) -> None:
    function = jax.jit(lambda_return, static_argnums=(4, 5)) if compiled else lambda_return
    reward = jnp.array([0.0, 1.0, 2.0])
    zeros, boot = jnp.zeros(3), jnp.array([9.0, 10.0, 20.0])
    # R_1 = 2 + 0.5 * 20 = 12, R_0 = 1 + 0.5 * (0.5 * 10 + 0.5 * 12) = 6.5
    np.testing.assert_allclose(function(reward, zeros, zeros, boot, 0.5, 0.5), [6.5, 12.0])
    # The episode's end is terminal: R_1 = 2.
    end = jnp.array([0.0, 0.0, 1.0])
    np.testing.assert_allclose(function(reward, end, end, boot, 0.5, 0.5), [4.0, 2.0])
    # Cut off at step 1 without being terminal: R_0 = 1 + 0.5 * 10.
    cut = jnp.array([0.0, 1.0, 0.0])
    np.testing.assert_allclose(function(reward, cut, zeros, boot, 0.5, 0.5), [6.0, 12.0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup": 4}, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"warmup": 0}, [1.0] * 7),
        ({"warmup": 2, "decay": 4, "final_rate": 0.2}, [0.0, 0.5, 1.0, 0.6, 0.2, 0.2, 0.2]),
        ({"warmup": 4, "decay": 2, "final_rate": 0.2}, [0.0, 0.25, 0.5, 0.75, 1.0, 0.2, 0.2]),
        ({"warmup": 0, "decay": -1}, [1.0] * 7),  # of an agent without a run
    ],
)
def test_learning_rate_by_hand(settings: dict, expected: list[float]) -> None:
    rate = learning_rate(OptimizerConfig(learning_rate=0.5, **settings))
    seen = [float(rate(jnp.asarray(count, jnp.int32))) for count in range(len(expected))]
    np.testing.assert_allclose(seen, [0.5 * share for share in expected], rtol=1e-6)


def test_twohot_targets_by_hand() -> None:
    bins = dist.symexp_bins(5)
    top = np.exp(20) - 1
    np.testing.assert_allclose(bins, [-top, -(np.exp(10) - 1), 0, np.exp(10) - 1, top], rtol=1e-6)
    middle = float(bins[3])
    values = jnp.array([0.0, middle, middle / 4, -1e12, 1e12, -middle / 2], jnp.float32)
    expected = [
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0.75, 0.25, 0],
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1],
        [0, 0.5, 0.5, 0, 0],
    ]
    np.testing.assert_allclose(dist.twohot_target(values, 5), expected, atol=1e-6)


@pytest.mark.parametrize("count", [5, 8, 255])
def test_equal_logits_mean_exactly_zero(count: int) -> None:
    logits = jnp.full((3, count), 1.7)
    np.testing.assert_array_equal(dist.twohot_mean(logits), 0.0)


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2, 0.3, 3.0])
def test_means_of_nearly_equal_logits_are_as_precise_as_the_logits(scale: float) -> None:
    """Bins reach from -5e8 to 5e8, so that probabilities' own rounding is 0.15 in their mean."""
    logits = scale * np.random.default_rng(0).normal(size=(100, 255)).astype(np.float32)
    bins = dist.symexp_bins(255).astype(np.float64)
    weights = np.exp(logits, dtype=np.float64)
    exact = weights @ bins / weights.sum(-1)
    # An average of a hundred, because single means cancel, too.
    error = np.abs(np.asarray(dist.twohot_mean(jnp.asarray(logits)), np.float64) - exact)
    assert error.mean() < 1e-6 * np.abs(exact).mean()


def test_no_setting_of_the_optimizer_makes_nan() -> None:
    """At the bounds of their ranges, with gradients and parameters of zero, and with large ones."""
    bounds = [
        {"clip": 0.0},
        {"clip": 1e-6, "clip_floor": 1e-9},
        {"eps": 1e-30},
        {"beta1": 0.0, "beta2": 0.0},
        {"beta1": 0.999999, "beta2": 0.999999},
        {"weight_decay": 1.0, "warmup": 0, "decay": 1, "final_rate": 1e-30},
    ]
    values = np.array([0.0, 1e-20, 1.0, 1e15], np.float32)
    params = [jnp.full((2, 2), value) for value in values for _ in values]
    grads = [jnp.full((2, 2), value) for _ in values for value in values]
    for settings in bounds:
        optimizer = make_optimizer(OptimizerConfig(**settings))
        state = optimizer.init(params)
        for _ in range(3):
            updates, state = optimizer.update(grads, state, params)
            for update in jax.tree.leaves((updates, state)):
                assert np.isfinite(update).all(), settings


def test_a_clip_of_zero_clips_nothing() -> None:
    grads, params = [jnp.full(3, 7.0)], [jnp.full(3, 1e-3)]
    clipped = {
        clip: clip_by_parameter_norm(clip, 1e-3).update(grads, optax.EmptyState(), params)[0][0]
        for clip in (0.0, 0.3)
    }
    np.testing.assert_array_equal(clipped[0.0], grads[0])
    # The norm of three equal numbers is sqrt(3) times one: 0.3 * 1e-3 is what is left of each.
    np.testing.assert_allclose(clipped[0.3], 3e-4, rtol=1e-5)


def test_distributions_without_a_share_of_uniform_have_logarithms() -> None:
    sure = jnp.array([300.0, 0.0, -300.0])
    probs = dist.unimix_probs(sure, 0.0)
    np.testing.assert_allclose(probs, [1.0, 0.0, 0.0], atol=1e-20)
    other = dist.unimix_probs(sure[::-1], 0.0)
    for function in (
        lambda x: dist.entropy_of_probs(dist.unimix_probs(x, 0.0)),
        lambda x: dist.categorical_kl(dist.unimix_probs(x, 0.0), other),
    ):
        assert np.isfinite(function(sure))
        assert np.isfinite(jax.grad(function)(sure)).all()


def test_sampling_follows_the_probabilities() -> None:
    probs = jnp.array([0.1, 0.0, 0.6, 0.3])
    uniform = (jnp.arange(1000, dtype=jnp.float32) + 0.5) / 1000
    index = dist.sample_index(jnp.broadcast_to(probs, (1000, 4)), uniform)
    np.testing.assert_array_equal(np.bincount(index, minlength=4), [100, 0, 600, 300])
    assert int(dist.sample_index(probs, jnp.float32(np.nextafter(1, 0, dtype=np.float32)))) == 3


def test_limits_of_distributions() -> None:
    sure = jnp.array([50.0, 0.0, 0.0])
    np.testing.assert_allclose(dist.categorical_entropy(sure), 0.0, atol=1e-6)
    np.testing.assert_allclose(dist.categorical_entropy(jnp.zeros(3)), np.log(3), rtol=1e-6)
    np.testing.assert_allclose(
        dist.unimix_probs(jnp.array([1e4, 0.0]), 0.01), [0.995, 0.005], rtol=1e-5
    )
    extreme = jnp.array([-1e6, 1e6])
    np.testing.assert_allclose(dist.bounded_std(extreme, 0.1, 1.0), [0.1, 1.0], rtol=1e-6)
    np.testing.assert_allclose(
        dist.normal_log_prob(jnp.zeros(()), jnp.ones(()), jnp.ones(())), -1.4189385, rtol=1e-6
    )
    losses = dist.bernoulli_loss(jnp.array([1e4, -1e4]), jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(losses, 0.0, atol=1e-6)


MODEL = ModelConfig(deter=16, hidden=8, stoch=4, classes=4, blocks=4, units=8)


@pytest.fixture(scope="module")
def rssm() -> RSSM:
    return RSSM.init(np.random.default_rng(0), MODEL, 3, 5)


def observe(model: RSSM, first: np.ndarray, rows: int = 4, time: int = 6, carry: int = 0):
    rng = np.random.default_rng(1)
    tokens, action = rng.standard_normal((rows, time, 5)), rng.standard_normal((rows, time, 3))
    uniform = rng.random((rows, time, 4))
    start = np.random.default_rng(carry).standard_normal((2, rows, 16))
    return (
        State(*(jnp.asarray(x, jnp.float32) for x in start)),
        [jnp.asarray(x, jnp.float32) for x in (tokens, action)],
        jnp.asarray(first),
        jnp.asarray(uniform, jnp.float32),
    )


def test_permuting_the_batch_permutes_the_result(rssm: RSSM) -> None:
    first = np.random.default_rng(2).random((4, 6)) < 0.3
    carry, (tokens, action), flags, uniform = observe(rssm, first)
    order = jnp.array([2, 0, 3, 1])
    run = jax.jit(lambda *args: rssm.observe(*args))  # each operation alone compiles longer
    plain = run(carry, tokens, action, flags, uniform)
    shuffled = run(
        State(*(x[order] for x in carry)),
        tokens[order],
        action[order],
        flags[order],
        uniform[order],
    )
    deter = plain.states.deter[order]
    np.testing.assert_allclose(deter, shuffled.states.deter, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(plain.prior[order], shuffled.prior, rtol=1e-5, atol=1e-5)


def test_a_reset_in_the_middle_equals_two_sequences(rssm: RSSM) -> None:
    first = np.zeros((4, 6), bool)
    first[:, 3] = True
    carry, (tokens, action), flags, uniform = observe(rssm, first)
    other, *_ = observe(rssm, first, carry=7)
    run = jax.jit(lambda *args: rssm.observe(*args))
    whole = run(carry, tokens, action, flags, uniform)
    second = run(other, tokens[:, 3:], action[:, 3:], flags[:, 3:], uniform[:, 3:])
    np.testing.assert_allclose(whole.states.deter[:, 3:], second.states.deter, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(whole.states.stoch[:, 3:], second.states.stoch)


def test_padding_behind_a_sequence_changes_nothing(rssm: RSSM) -> None:
    first = np.zeros((4, 6), bool)
    carry, (tokens, action), flags, uniform = observe(rssm, first)
    run = jax.jit(lambda *args: rssm.observe(*args))
    whole = run(carry, tokens, action, flags, uniform)
    part = run(carry, tokens[:, :4], action[:, :4], flags[:, :4], uniform[:, :4])
    np.testing.assert_allclose(whole.states.deter[:, :4], part.states.deter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("kind", [DownConv, UpConv])
def test_both_forms_of_a_convolution_agree(kind: type, kernel: int) -> None:
    rng = np.random.default_rng(0)
    layer = kind.init(rng, kernel, 3, 4)
    x = jnp.asarray(rng.standard_normal((2, 8, 12, 3), np.float32))

    def form(layer, x, patches):
        def loss(layer, x):
            result = layer(x, patches=patches)
            return jnp.sum(jnp.sin(result)), result

        return jax.grad(loss, (0, 1), has_aux=True)(layer, x)

    both = jax.jit(lambda *args: [form(*args, patches) for patches in (False, True)])
    (plain, whole), (cells, pieces) = both(layer, x)
    assert whole.shape[-1] == pieces.shape[-1] == 4
    np.testing.assert_allclose(whole, pieces, atol=1e-5)
    for one, two in zip(jax.tree.leaves(plain), jax.tree.leaves(cells), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(16, 1), (3, 1), (4, 5)])
def test_images_in_pieces_equal_images_at_once(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    layer = DownConv.init(rng, 5, 3, 4)
    x = jnp.asarray(rng.standard_normal((*shape, 8, 8, 3), np.float32))
    pieces = over_images(lambda layer, *args: layer(args[0], patches=args[1]), layer, x)
    whole = layer(x.reshape(-1, 8, 8, 3), patches=False)
    np.testing.assert_allclose(pieces.reshape(whole.shape), whole, atol=1e-5)


def test_shapes_are_checked_here() -> None:
    with pytest.raises(TypeError, match="uniform"):
        dist.sample_index(jnp.zeros((3, 4)), jnp.zeros((2,)))
