"""The world model reproduces the reference's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import assert_close, fill, load, names_of, part

from dreamfleet import Space
from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import LossConfig, ModelConfig
from dreamfleet.agents.dreamer.decoders import DefaultDecoder
from dreamfleet.agents.dreamer.encoders import DefaultEncoder
from dreamfleet.agents.dreamer.features import action_features, embed_actions
from dreamfleet.agents.dreamer.learning import apply_context
from dreamfleet.agents.dreamer.losses import world_model_losses
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.rssm import RSSM, Observed, State

MODEL = ModelConfig(
    deter=64, hidden=16, stoch=4, classes=8, blocks=4, units=16, depth=4, decoder_blocks=8
)
ACT_SPACE = {"move": Space(np.float32, (2,)), "button": Space(np.int32, (), 0, 5)}
ACTIONS = action_features(ACT_SPACE)


def arrays(data: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {key: jnp.asarray(value) for key, value in data.items()}


def state_of(data: dict[str, Any], prefix: str) -> State:
    deter, stoch = jnp.asarray(data[f"{prefix}deter"]), jnp.asarray(data[f"{prefix}stoch"])
    return State(deter, stoch.reshape(*stoch.shape[:-2], -1))


def run(function: Any, *inputs: Any) -> Any:
    """A function or module as one program: otherwise each operation would be compiled alone."""
    return jax.jit(lambda *inputs: function(*inputs))(*inputs)


def make_rssm(params: dict[str, np.ndarray], actions: int, tokens: int) -> RSSM:
    model = RSSM.init(np.random.default_rng(0), MODEL, actions, tokens)
    # Some files hold only the parameters their case needs.
    zeros = {
        name: np.zeros(leaf.shape, np.float32) for name, leaf in names_of(model, "dynamics").items()
    }
    return fill(model, "dynamics", zeros | params)


def test_core() -> None:
    data = load("01_rssm_core")
    model = make_rssm(part(data, "param/"), 7, 20)
    action = model.embed_action(jnp.asarray(data["in/action"]))
    latent = model.core(model.enter(state_of(data, "in/")), action)
    assert_close(latent.state.deter, data["out/deter"])


def test_logits() -> None:
    data = load("02_rssm_logits")
    model = make_rssm(part(data, "param/"), 7, 20)
    deter, tokens = jnp.asarray(data["in/deter"]), jnp.asarray(data["in/tokens"])
    prior = model.prior_of(deter)
    posterior = model.posterior_of(deter, model.token_share(tokens))
    for name, logits in (("prior", prior), ("post", posterior)):
        probs = dist.unimix_probs(logits, 0.01)
        assert_close(logits, data[f"out/{name}_logit"])
        assert_close(probs, data[f"out/{name}_probs_unimix"])
        assert_close(dist.entropy_of_probs(probs).sum(-1), data[f"out/{name}_entropy"])


@pytest.mark.parametrize("compiled", [False, True])
def test_observe(compiled: bool) -> None:
    data = load("03a_rssm_observe")
    model = make_rssm(part(data, "param/"), 7, 20)
    teacher = jnp.asarray(data["in/stoch_sample"]).reshape(3, 5, -1)
    actions = embed_actions(ACTIONS, arrays(part(data, "in/prevact/")), jnp.dtype("float32"))
    first = jnp.asarray(data["in/is_first"])
    masked = actions * (1.0 - first.astype(jnp.float32))[..., None]
    assert_close(masked, data["out/action_embed_masked"])

    def observe(model: RSSM) -> Any:
        return model.observe(
            state_of(data, "in/carry/"),
            jnp.asarray(data["in/tokens"]),
            actions,
            first,
            teacher=teacher,
        )

    result = (jax.jit(observe) if compiled else observe)(model)
    assert_close(result.state.deter, data["out/deter"])
    assert_close(result.posterior, data["out/post_logit"])
    assert_close(result.prior, data["out/prior_logit"])
    assert_close(result.state.deter[:, -1], data["out/carry/deter"])
    assert_close(result.state.stoch[:, -1].reshape(3, 4, 8), data["out/carry/stoch"])


def test_imagine() -> None:
    data = load("03b_rssm_imagine")
    model = make_rssm(part(data, "param/"), 7, 20)
    actions = embed_actions(ACTIONS, arrays(part(data, "in/action/")), jnp.dtype("float32"))
    teacher = jnp.asarray(data["in/stoch_sample"]).reshape(3, 5, -1)
    latent = model.enter(state_of(data, "in/carry/"))
    uniform = jnp.full((3, MODEL.stoch), 0.5)
    for step in range(5):
        latent = model.imagine_step(latent, actions[:, step], uniform)
        deter = latent.state.deter
        assert_close(deter, data["out/deter"][:, step])
        logits = model.prior_of(deter)
        assert_close(logits, data["out/prior_logit"][:, step])
        np.testing.assert_array_equal(latent.state.stoch, model.sample(logits, uniform))
        # The golden sequence continues from the samples of the reference.
        latent = latent._replace(state=State(deter, teacher[:, step]))


def test_kl() -> None:
    data = load("04_kl")
    model = RSSM.init(np.random.default_rng(0), MODEL, 1, 1)
    post, prior = jnp.asarray(data["in/post_logit"]), jnp.asarray(data["in/prior_logit"])
    raw = dist.categorical_kl(dist.unimix_probs(post, 0.01), dist.unimix_probs(prior, 0.01)).sum(-1)
    assert_close(raw, data["out/kl_raw"])
    dyn, rep = model.kl_losses(post, prior, 1.0)
    assert_close(dyn, data["out/dyn"])
    assert_close(rep, data["out/rep"])
    for index, name in enumerate(("dyn", "rep")):
        wrt_post, wrt_prior = jax.grad(
            lambda a, b, i=index: model.kl_losses(a, b, 1.0)[i].sum(), (0, 1)
        )(post, prior)
        assert_close(wrt_post, data[f"out/grad_sum_{name}_wrt_post"], 1e-4)
        assert_close(wrt_prior, data[f"out/grad_sum_{name}_wrt_prior"], 1e-4)


VECTORS = {
    "zvec": Space(np.float32, (7,)),
    "atok": Space(np.int32, (), 0, 6),
    "mat": Space(np.float32, (2, 3)),
    "ints": Space(np.int32, (2,), 0, 4),
    "scal": Space(np.float32),
}


def test_encoder_of_vectors() -> None:
    data = load("05a_encoder_vector")
    model = DefaultEncoder.init(np.random.default_rng(0), MODEL, VECTORS)
    model = fill(model, "encoder", part(data, "param/"))
    assert_close(run(model, arrays(part(data, "in/"))), data["out/tokens"])


def test_encoder_of_images() -> None:
    data = load("05b_encoder_image")
    spaces = {"image": Space(np.uint8, (64, 64, 3))}
    model = fill(
        DefaultEncoder.init(np.random.default_rng(0), MODEL, spaces),
        "encoder",
        part(data, "param/"),
    )
    assert_close(run(model, arrays(part(data, "in/"))), data["out/tokens"])


def test_encoder_of_images_and_vectors() -> None:
    data = load("05c_encoder_mixed")
    config = ModelConfig(units=16, depth=4, mults=(2, 3, 4))
    spaces = {
        "image": Space(np.uint8, (32, 32, 3)),
        "aux": Space(np.uint8, (32, 32, 1)),
        "vec": Space(np.float32, (6,)),
    }
    model = DefaultEncoder.init(np.random.default_rng(0), config, spaces)
    model = fill(model, "encoder", part(data, "param/"))
    assert_close(run(model, arrays(part(data, "in/"))), data["out/tokens"])


def test_decoder_of_vectors() -> None:
    data = load("06a_decoder_vector")
    model = DefaultDecoder.init(np.random.default_rng(0), MODEL, VECTORS)
    model = fill(model, "decoder", part(data, "param/"), discrete=("atok", "ints"))
    predictions = run(model, state_of(data, "in/"))
    for key in ("atok", "ints"):
        assert_close(predictions[key], data[f"out/logits/{key}"])
        np.testing.assert_array_equal(predictions[key].argmax(-1), data[f"out/pred/{key}"])
    for key in ("mat", "scal", "zvec"):
        assert_close(predictions[key], data[f"out/pred/{key}"])
    losses = run(model.losses, predictions, arrays(part(data, "in/target/")))
    for key in VECTORS:
        assert_close(losses[key], data[f"out/loss/{key}"])


def test_decoder_of_images() -> None:
    data = load("06b_decoder_image")
    spaces = {"image": Space(np.uint8, (64, 64, 3))}
    model = fill(
        DefaultDecoder.init(np.random.default_rng(0), MODEL, spaces),
        "decoder",
        part(data, "param/"),
    )
    predictions = run(model, state_of(data, "in/"))
    assert_close(predictions["image"], data["out/pred"])
    losses = run(model.losses, predictions, arrays(part(data, "in/target/")))
    assert_close(losses["image"], data["out/loss"])


def _end_to_end() -> tuple[dict[str, np.ndarray], Networks, Any]:
    data = load("13_worldmodel_losses")
    config = ModelConfig(
        deter=64, hidden=16, stoch=4, classes=8, blocks=4, units=16, depth=4, mults=(2, 3, 4)
    )
    spaces = {
        "image": Space(np.uint8, (24, 24, 3)),
        "vec": Space(np.float32, (6,)),
        "tok": Space(np.int32, (), 0, data["param/dec/vec/tok/logits/bias"].size),
    }
    nets = Networks.init(np.random.default_rng(0), config, spaces, ACT_SPACE)
    extra = {
        name: np.asarray(leaf)
        for name, leaf in names_of(nets, "", 3, ("tok",)).items()
        if name.startswith(("pol/", "val/"))
    }
    nets = fill(nets, "", extra | part(data, "param/"), 3, ("tok",))

    def losses(nets: Networks) -> tuple[Observed, dict[str, jax.Array]]:
        obs = arrays(part(data, "in/obs/"))
        observed = nets.dynamics.observe(
            state_of(data, "in/carry/"),
            nets.encoder(obs),
            embed_actions(ACTIONS, arrays(part(data, "in/prevact/")), jnp.dtype("float32")),
            obs["is_first"],
            teacher=jnp.asarray(data["in/stoch_sample"]).reshape(3, 5, -1),
        )
        return observed, world_model_losses(nets, observed, obs, LossConfig())[0]

    return data, nets, losses


SCALES = {"representation": 0.1}
OUR_LOSSES = {
    "con": "continue",
    "dyn": "dynamics",
    "rep": "representation",
    "rew": "reward",
    "image": "reconstruction/image",
    "tok": "reconstruction/tok",
    "vec": "reconstruction/vec",
}


def test_world_model_losses() -> None:
    data, nets, losses = _end_to_end()
    observed, found = jax.jit(losses)(nets)
    assert_close(observed.state.deter, data["out/deter"])
    assert_close(observed.posterior, data["out/post_logit"])
    assert_close(observed.prior, data["out/prior_logit"])
    assert set(OUR_LOSSES.values()) == set(found)
    for theirs, ours in OUR_LOSSES.items():
        assert_close(found[ours], data[f"out/loss/{theirs}"])
    assert_close(run(nets.encoder, arrays(part(data, "in/obs/"))), data["out/tokens"])


def test_world_model_gradients() -> None:
    _, nets, losses = _end_to_end()
    golden = load("14_worldmodel_grads")

    def total(nets: Networks) -> jax.Array:
        _, parts = losses(nets)
        return sum((SCALES.get(k, 1.0) * v.mean() for k, v in parts.items()), jnp.zeros(()))

    value, grads = jax.jit(jax.value_and_grad(total))(nets)
    assert_close(value, golden["out/total"])
    ours = names_of(grads, "", 3, ("tok",))
    expected = part(golden, "grad/")
    assert len(expected) == 84
    for name, gradient in expected.items():
        assert_close(ours[name], gradient, 1e-4)
    for name in set(ours) - set(expected):
        assert name.startswith(("pol/", "val/"))
        np.testing.assert_array_equal(ours[name], 0.0)


@pytest.mark.parametrize("context", [1, 2])
def test_replay_context(context: int) -> None:
    data = load(f"17_replay_context_{context}")
    batch = {k: v for k, v in arrays(part(data, "in/")).items() if not k.startswith("carry/")}
    carry = state_of(data, "in/carry/")
    sequence = apply_context(carry, batch, context, ("move", "button"))
    np.testing.assert_array_equal(sequence.carry.deter, data["out/carry/deter"])
    np.testing.assert_array_equal(sequence.carry.stoch, data["out/carry/stoch"].reshape(4, -1))
    np.testing.assert_array_equal(sequence.stepid, data["out/stepid"])
    for name, value in part(data, "out/obs/").items():
        np.testing.assert_array_equal(sequence.obs[name], value)
    for name, value in part(data, "out/prevact/").items():
        np.testing.assert_array_equal(sequence.previous[name], value)
