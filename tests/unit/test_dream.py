"""A world model to play with, and the real environment beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documents import python_blocks
from dream_parts import STREAM, small_run
from masked_parts import DOORS, Doors
from PIL import Image

from dreamfleet import ConfigError, Dream
from dreamfleet.agents import Dreamer, RandomAgent
from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.acting import draw
from dreamfleet.agents.dreamer.features import embed_actions
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.dream import Reality
from dreamfleet.dream.classic_control import restore
from dreamfleet.dream.reality import RealityError
from dreamfleet.envs import EpisodicEnv, Outcome, make_env, noop
from dreamfleet.policy import BLUEPRINT, Blueprint, Policy
from dreamfleet.replay.errors import ReplayError
from dreamfleet.spaces import Space

GAME = {"size": (16, 16), "balls": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of 14 steps of a game with images and discrete actions."""
    logdir = tmp_path_factory.mktemp("catch")
    small_run(logdir, "bundled:catch", 40, **GAME)
    return logdir


@pytest.fixture(scope="module")
def loaded(run: Path) -> Dream:
    return Dream.load(run)


@pytest.fixture
def dream(loaded: Dream) -> Dream:
    """One that has started; its programs are shared."""
    loaded.start()
    return loaded.branch()


def same(left: Any, right: Any) -> bool:
    return (left.reward, left.continuation, left.value) == (
        right.reward,
        right.continuation,
        right.value,
    ) and all(np.array_equal(left.obs[key], right.obs[key]) for key in left.obs)


# --- what it imagines ----------------------------------------------------------------------------


