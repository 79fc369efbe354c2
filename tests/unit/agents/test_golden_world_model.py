"""The world model reproduces the reference's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import (
    assert_close,
    choices_of,
    fill,
    loss_of,
    model_of,
    names_of,
    shapes_of,
    spaces_of,
)
from golden_files import Arrays, load, part

from dreamfleet import Space
from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import DreamerConfig, ExecutionConfig, ModelConfig
from dreamfleet.agents.dreamer.decoder import DefaultDecoder
from dreamfleet.agents.dreamer.dynamics import Observed
from dreamfleet.agents.dreamer.encoder import DefaultEncoder
from dreamfleet.agents.dreamer.features import action_features, embed_actions
from dreamfleet.agents.dreamer.networks import Networks
from dreamfleet.agents.dreamer.rssm import RSSM, State
from dreamfleet.agents.dreamer.train import init_state, without_context
from dreamfleet.agents.dreamer.world_model import Seen, step_losses
from dreamfleet.spaces import FLAGS

RNG = np.random.default_rng(0)


def arrays(data: Arrays) -> dict[str, jax.Array]:
    return {key: jnp.asarray(value) for key, value in data.items()}


def state_of(data: Arrays, prefix: str) -> State:
    return State(jnp.asarray(data[f"{prefix}deter"]), flat(data[f"{prefix}stoch"]))


def flat(stoch: np.ndarray) -> jax.Array:
    return jnp.asarray(stoch).reshape(*stoch.shape[:-2], -1)


def run(function: Any, *inputs: Any) -> Any:
    """A function or module as one program: otherwise each operation would be compiled alone."""
    return jax.jit(lambda *inputs: function(*inputs))(*inputs)


def make_rssm(data: Arrays) -> RSSM:
    """Some files hold only the parameters that their case needs: the others are zero."""
    params, config = part(data, "param/"), model_of(data)
    width = params["dyn/dynin2/kernel"].shape[0] if "dyn/dynin2/kernel" in params else 1
    seen = params["dyn/obs0/kernel"].shape[0] if "dyn/obs0/kernel" in params else config.deter + 1
    model = RSSM.init(RNG, config, width, seen - config.deter)
    zeros = {
        name: np.zeros(leaf.shape, np.float32) for name, leaf in names_of(model, "dynamics").items()
    }
    return fill(model, "dynamics", zeros | params)


def act_space(data: Arrays, prefix: str) -> dict[str, Space]:
    actions = part(data, prefix)
    width = shapes_of(data)["dyn/dynin2/kernel"][0]
    return spaces_of(actions, choices_of(data, actions, width))


def action_vectors(data: Arrays, prefix: str) -> jax.Array:
    features = action_features(act_space(data, prefix))
    return embed_actions(features, arrays(part(data, prefix)), jnp.dtype("float32"))


def test_core() -> None:
    data = load("01_rssm_core")
    model = make_rssm(data)
    action = model.embed_action(jnp.asarray(data["in/action"]))
    latent = model.core(model.enter(state_of(data, "in/")), action)
    assert_close(latent.state.deter, data["out/deter"])


def test_logits() -> None:
    data = load("02_rssm_logits")
    model = make_rssm(data)
    deter, tokens = jnp.asarray(data["in/deter"]), jnp.asarray(data["in/tokens"])
    prior = model.prior_of(deter)
    posterior = model.posterior_of(deter, model.token_share(tokens))
    for name, logits in (("prior", prior), ("post", posterior)):
        probs = dist.unimix_probs(logits, model.unimix)
        assert_close(logits, data[f"out/{name}_logit"])
        assert_close(probs, data[f"out/{name}_probs_unimix"])
        assert_close(dist.entropy_of_probs(probs).sum(-1), data[f"out/{name}_entropy"])


@pytest.mark.parametrize("compiled", [False, True])
def test_observe(compiled: bool) -> None:
    data = load("03a_rssm_observe")
    model = make_rssm(data)
    teacher = flat(data["in/stoch_sample"])
    actions = action_vectors(data, "in/prevact/")
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
    assert_close(result.states.deter, data["out/deter"])
    assert_close(result.posterior, data["out/post_logit"])
    assert_close(result.prior, data["out/prior_logit"])
    entries = model.entries(jax.tree.map(lambda x: x[:, -1], result.states))
    for name, value in entries.items():
        assert_close(value, data[f"out/carry/{name.removeprefix('dyn/')}"])


def test_imagine() -> None:
    data = load("03b_rssm_imagine")
    model = make_rssm(data)
    actions = action_vectors(data, "in/action/")
    teacher = flat(data["in/stoch_sample"])
    rows, steps = teacher.shape[:2]
    state, uniform = state_of(data, "in/carry/"), jnp.full((rows, model.draws), 0.5)
    for step in range(steps):
        state = model.step(state, actions[:, step], uniform)
        assert_close(state.deter, data["out/deter"][:, step])
        logits = model.prior_of(state.deter)
        assert_close(logits, data["out/prior_logit"][:, step])
        np.testing.assert_array_equal(state.stoch, model.sample(logits, uniform))
        # The golden sequence continues from the samples of the reference.
        state = State(state.deter, teacher[:, step])


def test_kl() -> None:
    data = load("04_kl")
    post, prior = jnp.asarray(data["in/post_logit"]), jnp.asarray(data["in/prior_logit"])
    unimix, free_nats = float(data["cfg/unimix"]), float(data["cfg/free_nats"])
    config = ModelConfig(stoch=post.shape[-2], classes=post.shape[-1], unimix=unimix)
    model = RSSM.init(RNG, config, 1, 1)
    raw = dist.categorical_kl(dist.unimix_probs(post, unimix), dist.unimix_probs(prior, unimix))
    assert_close(raw.sum(-1), data["out/kl_raw"])

    def losses(post: jax.Array, prior: jax.Array) -> tuple[jax.Array, jax.Array]:
        return model.kl_losses(Observed(None, post, prior), free_nats)

    dyn, rep = losses(post, prior)
    assert_close(dyn, data["out/dyn"])
    assert_close(rep, data["out/rep"])
    for index, name in enumerate(("dyn", "rep")):
        wrt_post, wrt_prior = jax.grad(lambda a, b, i=index: losses(a, b)[i].sum(), (0, 1))(
            post, prior
        )
        assert_close(wrt_post, data[f"out/grad_sum_{name}_wrt_post"], 1e-4)
        assert_close(wrt_prior, data[f"out/grad_sum_{name}_wrt_prior"], 1e-4)


@pytest.mark.parametrize("file", ["05a_encoder_vector", "05b_encoder_image", "05c_encoder_mixed"])
def test_encoder(file: str) -> None:
    data = load(file)
    obs, shapes = part(data, "in/"), shapes_of(data)
    width = shapes["enc/mlp0/kernel"][0] if "enc/mlp0/kernel" in shapes else 0
    vectors = {name: value for name, value in obs.items() if value.dtype != np.uint8}
    spaces = spaces_of(obs, choices_of(data, vectors, width))
    model = DefaultEncoder.init(RNG, model_of(data), spaces)
    model = fill(model, "encoder", part(data, "param/"))
    assert_close(run(model, arrays(obs)), data["out/tokens"])


def make_decoder(data: Arrays) -> tuple[DefaultDecoder, dict[str, Space]]:
    target, state = part(data, "in/target/"), state_of(data, "in/")
    spaces = spaces_of(target, choices_of(data, target))
    widths = tuple(each.shape[-1] for each in state)
    model = DefaultDecoder.init(RNG, model_of(data), spaces, widths)
    return fill(model, "decoder", part(data, "param/")), spaces


def test_decoder_of_vectors() -> None:
    data = load("06a_decoder_vector")
    model, spaces = make_decoder(data)
    predictions = run(model, tuple(state_of(data, "in/")))
    for key, space in spaces.items():
        if space.discrete:
            assert_close(predictions[key], data[f"out/logits/{key}"])
            np.testing.assert_array_equal(predictions[key].argmax(-1), data[f"out/pred/{key}"])
        else:
            assert_close(predictions[key], data[f"out/pred/{key}"])
    losses = run(model.losses, predictions, arrays(part(data, "in/target/")))
    for key in spaces:
        assert_close(losses[key], data[f"out/loss/{key}"])


def test_decoder_of_images() -> None:
    data = load("06b_decoder_image")
    model, spaces = make_decoder(data)
    predictions = run(model, tuple(state_of(data, "in/")))
    losses = run(model.losses, predictions, arrays(part(data, "in/target/")))
    (key,) = spaces
    assert_close(predictions[key], data["out/pred"])
    assert_close(losses[key], data["out/loss"])


def _end_to_end() -> tuple[Arrays, Networks, Any]:
    data = load("13_worldmodel_losses")
    params, seen = part(data, "param/"), part(data, "in/obs/")
    vectors = {
        name: value for name, value in seen.items() if name not in FLAGS and value.dtype != np.uint8
    }
    choices = choices_of(data, vectors, shapes_of(data)["enc/mlp0/kernel"][0])
    actions = act_space(data, "in/prevact/")
    config = DreamerConfig(model=model_of(data), loss=loss_of(data))
    nets = Networks.init(RNG, config, spaces_of(seen, choices), actions)
    others = {
        name: np.asarray(leaf)
        for name, leaf in names_of(nets, "", params).items()
        if name.startswith(("pol/", "val/"))
    }
    nets = fill(nets, "", others | params)

    def losses(nets: Networks) -> tuple[Observed, dict[str, jax.Array]]:
        obs, vectors = arrays(seen), action_vectors(data, "in/prevact/")
        tokens = nets.encoder(obs)
        observed = nets.dynamics.observe(
            state_of(data, "in/carry/"),
            tokens,
            vectors,
            obs["is_first"],
            teacher=flat(data["in/stoch_sample"]),
        )
        features = nets.dynamics.features(observed.states)
        found = Seen(obs, vectors, tokens, observed, features, nets.decoder(features))
        return observed, step_losses(nets, found, config.loss)

    return data, nets, losses


OUR_LOSSES = {"con": "continue", "dyn": "dynamics", "rep": "representation", "rew": "reward"}


def our_name(loss: str) -> str:
    return OUR_LOSSES.get(loss, f"reconstruction/{loss}")


def test_world_model_losses() -> None:
    data, nets, losses = _end_to_end()
    observed, found = jax.jit(losses)(nets)
    assert_close(observed.states.deter, data["out/deter"])
    assert_close(observed.posterior, data["out/post_logit"])
    assert_close(observed.prior, data["out/prior_logit"])
    expected = {our_name(name): loss for name, loss in part(data, "out/loss/").items()}
    assert found.keys() == expected.keys()
    for name, loss in expected.items():
        assert_close(found[name], loss)
    assert_close(run(nets.encoder, arrays(part(data, "in/obs/"))), data["out/tokens"])


def test_world_model_gradients() -> None:
    data, nets, losses = _end_to_end()
    golden = load("14_worldmodel_grads")
    scales = {our_name(name): float(x) for name, x in part(data, "cfg/scale/").items()}

    def total(nets: Networks) -> jax.Array:
        _, parts = losses(nets)
        return sum((scales[name] * loss.mean() for name, loss in parts.items()), jnp.zeros(()))

    value, grads = jax.jit(jax.value_and_grad(total))(nets)
    assert_close(value, golden["out/total"])
    expected = part(golden, "grad/")
    ours = names_of(grads, "", expected)
    assert expected.keys() == shapes_of(data).keys()
    for name, gradient in expected.items():
        assert_close(ours[name], gradient, 1e-4)
    for name in set(ours) - set(expected):
        assert name.startswith(("pol/", "val/"))
        np.testing.assert_array_equal(ours[name], 0.0)


@pytest.mark.parametrize("context", [1, 2])
def test_replay_context(context: int) -> None:
    data = load(f"17_replay_context_{context}")
    batch = {
        name: value
        for name, value in part(data, "in/").items()
        if name != "consec" and not name.startswith("carry/")
    }
    taken = {name: batch[name] for name in part(data, "out/prevact/")}
    seen = {name: batch[name] for name in part(data, "out/obs/")}
    choices = {
        name: 1 + int(value.max())
        for name, value in {**taken, **seen}.items()
        if value.dtype.kind == "i"
    }
    stoch, classes = batch["dyn/stoch"].shape[2:]
    sizes = ModelConfig(
        deter=batch["dyn/deter"].shape[2], stoch=stoch, classes=classes, blocks=1, units=8
    )
    steps = ExecutionConfig(replay_context=int(data["cfg/replay_context"]))
    config = DreamerConfig(model=sizes, execution=steps)
    state = init_state(config, spaces_of(seen, choices), spaces_of(taken, choices), seed=0)
    sequence = without_context(state, arrays(batch), config)
    # Rows that go on from the batch before do not exist here: all start from what is stored.
    fresh = data["in/consec"][:, 0] == 0
    assert fresh.any()
    expected = state_of(data, "out/carry/")
    for ours, theirs in zip(sequence.carry, expected, strict=True):
        np.testing.assert_array_equal(ours[fresh], theirs[fresh])
    np.testing.assert_array_equal(sequence.stepid, data["out/stepid"])
    for name, value in part(data, "out/obs/").items():
        np.testing.assert_array_equal(sequence.obs[name], value)
    for name, value in part(data, "out/prevact/").items():
        np.testing.assert_array_equal(sequence.previous[name], value)
