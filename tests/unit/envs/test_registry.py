import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from dreamfleet import ConfigError
from dreamfleet.envs import (
    EnvError,
    MissingExtraError,
    UnknownTaskError,
    env_seed,
    make_env,
    make_visible_env,
    noop,
    suites,
    tasks,
)

MODULE = """
import gymnasium
import numpy as np
from dreamfleet import Space

class Native:
    obs_space = {
        "x": Space(np.float64, (2,)), "reward": Space(np.float32), "is_first": Space(bool),
        "is_last": Space(bool), "is_terminal": Space(bool),
    }
    act_space = {"push": Space(np.float64, (), 0, 10), "reset": Space(bool)}

    def __init__(self, gravity):
        self.gravity = gravity
        self.pushes = []

    def step(self, action):
        self.pushes.append(float(action["push"]))
        return {
            "x": np.full(2, self.gravity), "reward": 1.0, "is_first": bool(action["reset"]),
            "is_last": False, "is_terminal": False,
        }

def native(seed, gravity=9.81):
    native.seed = seed
    return Native(gravity)

def no_seed():
    return Native(1.0)

def anything(**options):
    return gymnasium.make("CartPole-v1", **options)

def buggy():
    return len(5)

def gymnasium_env():
    return gymnasium.make("CartPole-v1")

def broken():
    return "not an environment"

gymnasium.register("LabPole-v3", "gymnasium.envs.classic_control:CartPoleEnv")
gymnasium.register("lab/Pole-v0", "gymnasium.envs.classic_control:CartPoleEnv")
gymnasium.register("Unversioned", "gymnasium.envs.classic_control:CartPoleEnv")

class Needy(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(5)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size, speed=1):
        self.size = size

gymnasium.register("Needy-v0", Needy)

class nested:
    make = staticmethod(no_seed)

constant = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    package = tmp_path / "my_lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "worlds.py").write_text(MODULE)
    (package / "needy.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_lab.worlds"
    for name in [name for name in sys.modules if name.startswith("my_lab")]:
        del sys.modules[name]
    for name in ("LabPole-v3", "lab/Pole-v0", "Unversioned", "Needy-v0"):
        gymnasium.registry.pop(name, None)


def test_your_own_native_environment(module: str) -> None:
    env = make_env(f"{module}:native", seed=5, gravity=3.0)
    assert sys.modules[module].native.seed == 5
    obs = env.step({"push": np.float32(0.5), "reset": np.array(True)})
    assert obs["x"].dtype == np.float32
    assert obs["x"].tolist() == [3, 3]
    assert obs["is_first"].dtype == bool
    assert env.env.pushes == [7.5], "normalised: 0.5 is three quarters of 0..10"


def test_your_own_gymnasium_environment(module: str) -> None:
    env = make_env(f"{module}:gymnasium_env", seed=5)
    one = env.step(noop(env.act_space))["vector"]
    two = make_env("gym:CartPole-v1", seed=5).step(noop(env.act_space))["vector"]
    assert one.tolist() == two.tolist(), "seeded although the factory takes no seed"


@pytest.mark.parametrize(
    "task",
    [
        "my_lab.worlds:LabPole-v3",
        "gym:my_lab.worlds:LabPole-v3",
        "my_lab.worlds:lab/Pole-v0",
        "gym:my_lab.worlds:Unversioned",
    ],
)
def test_ids_of_a_module_are_written_as_gymnasium_does(module: str, task: str) -> None:
    assert not [name for name in gymnasium.registry if "LabPole" in name]
    env = make_env(task, max_episode_steps=1)
    env.step(noop(env.act_space))
    assert env.step(noop(env.act_space, reset=False))["is_last"]
    make_visible_env(task).close()
    with pytest.raises(ConfigError, match=r"gym:.* has no option 'hats'"):
        make_env(task, hats=3)
    make_env("gym:lab/Pole-v0").close()


def test_a_factory_itself_is_a_task(module: str) -> None:
    make_env(f"{module}:native")
    native = sys.modules[module].native
    env = make_env(native, seed=8, gravity=2.0, time_limit=1)
    assert native.seed == 8
    assert env.step(noop(env.act_space))["x"].tolist() == [2, 2]
    assert env.step(noop(env.act_space, reset=False))["is_last"]
    env.close()


def test_a_factory_may_take_no_seed_and_lie_in_a_class(module: str) -> None:
    make_env(f"{module}:no_seed")
    make_env(f"{module}:nested.make")


def test_a_factory_that_passes_everything_on_gets_the_given_options_only(
    module: str,
) -> None:
    env = make_env(f"{module}:anything", seed=5, max_episode_steps=3)
    ends = [env.step(noop(env.act_space, reset=not n))["is_last"] for n in range(4)]
    assert [bool(end) for end in ends] == [False, False, False, True]
    make_visible_env(f"{module}:anything").close()
    with pytest.raises(ConfigError, match=r"anything cannot be made with hats=3: .*'hats'"):
        make_env(f"{module}:anything", hats=3)
    # What is wrong without any option is a bug, which a person wants to see whole.
    with pytest.raises(TypeError, match="has no len"):
        make_env(f"{module}:buggy")


@pytest.mark.parametrize("task", ["my_lab.worlds:Needy", "my_lab.worlds:Needy-v0"])
def test_a_constructor_argument_that_is_missing_is_named_with_the_flag(
    module: str, task: str
) -> None:
    with pytest.raises(ConfigError, match="needs 'size': add --env-options size=VALUE"):
        make_env(task, speed=2)


def test_a_constructor_argument_may_be_called_like_an_option_of_all_tasks(module: str) -> None:
    env = make_env(f"{module}:Needy", size=5)
    assert env.env.env.size == 5


def test_a_visible_environment_renders(module: str) -> None:
    env = make_visible_env("gym:CartPole-v1")
    env.step(noop(env.act_space))
    assert np.shape(env.render()) == (400, 600, 3)
    env.close()
    make_visible_env("bundled:catch", balls=2).close()


class Window(gymnasium.Env[Any, Any]):
    """Renders as its constructor is told, as Gymnasium has it."""

    observation_space = gymnasium.spaces.Discrete(5)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        if self.metadata["render_modes"]:
            assert render_mode is None or render_mode in self.metadata["render_modes"]
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)


class Modes(Window):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human", "rgb_array"]}


class HumanOnly(Window):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human"]}


def test_the_render_mode_is_passed_by_itself() -> None:
    assert np.shape(make_visible_env(Window).render()) == (4, 4, 3)
    assert np.shape(make_visible_env(Modes).render()) == (4, 4, 3)
    assert make_visible_env(HumanOnly).render() is None
    assert make_env(Modes).render() is None, "frames cost time, and training needs none"


def test_a_repeat_of_one_is_one() -> None:
    """Also where the suite repeats actions by itself."""

    def make(*, repeat: int = 4) -> Any:
        asked.append(repeat)
        return make_env("bundled:dummy")

    asked: list[int] = []
    for given in (1, 2, None):
        make_env(make, repeat=given)
    make_env(make)
    assert asked == [1, 2, 4, 4]


@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        ("pong", UnknownTaskError, "write SUITE:NAME. Did you mean atari:pong"),
        ("catch", UnknownTaskError, "Did you mean bundled:catch"),
        ("gym:CartPol-v1", UnknownTaskError, "Did you mean gym:CartPole-v1"),
        ("gym:cartpole-v1", UnknownTaskError, "Did you mean gym:CartPole-v1"),
        ("gim:CartPole-v1", UnknownTaskError, "Did you mean gym:CartPole-v1"),
        ("dmc:walker_wlk", UnknownTaskError, "Did you mean dmc:walker_walk"),
        ("atari:pongg", UnknownTaskError, "Did you mean atari:pong"),
        ("crafter:rewrd", UnknownTaskError, "Did you mean crafter:reward"),
        ("minigrid:Empty-5x5", UnknownTaskError, "Did you mean minigrid:Empty-5x5-v0"),
        ("bundled:cach", UnknownTaskError, "Did you mean bundled:catch"),
        ("", UnknownTaskError, "Suites: bundled, gym"),
        ("gym:", UnknownTaskError, "write SUITE:NAME"),
        ("nowhere.at.all:make", UnknownTaskError, "no module 'nowhere.at.all'"),
        ("my_lab.world:native", UnknownTaskError, "no module 'my_lab.world'"),
        ("my_lab.worlds:nativ", UnknownTaskError, "did you mean 'native'"),
        ("my_lab.worlds:constant", UnknownTaskError, "not callable"),
        ("my_lab.worlds:LabPol-v3", UnknownTaskError, "registers no LabPol-v3: did you mean LabP"),
        ("my_lab.worlds:Nope-v0", UnknownTaskError, "registers no Nope-v0: check the spelling"),
        ("gym:my_lab.worlds:Lab", UnknownTaskError, "'my_lab.worlds' registers no Lab: "),
        ("gym:my_lab.world:LabPole-v3", UnknownTaskError, "no module 'my_lab.world'"),
        ("my_lab.needy:LabPole-v3", UnknownTaskError, "imported: No module named 'a_package"),
        ("gym:LabPole-v3", UnknownTaskError, "of yours registers it, write module:LabPole-v3"),
        ("worlds.py:native", UnknownTaskError, "drop .py and write worlds:native"),
        ("my_lab/worlds.py:native", UnknownTaskError, "write my_lab.worlds:native"),
        ("my_lab.worlds:broken", EnvError, "str is not an environment"),
        ("my_lab.needy:make", EnvError, "cannot be imported: No module named 'a_package"),
    ],
)
def test_wrong_tasks_are_refused_with_the_fix(
    module: str, task: str, error: type, words: str
) -> None:
    if task.startswith("dmc:"):
        pytest.importorskip("dm_control")  # which Python 3.13 does not have
    with pytest.raises(error, match=words) as caught:
        make_env(task)
    assert "\n" not in str(caught.value)


EXTRAS = [
    ("dmc:walker_walk", "dm_control", "dmc"),
    ("atari:pong", "ale_py", "atari"),
    ("atari100k:pong", "ale_py", "atari"),
    ("crafter:reward", "crafter", "crafter"),
    ("minigrid:Empty-5x5-v0", "minigrid", "minigrid"),
]


@pytest.mark.parametrize(("task", "package", "extra"), EXTRAS)
def test_a_missing_extra_is_one_sentence_with_the_command(
    monkeypatch: pytest.MonkeyPatch, task: str, package: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    with pytest.raises(MissingExtraError, match=rf"pip install 'dreamfleet\[{extra}\]'") as caught:
        make_env(task)
    assert "\n" not in str(caught.value)
    if extra == "dmc":  # which installs nothing with a newer Python
        monkeypatch.setattr(sys, "version_info", (3, 13, 0))
        with pytest.raises(MissingExtraError, match=r"labmaze, .* use Python 3\.11 or 3\.12"):
            make_env(task)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lenght": 5}, "no option 'lenght': did you mean 'length'"),
        ({"time_limt": 5}, "did you mean 'time_limit'"),
        ({"xyz": 1}, "no option 'xyz': it has .*length"),
        ({"repeat": 0}, "repeat=0 is not valid: use a whole number, at least 1"),
        ({"time_limit": -1}, "time_limit=-1 is not valid: use a whole number, at least 0"),
        ({"time_limit": "x"}, "time_limit=x is not valid: use a whole number"),
        ({"repeat": 1.5}, "repeat=1.5 is not valid"),
        ({"size": 32}, "size=32 is not valid: use 2 values, each entry a whole number, at least 1"),
        ({"size": (8, 0)}, r"size=\(8, 0\) is not valid"),
        ({"length": "long"}, "length=long is not valid: use a whole number"),
        ({"task": "gym:CartPole-v1", "hats": 3}, "'hats': it has .*max_episode_steps, obs, .*siz"),
        ({"task": "gym:CartPole-v1", "rendr": True}, "did you mean 'render'"),
        ({"task": "gym:CartPole-v1", "obs": "pixel"}, "use one of state, pixels, both"),
        ({"task": "gym:CartPole-v1", "render": "yes"}, "use true or false"),
        ({"task": "gym:CartPole-v1", "size": "big"}, "size=big is not valid"),
    ],
)
def test_wrong_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_env(**{"task": "bundled:dummy", **options})


@pytest.mark.parametrize(
    ("task", "option", "words"),
    [
        ("minigrid:Empty-5x5-v0", {"obs": "state"}, "use one of pixels, symbols"),
        ("atari:pong", {"lives": "life"}, "use one of unused, episode, reset"),
        ("dmc:walker_walk", {"camera": "side"}, "camera=side is not valid"),
    ],
)
def test_suites_refuse_wrong_values(task: str, option: dict, words: str) -> None:
    pytest.importorskip(
        {"atari": "ale_py", "dmc": "dm_control"}.get(task.partition(":")[0], "minigrid")
    )
    with pytest.raises(ConfigError, match=words):
        make_env(task, **option)


def test_every_suite_lists_its_tasks() -> None:
    assert "bundled" in suites()
    assert tasks("bundled") == ["catch", "corridor", "dummy", "pointmass"]
    for suite in suites():
        try:
            assert len(tasks(suite)) >= 2
        except MissingExtraError as error:
            pytest.skip(str(error))


def test_seeds_of_environments_differ() -> None:
    seeds = {env_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert env_seed(1, 2) == env_seed(1, 2)


def test_adapting_tells_what_is_missing() -> None:
    with pytest.raises(EnvError, match="dict is not an environment: it needs obs_space"):
        make_env(lambda: {1: 2})
