"""A checkpoint becomes a function from observations to actions, and needs nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import gymnasium
import numpy as np
import pytest

from dreamfleet import ConfigError, Policy, Space
from dreamfleet.agents import Dreamer, ExecutionConfig, RandomAgent
from dreamfleet.agents.api import Mode
from dreamfleet.agents.dreamer.runtime.player import DreamerPlayer
from dreamfleet.agents.registry import find_agent
from dreamfleet.checkpoint import Checkpoint, CheckpointError
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.envs import SpaceError, make_env, noop
from dreamfleet.policy import BLUEPRINT, Blueprint, run_of
from dreamfleet.presets import PRESETS
from dreamfleet.training import final_evaluation

Run = tuple[Path, Dreamer]


def saved(logdir: Path, agent: Any, config: RunConfig, step: int = 70) -> Path:
    """A checkpoint as the learner writes it."""
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    return Checkpoint(logdir / "ckpt" / "agent").save(parts, step=step)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run's directory that holds a checkpoint and nothing else, and the agent that wrote it."""
    logdir = tmp_path_factory.mktemp("run")
    config = RunConfig(agent_config=worlds.config(), env_options={"size": (16, 16)})
    agent = Dreamer(worlds.MIXED, worlds.ACTIONS, config.agent_config, seed=3)
    saved(logdir, agent, config)
    return logdir, agent