def test_it_imagines_what_the_networks_say(run: Path) -> None:
    """Step by step the same as all at once, with the same random numbers."""
    dream = Dream.load(run, seed=4)
    dream.start(observe=3)
    for action in (2, 0):
        imagined = dream.step(action)

    agent: Any = Policy.load(run).agent
    nets, steps = agent._nets, dream.observed
    words = np.random.SeedSequence(4).generate_state(2)

    def drawn(number: int) -> np.ndarray:
        return draw(words, number, nets.actor.actions, (1, nets.dynamics.draws)).state

    @jax.jit
    def expected(nets: Any, draws: Any, obs: Any, previous: Any) -> Any:
        observed = nets.dynamics.observe(
            nets.dynamics.initial(1),
            nets.encoder(obs),
            embed_actions(nets.actor.actions, previous, jnp.float32),
            obs["is_first"],
            jnp.stack(draws[:3], 1),
        )
        state = jax.tree.map(lambda part: part[:, -1], observed.states)
        for uniform, action in zip(draws[3:], (2, 0), strict=True):
            vector = embed_actions(nets.actor.actions, {"action": jnp.array([action])}, jnp.float32)
            state = nets.dynamics.step(state, vector, uniform)
        features = nets.dynamics.features(state)
        image = nets.decoder(tuple(part[:, None] for part in features))["image"][0, 0]
        numbers = tuple(dist.twohot_mean(head(features))[0] for head in (nets.critic, nets.reward))
        cont = jax.nn.sigmoid(nets.cont(features)[0, 0])
        return state, image, numbers, cont, jnp.argmax(nets.actor(features)["action"][0])

    state, image, numbers, cont, best = expected(
        nets,
        [drawn(number) for number in ((1 << 32), (1 << 32) + 1, (1 << 32) + 2, 1, 2)],
        {"image": steps["image"][None], "is_first": steps["is_first"][None]},
        {"action": np.array([[0, *steps["action"][:2]]], np.int32)},
    )
    np.testing.assert_allclose(imagined.obs["image"], np.round(image * 255), atol=1)
    np.testing.assert_allclose(imagined.latent.deter, state.deter, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose((imagined.value, imagined.reward), numbers, rtol=1e-3, atol=1e-5)
    alive = float(cont) / (1 - 1 / agent.config.loss.horizon)
    assert imagined.continuation == pytest.approx(min(alive, 1.0), rel=1e-4)
    assert dream.act(greedy=True)["action"] == best
    assert imagined.obs["image"].shape == (16, 16, 3)
    assert imagined.obs["image"].dtype == np.uint8


def test_the_same_actions_give_the_same_dream_and_others_another(dream: Dream) -> None:
    first = [dream.step(action) for action in (0, 2, 2)]
    assert dream.rewind(2) is first[0]
    assert dream.go(3) is first[2]  # what lies behind is kept until another action is taken
    dream.go(1)
    other = dream.branch()
    assert same(other.step(2), first[1])
    assert not same(other.step(0), first[2])
    assert [each.number for each in dream.line] == [0, 1, 2, 3]  # the branch has its own
    different = dream.step(0)
    assert not same(different, first[1])
    assert [each.number for each in dream.line] == [0, 1, 2]
    start = dream.reset()
    assert dream.line == [start]
    assert same(dream.step(0), first[0])
    dream.reset()
    dream.seed = 99
    assert not np.array_equal(dream.step(0).latent.stoch, first[0].latent.stoch)


def test_moments_are_kept_up_to_a_number(dream: Dream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamfleet.dream.dream._KEPT", 3)
    start = dream.now
    for _ in range(5):
        dream.step(dream.act())
    assert [each.number for each in dream.line] == [3, 4, 5]
    assert dream.rewind(100).number == 3
    with pytest.raises(ConfigError, match="Step 2 is not kept: 3 to 5 are kept"):
        dream.go(2)
    assert dream.reset() is start


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (3, "outside of its space"),
        (1.0, "outside of its space"),
        ([1], r"shape \(1,\)"),
        ({"jump": 1}, "lacks action"),
        ("left", "shape"),
    ],
)
def test_a_wrong_action_is_named(dream: Dream, action: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dream.step(action)


def test_vectors_tokens_and_several_actions() -> None:
    """Numbers are decoded as the environment has them, and continuous actions are clipped."""
    agent = Dreamer(worlds.VECTOR, worlds.ACTIONS, worlds.config(), seed=1)
    observed = {key: s for key, s in worlds.VECTOR.items() if key not in worlds.FLAGS}
    dream = Dream(agent.world_model(), observed, agent.act_space)
    with pytest.raises(ConfigError, match="not started"):
        dream.step({})
    dream.start({"vector": np.full((1, 5), 40.0), "token": np.array([2])})
    chosen = dream.act()
    assert {key: value.shape for key, value in chosen.items()} == {
        "move": (2,),
        "button": (),
        "keys": (2,),
    }
    imagined = dream.step({**chosen, "move": [5.0, -0.5]})
    np.testing.assert_array_equal(imagined.action["move"], np.array([1.0, -0.5], np.float32))
    assert imagined.obs["vector"].shape == (5,)
    assert imagined.obs["token"].dtype == np.int32
    assert 0 <= imagined.obs["token"] < 4
    nets = agent._state.nets
    latent = jax.tree.map(jnp.asarray, imagined.latent)
    features = tuple(part[:, None] for part in nets.dynamics.features(latent))
    decode = jax.jit(lambda nets, parts: dist.symexp(nets.decoder(parts)["vector"])[0, 0])
    expected = decode(nets, features)
    np.testing.assert_allclose(imagined.obs["vector"], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="NaN"):
        dream.step({**chosen, "move": [np.nan, 0.0]})
    with pytest.raises(ConfigError, match="dict with the keys"):
        dream.step(1)
    with pytest.raises(ConfigError, match="no 'token'"):
        dream.start({"vector": np.zeros((1, 5))})
    with pytest.raises(ConfigError, match=r"shape \(1, 4\)"):
        dream.start({"vector": np.zeros((1, 4)), "token": np.array([2])})


def test_the_policy_obeys_the_mask_that_is_predicted() -> None:
    env = Doors()
    agent = Dreamer(env.obs_space, env.act_space, worlds.config(), seed=1)
    keys = ("room", "action_mask")
    spaces = {key: env.obs_space[key] for key in keys}
    dream = Dream(agent.world_model(), spaces, agent.act_space)
    obs = env.step(noop(env.act_space))
    dream.start({key: obs[key][None] for key in keys})
    for _ in range(20):
        allowed = dream.now.allowed
        assert allowed.shape == (DOORS,)
        assert allowed.any()
        for greedy in (False, True):
            assert allowed[int(dream.act(greedy=greedy)["door"])]
        dream.step(dream.act())


# --- loading -------------------------------------------------------------------------------------


def test_a_checkpoint_alone_will_do(run: Path, tmp_path: Path) -> None:
    [checkpoint] = (run / "ckpt" / "agent").iterdir()
    assert Dream.load(checkpoint).episodes() != []
    assert Dream.load(run / "ckpt" / "agent").episodes() != []
    alone = tmp_path / "ckpt" / "agent" / checkpoint.name
    alone.parent.mkdir(parents=True)
    alone.symlink_to(checkpoint)
    dream = Dream.load(tmp_path)
    assert dream.trained_steps == 70
    with pytest.raises(ConfigError, match="no replay to start from"):
        dream.start()


def test_no_code_is_imported_because_a_checkpoint_names_it(run: Path, tmp_path: Path) -> None:
    blueprint = Policy.load(run).blueprint
    settings: Any = blueprint.config.agent_config
    named = replace(settings, model=replace(settings.model, decoder="evil_module:Decoder"))
    parts = replace(blueprint, config=replace(blueprint.config, agent_config=named)).save()
    Checkpoint(tmp_path / "ckpt" / "agent").save({"agent": {}, BLUEPRINT: parts}, step=1)
    with pytest.raises(ConfigError, match="evil_module:Decoder, which is not part of Dreamfleet"):
        Dream.load(tmp_path)
    with pytest.raises(ConfigError, match="evil_envs:Env, which is not part of Dreamfleet"):
        Reality(replace(blueprint, config=replace(blueprint.config, task="evil_envs:Env")))


def test_an_agent_without_a_world_model_is_refused(tmp_path: Path) -> None:
    env = make_env("bundled:catch")
    agent = RandomAgent(env.obs_space, env.act_space)
    blueprint = Blueprint.of(agent, RunConfig(agent="random", task="bundled:catch"))
    parts = {"agent": agent.save(), BLUEPRINT: blueprint.save()}
    Checkpoint(tmp_path / "ckpt" / "agent").save(parts, step=1)
    with pytest.raises(ConfigError, match="RandomAgent, which has no world model"):
        Dream.load(tmp_path)


# --- starting ------------------------------------------------------------------------------------


def test_it_starts_from_the_newest_complete_episode(loaded: Dream) -> None:
    episodes = loaded.episodes()
    assert [(each.length, each.begins, each.ends) for each in episodes] == [
        (10, True, False),
        (15, True, True),
        (15, True, True),
    ]
    assert {each.stream for each in episodes} == {STREAM}
    assert [each.score in (-2.0, 0.0, 2.0) for each in episodes[1:]] == [True, True]
    loaded.start()
    stored = episodes[1].read(0, 5)
    for key, value in stored.items():
        np.testing.assert_array_equal(loaded.observed[key], value)
    with pytest.raises(ConfigError, match=r"observe=16 .* 15 steps"):
        loaded.start(episodes[1], observe=16)
    with pytest.raises(ReplayError, match="no steps"):
        episodes[1].read(3, 17)


def test_in_the_middle_of_an_episode_the_stored_state_counts(loaded: Dream) -> None:
    """Further back than it reads, the world model goes on from what is stored."""
    episode = loaded.episodes()[1]
    rows = episode.read(7, 10)
    with_state = loaded.start(rows)
    without = loaded.start({k: v for k, v in rows.items() if not k.startswith("dyn/")})
    assert not same(with_state, without)
    other = {**rows, "dyn/deter": np.zeros_like(rows["dyn/deter"])[:, :3]}
    assert same(loaded.start(other), without)  # stored by an agent of another size


# --- reality -------------------------------------------------------------------------------------


def test_reality_goes_where_the_dream_started(loaded: Dream) -> None:
    """The same seed and the same actions since: every stored observation comes back."""
    assert loaded.blueprint is not None
    episode = loaded.episodes()[1]
    loaded.start(episode, observe=6)
    real = Reality(loaded.blueprint)
    here = real.follow(episode, 6)
    stored = episode.read()
    np.testing.assert_array_equal(here.obs["image"], stored["image"][5])
    np.testing.assert_array_equal(here.frame, stored["image"][5])
    for number in range(6, 10):
        now = real.step({"action": stored["action"][number - 1]})
        np.testing.assert_array_equal(now.obs["image"], stored["image"][number])
        assert now.number == number - 5
    back = real.go([{"action": stored["action"][5]}])
    np.testing.assert_array_equal(back.obs["image"], stored["image"][6])
    assert back.number == 1
    assert real.action_names == ("left", "stay", "right")
    stay = {"action": np.ones((), stored["action"].dtype)}
    while not now.last:
        now = real.step(stay)
    assert now.number == len(stored["image"]) - 6
    assert real.step(stay) is now  # nothing happens any more
    again = real.go([stay] * 20)
    assert (again.number, again.last, again.frame is None) == (now.number, True, False)
    real.close()


def test_reality_admits_that_it_cannot_get_there(
    loaded: Dream, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded.blueprint is not None
    episode = loaded.episodes()[1]
    config = replace(loaded.blueprint.config, seed=6)
    other = Reality(replace(loaded.blueprint, config=config))
    with pytest.raises(RealityError, match="same seed and actions give other observations"):
        other.follow(episode, 6)
    real = Reality(loaded.blueprint)
    with pytest.raises(RealityError, match="no longer holds"):
        real.follow(replace(episode, complete=False), 6)
    with monkeypatch.context() as patch:
        patch.setattr("dreamfleet.dream.reality._MAX_HISTORY", 14)
        with pytest.raises(RealityError, match="15 steps would have to be repeated"):
            real.follow(episode, 6)
    # A fresh episode always works, and a dream starts from it.
    first = real.fresh(seed=1)
    assert loaded.start(real.steps).number == 0
    np.testing.assert_array_equal(loaded.observed["image"][0], first.obs["image"])
    real.close()


@pytest.mark.parametrize(
    "task",
    ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"],
)
def test_classic_control_is_put_into_the_state_that_it_shows(task: str) -> None:
    """From there it goes on as the one whose observation it was."""
    env, other = (make_env(f"gym:{task}", seed=seed) for seed in (1, 2))
    rng = np.random.default_rng(0)
    actions = [
        {"action": env.act_space["action"].sample(rng), "reset": np.array(False)} for _ in range(8)
    ]
    for each in (env, other):
        each.step(noop(env.act_space))
    for action in actions[:4]:
        obs = env.step(action)
    assert restore(other, obs)
    for action in actions[4:]:
        expected, found = env.step(action), other.step(action)
        np.testing.assert_allclose(found["vector"], expected["vector"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found["reward"], expected["reward"], rtol=1e-4, atol=1e-4)
    env.close()
    other.close()


def test_a_vector_task_is_drawn_by_its_own_renderer(tmp_path: Path) -> None:
    """Of the place that was imagined; and reality is put where the dream is."""
    small_run(tmp_path, "bundled:pointmass", 30, length=20)
    dream = Dream.load(tmp_path)
    assert dream.blueprint is not None
    episode = replace(dream.episodes()[1], complete=False)
    dream.start(episode, observe=8)
    with_reality = Reality(dream.blueprint)
    real = with_reality.follow(episode, 8)
    stored = episode.read()
    now = with_reality.step({"action": stored["action"][7]})
    np.testing.assert_allclose(now.obs["position"], stored["position"][8], atol=1e-6)
    np.testing.assert_array_equal(with_reality.draw(real.obs), real.frame)
    imagined = dream.step(dream.act())
    assert imagined.obs["position"].shape == (2,)
    drawn = with_reality.draw(imagined.obs)
    assert drawn.shape == (64, 64, 3)
    with_reality.close()


class Moody(EpisodicEnv):
    """Draws from a source that no seed reaches, and fails when it is told to."""

    born = 0

    def __init__(self, seed: int = 0) -> None:
        super().__init__({"mood": Space(np.float32)}, {"action": Space(np.int32, (), 0, 2)})
        Moody.born += 1
        self._mood = np.float32(Moody.born)

    def _begin(self) -> Any:
        return {"mood": np.asarray(self._mood)}

    def _advance(self, action: Any) -> Outcome:
        if action["action"]:
            raise RuntimeError("I do not want to")
        return Outcome({"mood": np.asarray(self._mood)})


def test_an_environment_with_a_will_of_its_own(loaded: Dream) -> None:
    assert loaded.blueprint is not None
    spaces = {"mood": Space(np.float32)}
    config = replace(loaded.blueprint.config, env_options={})
    blueprint = replace(loaded.blueprint, config=config, obs_space=spaces)
    real = Reality(blueprint, env=Moody)
    real.fresh()
    real.step({"action": np.array(0)})
    with pytest.raises(RealityError, match="the same seed and actions gave other observations"):
        real.go([])
    real.fresh()
    with pytest.raises(RealityError, match="RuntimeError: I do not want to"):
        real.step({"action": np.array(1)})
    assert real.draw({"mood": np.zeros(())}) is None
    stack = np.arange(64, dtype=np.uint8).reshape(4, 4, 4)
    np.testing.assert_array_equal(real.draw({"image": stack}), stack[..., -1:])
    real.close()


# --- documentation -------------------------------------------------------------------------------


def test_the_programs_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(tmp_path / "runs" / "gym-CartPole-v1", "gym:CartPole-v1", 60)
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks("dream.md")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "dream.md", "exec"), {})
    with Image.open("dream.png") as picture:
        assert picture.size == (6 * 200, 2 * 120)