def observations(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    spaces = {key: space for key, space in worlds.MIXED.items() if key not in worlds.FLAGS}
    return {k: np.stack([s.sample(rng) for _ in range(count)]) for k, s in spaces.items()}


@pytest.mark.parametrize("greedy", [False, True])
def test_it_acts_as_the_agent_does(run: Run, greedy: bool) -> None:
    logdir, _ = run
    policy, agent = Policy.load(logdir, greedy=greedy), Policy.load(logdir).agent
    carry, state = agent.init_policy(3), policy.reset(3)
    for number in range(4):
        obs = observations(3, number)
        flags = {key: np.zeros(3, space.dtype) for key, space in worlds.FLAGS.items()}
        flags["is_first"][:] = number == 0
        mode: Mode = "greedy" if greedy else "eval"
        carry, expected, _ = agent.policy(carry, {**obs, **flags}, mode)
        actions, state = policy(obs, state)
        for key in ("button", "keys"):
            np.testing.assert_array_equal(actions[key], expected[key])
        np.testing.assert_array_equal(actions["move"], np.clip(expected["move"], -1, 1))
    assert policy.step == 70
    assert set(policy.obs_space) == {"vector", "token", "image", "depth"}


def test_one_observation_is_a_batch_of_one(run: Run) -> None:
    alone, batched = Policy.load(run[0]), Policy.load(run[0])
    state = rows = None
    for number in range(3):
        obs = observations(1, number)
        one, state = alone({key: value[0] for key, value in obs.items()}, state)
        many, rows = batched(obs, rows)
        for key, space in worlds.ACTIONS.items():
            if key != "reset":
                assert one[key].shape == space.shape
                np.testing.assert_array_equal(one[key], many[key][0])


def test_it_remembers_and_forgets(run: Run) -> None:
    """The carry after an observation depends on what came before, unless the row was reset."""
    first, second = observations(2, 1), observations(2, 2)

    def carry_after(restart: list[bool] | None, **flags: Any) -> np.ndarray:
        policy = Policy.load(run[0])
        _, state = policy(first)
        before = state.carry["state"].deter.copy()
        later = state.restart(restart) if restart else state
        _, after = policy({**second, **flags}, later)
        np.testing.assert_array_equal(state.carry["state"].deter, before)  # states may be kept
        return after.carry["state"].deter

    remembered = carry_after(None)
    forgotten = carry_after([True, False])
    np.testing.assert_array_equal(remembered[1], forgotten[1])
    assert not np.allclose(remembered[0], forgotten[0])
    np.testing.assert_array_equal(forgotten, carry_after(None, is_first=[True, False]))
    policy = Policy.load(run[0])
    policy(first)
    fresh = policy(second)[1].carry["state"].deter
    np.testing.assert_allclose(forgotten[0], fresh[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vector": None}, "no 'vector'"),
        ({"vector": np.zeros((2, 4))}, r"'vector' is float64\(2, 4\)"),
        ({"vector": np.zeros((3, 5))}, "different numbers of observations"),
        ({"image": np.zeros((2, 16, 16, 3))}, "'image' is float64.* uint8.*for_gym"),
        ({"image": np.zeros((2, 3, 16, 16), np.uint8)}, r"\(2, 3, 16, 16\).*for_gym\(env\)"),
    ],
)
def test_a_wrong_observation_is_named(run: Run, change: dict[str, Any], words: str) -> None:
    obs = {k: v for k, v in {**observations(2), **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=words):
        Policy.load(run[0])(obs)


def test_a_state_of_another_size_is_refused(run: Run) -> None:
    policy = Policy.load(run[0])
    with pytest.raises(ConfigError, match="2 observations and a state for 3"):
        policy(observations(2), policy.reset(3))


@pytest.mark.parametrize("inside", ["", "ckpt/agent", "ckpt/agent/000001-step-000000000070"])
def test_a_run_its_checkpoints_and_one_of_them_will_do(run: Run, inside: str) -> None:
    assert Policy.load(run[0] / inside).step == 70


def test_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        Policy.load(tmp_path)
    Checkpoint(tmp_path).save({"agent": {}}, step=1)
    with pytest.raises(CheckpointError, match="has no part 'blueprint', only agent"):
        Policy.load(tmp_path)


def test_a_moved_checkpoint_loads_in_a_process_that_knows_nothing(run: Run, tmp_path: Path) -> None:
    (run[0] / "ckpt").rename(run[0] / "elsewhere")
    try:
        code = (
            "import sys, numpy as np; from dreamfleet import Policy\n"
            "policy = Policy.load(sys.argv[1])\n"
            "obs = {k: np.zeros(s.shape, s.dtype) for k, s in policy.obs_space.items()}\n"
            "action, state = policy(obs)\n"
            "print(sorted(action), [m for m in sys.modules if m.startswith('dreamfleet.') and "
            "m.split('.')[1] in ('fleet', 'roles', 'replay', 'envs', 'transport') and m not in "
            "('dreamfleet.replay', 'dreamfleet.replay.config', 'dreamfleet.replay.errors')])"
        )
        command = [sys.executable, "-c", code, str(run[0] / "elsewhere" / "agent")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.stdout.strip() == "['button', 'keys', 'move'] []", done.stderr
    finally:
        (run[0] / "elsewhere").rename(run[0] / "ckpt")


def test_an_agent_that_a_function_made_is_described_as_it_is(tmp_path: Path) -> None:
    """Whatever the configuration of the run says."""
    spaces = worlds.VECTOR, worlds.ACTIONS
    agent = Dreamer(*spaces, worlds.config())
    for config in (RunConfig(), RunConfig(agent="random")):
        assert config.agent_config != agent.config
        saved(tmp_path / config.agent, agent, config)
        loaded = Policy.load(tmp_path / config.agent).agent
        assert isinstance(loaded, DreamerPlayer)
        assert loaded.config.model == agent.config.model
    saved(tmp_path / "random-as-dreamer", RandomAgent(*spaces), RunConfig())
    assert isinstance(Policy.load(tmp_path / "random-as-dreamer").agent, RandomAgent)


class OfAFunction(RandomAgent):
    pass


def test_an_agent_of_an_unknown_type_is_asked_for(tmp_path: Path) -> None:
    spaces = {"vector": Space(np.float32, (2,))}, {"action": Space(np.int32, (), 0, 5)}
    agent = OfAFunction(*spaces)
    saved(tmp_path, agent, RunConfig())
    words = r"test_policy:OfAFunction, which a function of yours made: pass such an agent"
    with pytest.raises(ConfigError, match=words):
        Policy.load(tmp_path)
    assert Policy.load(tmp_path, agent=agent).agent is agent


def test_devices_and_folders_of_the_training_machine_are_not_used(tmp_path: Path) -> None:
    """A downloaded checkpoint must not say where compiled programs are loaded from."""
    folders = {"cache_dir": str(tmp_path / "cache"), "dump_dir": str(tmp_path / "dump")}
    settings = worlds.config(train_platform="tpu", policy_platform="gpu", **folders)
    config = RunConfig(agent_config=settings)
    blueprint = Blueprint(config, worlds.VECTOR, worlds.ACTIONS, {})
    agent = blueprint.build(find_agent("dreamer"))
    assert isinstance(agent, DreamerPlayer)
    here = agent.config.execution
    assert (here.train_platform, here.policy_platform) == ("", "")
    assert (here.cache_dir, here.dump_dir) == (ExecutionConfig().cache_dir, "")
    assert not list(tmp_path.iterdir())


OWN_AGENT = """
from dataclasses import dataclass
from dreamfleet.agents import RandomAgent
from dreamfleet.agents.registry import AgentType

print("imported")


@dataclass(frozen=True)
class Settings:
    hats: int = 3


class Own(RandomAgent):
    hats = 0


class OwnType(AgentType):
    name = "own"
    config = Settings

    def make(self, obs_space, act_space, config, *, seed):
        agent = Own(obs_space, act_space, seed=seed)
        agent.hats = config.hats
        return agent


AGENT = OwnType()
"""


def test_an_agent_of_your_own_is_imported_only_when_you_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_agent.py").write_text(OWN_AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "my_own_agent:AGENT"
    config = RunConfig(agent=name).changed({"own.hats": 5})
    spaces = {"vector": Space(np.float32, (2,))}, {"action": Space(np.int32, (), 0, 5)}
    mine = config.agent_type.make(*spaces, config.agent_config, seed=0)
    saved(tmp_path, mine, config)
    (tmp_path / "config.json").write_text(config.to_json())
    code = (
        "import sys, json; from pathlib import Path; from dreamfleet import Policy, ConfigError\n"
        "from dreamfleet.config import read_config, ForeignSettings\n"
        "config = read_config(Path(sys.argv[1]))\n"
        "assert config.agent_config == ForeignSettings('own', {'hats': 5})\n"
        "assert json.loads(config.to_json())['own'] == {'hats': 5}\n"
        "try: Policy.load(sys.argv[1])\n"
        "except ConfigError as error: print(error)\n"
        "assert 'my_own_agent' not in sys.modules\n"
        "assert config.changed({}).agent_config.hats == 5\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith("add --agent my_own_agent:AGENT, or --trust (trust=True in Python).")
    assert second == "imported"
    for agent in (name, config.agent_type, mine):
        policy = Policy.load(tmp_path, agent=agent)
        assert policy.agent.hats == 5
        assert policy({"vector": np.zeros(2)})[0]["action"].shape == ()
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        Policy.load(tmp_path, agent="nowhere:AGENT")


def test_a_configuration_and_spaces_survive_the_checkpoint() -> None:
    spaces = {
        **worlds.MIXED,
        "bounds": Space(np.float32, (2,), [-1, -np.inf], [1, np.inf]),
        "many": Space(np.int32, (2, 2), 0, [[2, 3], [4, 5]]),
    }
    stored = {"dyn/deter": Space(np.float32, (16,))}
    for config in PRESETS.values():
        changed = replace(config, env_options={"size": (8, 8), "render": True})
        written = Blueprint(changed, spaces, worlds.ACTIONS, stored).save()
        assert all(isinstance(value, str) for value in written.values())
        assert Blueprint.load(json.loads(json.dumps(written))) == Blueprint(
            changed, spaces, worlds.ACTIONS, stored
        )


@pytest.mark.parametrize(
    "damage",
    [
        {"config": None},
        {"obs_space": None},
        {"act_space": "[]"},
        {"obs_space": "{"},
        {"stored_space": '{"a": {}}'},
        {"obs_space": '{"a": {"dtype": "hat", "shape": [], "low": "0", "high": "1"}}'},
    ],
    ids=str,
)
def test_a_damaged_blueprint_is_a_sentence(damage: dict[str, Any]) -> None:
    agent = RandomAgent(worlds.VECTOR, worlds.ACTIONS)
    described = {**Blueprint.of(agent, RunConfig(agent="random")).save(), **damage}
    damaged = {name: value for name, value in described.items() if value is not None}
    with pytest.raises(ConfigError, match=r"^The checkpoint's description of its agent is damaged"):
        Blueprint.load(damaged)


def test_settings_of_other_versions_are_passed_over() -> None:
    values = json.loads(RunConfig(envs=3).to_json())
    del values["batch_size"]
    values["hats"] = 4
    assert RunConfig.from_json(json.dumps(values)) == RunConfig(envs=3)
    with pytest.raises(ConfigError, match=r"not the configuration of a run.*version"):
        RunConfig.from_json(json.dumps({**values, "envs": "many"}))


# --- Gymnasium -----------------------------------------------------------------------------------


class Grid(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(
        {"image": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)}
    )
    action_space = gymnasium.spaces.Box(-4, 2, (2,), np.float32)


def test_gymnasium_gets_its_own_actions() -> None:
    """Images are resized to those of training, and actions mapped to the environment's bounds."""
    seen = []

    def policy(obs: dict[str, Any], state: Any) -> Any:
        seen.append((obs["image"].shape, state))
        return {"action": np.array([-1.0, 3.0])}, "next"

    from dreamfleet.envs.gym import GymPlayer

    play = GymPlayer(policy, {"image": Space(np.uint8, (4, 4, 3))}, Grid())
    observation = {"image": np.zeros((8, 8, 3), np.uint8)}
    np.testing.assert_array_equal(play(observation), [-4, 2])
    play(observation)
    play.reset()
    play(observation)
    assert seen == [((4, 4, 3), None), ((4, 4, 3), "next"), ((4, 4, 3), None)]


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        ({"vector": Space(np.float32, (4,))}, "gives image"),
        ({"image": Space(np.uint8, 3)}, "shape"),
    ],
)
def test_an_environment_of_another_kind_is_refused(trained: dict[str, Space], words: str) -> None:
    policy = Policy(RandomAgent(trained, worlds.ACTIONS), trained, worlds.ACTIONS)
    with pytest.raises(SpaceError, match=words):
        policy.for_gym(Grid())


class Stack(gymnasium.Env):
    """Nothing about it is as agents take it."""

    observation_space = gymnasium.spaces.Dict(
        {
            "stack": gymnasium.spaces.Box(0, 255, (4, 32, 32), np.uint8),
            "odd": gymnasium.spaces.Box(0, 1, (3, 32, 3), np.float32),
            "gray": gymnasium.spaces.Box(0, 255, (32, 32), np.uint8),
            "token": gymnasium.spaces.Discrete(3, start=5),
        }
    )
    action_space = gymnasium.spaces.Tuple(
        [gymnasium.spaces.Box(-np.inf, np.inf, (2,)), gymnasium.spaces.Discrete(2, start=7)]
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        raise NotImplementedError


def test_gymnasium_is_converted_as_in_training(tmp_path: Path) -> None:
    options = {"image_layout": {"odd": "hwc"}, "action_bounds": [-7, 9], "size": (16, 16)}
    inner = Stack()
    env = make_env(lambda: inner, **options)
    agent = RandomAgent(env.obs_space, env.act_space)
    saved(tmp_path, agent, RunConfig(agent="random", env_options=options))
    policy = Policy.load(tmp_path)
    given: list[Any] = []

    def act(carry: Any, obs: Any, mode: Any) -> Any:
        given.append(obs)
        return carry, {"0": np.array([[-1.0, 1.0]]), "1": np.array([1])}, {}

    policy.agent.policy = act  # type: ignore[method-assign]
    raw, _ = inner.reset()
    inner.reset = lambda **_: (raw, {})  # type: ignore[method-assign]
    push, button = policy.for_gym(inner)(raw)
    assert (push.tolist(), button) == ([-7, 9], 8)
    expected = env.step(noop(env.act_space))
    for key in ("stack", "odd", "gray", "token"):
        assert given[0][key].dtype == expected[key].dtype
        np.testing.assert_array_equal(given[0][key][0], expected[key])
    assert expected["stack"].shape == (16, 16, 4)


def test_the_example_plays(tmp_path: Path) -> None:
    spaces = {"vector": Space(np.float32, (4,))} | worlds.FLAGS
    agent = RandomAgent(spaces, {"action": Space(np.int32, (), 0, 2)})
    saved(tmp_path, agent, RunConfig(agent="random"))
    example = Path(__file__).parents[2] / "examples" / "use_a_policy.py"
    command = [sys.executable, str(example), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert re.fullmatch(r"(episode \d: score \d+ after .*\n){2}", done.stdout), done.stderr
    assert "after 70 steps" in done.stdout


def test_the_best_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    spaces = {"vector": Space(np.float32, (2,))}, {"action": Space(np.int32, (), 0, 5)}
    agent = RandomAgent(*spaces)
    config = RunConfig(agent="random")
    saved(tmp_path, agent, config, step=5)
    with pytest.raises(ConfigError, match="no checkpoint with an evaluation score"):
        Policy.load(tmp_path, "best")
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    for step, score in ((10, 1.0), (20, 9.0), (30, 4.0), (40, 5.0)):
        Checkpoint(tmp_path / "ckpt" / "agent").save(parts, step=step, score=score)
    assert Policy.load(tmp_path, "best").step == 20
    assert Policy.load(tmp_path).step == 40


def test_networks_of_your_own_are_imported_only_when_you_name_them(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A downloaded checkpoint must not choose what is imported."""
    _, agent = run
    config = RunConfig(agent_config=agent.config).changed(
        {"dreamer.model.encoder": "surprise_package.networks:Encoder"}
    )
    described = replace(Blueprint.of(agent, config), config=config)
    parts = {"agent": agent.save(), BLUEPRINT: described.save()}
    Checkpoint(tmp_path / "ckpt" / "agent").save(parts, step=1)
    name = "surprise_package.networks:Encoder"
    for arguments in ({}, {"agent": "dreamer"}, {"agent": find_agent("dreamer"), "trust": ["x:Y"]}):
        with pytest.raises(ConfigError, match=rf"names {name}, which .* add --trust \(trust"):
            Policy.load(tmp_path, **arguments)
    for trust in (True, [name], name):  # now it is looked for
        with pytest.raises(ConfigError, match="There is no module 'surprise_package"):
            Policy.load(tmp_path, trust=trust)
    assert main(["eval", str(tmp_path), "--agent", "dreamer"]) == 2
    assert "add --trust" in capsys.readouterr().err
    # The evaluation at the end of a run, and its rounds, trust what the run itself is made of.
    own = replace(config, logdir=tmp_path, eval_episodes=1)
    with pytest.raises(ConfigError, match="There is no module 'surprise_package"):
        final_evaluation(own, 0.0)
    with pytest.raises(ConfigError, match=f"names {name}, which"):
        final_evaluation(replace(own, agent_config=agent.config), 0.0)


def test_a_copied_checkpoint_belongs_to_no_run_above_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = run / "ckpt" / "agent"
    inside = Checkpoint(folder).save({"agent": {"x": np.zeros(1)}}, step=1)
    assert [run_of(each) for each in (run, folder, inside)] == [run, run, run]
    copied = tmp_path / "home" / "exports" / "policy"
    Checkpoint(copied.parent).save({"agent": {"x": np.zeros(1)}}, step=1).rename(copied)
    assert run_of(copied) == copied
    assert run_of(copied.parent) == copied.parent
    assert run_of(Path("/ckpts")) == Path("/ckpts")
