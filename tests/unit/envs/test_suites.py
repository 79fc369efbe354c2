"""What is particular about each suite; the contract tests cover what they have in common."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dreamfleet.envs import EnvError, make_env, noop
from dreamfleet.envs import dmc as dmc_suite

NO = np.array(False)


class TestAtari:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("ale_py")

    def test_the_published_protocol(self) -> None:
        env = make_env("atari:pong")
        assert env.obs_space["image"].shape == (96, 96, 1)
        assert env.act_space["action"].classes == 18
        assert ale(env).getFloat("repeat_action_probability") == 0.25

    def test_the_100k_protocol(self) -> None:
        env = make_env("atari100k:pong")
        assert env.obs_space["image"].shape == (64, 64, 3)
        assert env.act_space["action"].classes == 6
        assert ale(env).getFloat("repeat_action_probability") == 0

    def test_a_grey_image_is_that_of_colours_but_for_rounding(self) -> None:
        grey, colour = (
            make_env("atari:pong", seed=1, noops=0, sticky=False, gray=gray)
            for gray in (True, False)
        )
        for step in range(20):
            action = {"action": np.int32(step % 18), "reset": np.array(step == 0)}
            image, small = (env.step(action)["image"] for env in (grey, colour))
            luma = small.astype(np.float64) @ [0.299, 0.587, 0.114]
            # Colours are made grey before images are made small, which rounds them otherwise.
            assert np.abs(image[..., 0] - np.rint(luma)).max() <= 1

    def test_an_action_lasts_four_frames(self) -> None:
        for repeat in (4, 2):
            env = make_env("atari:pong", noops=0, repeat=repeat)
            env.step(noop(env.act_space))
            before = ale(env).getEpisodeFrameNumber()
            env.step({"action": np.int32(0), "reset": NO})
            assert ale(env).getEpisodeFrameNumber() - before == repeat

    def test_idle_frames_begin_an_episode_and_differ(self) -> None:
        env = make_env("atari:pong", noops=30)
        starts = []
        for _ in range(12):
            env.step(noop(env.act_space))
            starts.append(ale(env).getEpisodeFrameNumber())
        assert max(starts) - min(starts) <= 30
        assert len(set(starts)) > 3

    def test_pooling_shows_what_flickers(self) -> None:
        """The picture is the brighter of the last two frames, pixel by pixel."""
        env = make_env("atari:space_invaders", noops=0, sticky=False, size=(210, 160), gray=False)
        inner = env.env
        env.step(noop(env.act_space))
        screens = []
        act = inner._ale.act

        class Spy:
            def __getattr__(self, name: str):
                return getattr(game, name)

            def act(self, button):
                reward = act(button)
                screens.append(game.getScreenRGB())
                return reward

        game, inner._ale = inner._ale, Spy()
        for _ in range(60):
            screens.clear()
            obs = env.step({"action": np.int32(1), "reset": NO})
            np.testing.assert_array_equal(obs["image"], np.maximum(screens[-1], screens[-2]))

    @pytest.mark.parametrize("noops", [0, 30])
    def test_the_time_limit_counts_frames_and_is_terminal(self, noops: int) -> None:
        """Those that the agent acts in: idle ones at the start are not among them."""
        env = make_env("atari:pong", noops=noops, frames=40)
        obs, steps = env.step(noop(env.act_space)), 0
        while not obs["is_last"]:
            obs = env.step({"action": np.int32(0), "reset": NO})
            steps += 1
        assert steps == 10
        assert obs["is_terminal"]

    @pytest.mark.parametrize("mode", ["unused", "episode", "reset"])
    def test_lives(self, mode: str) -> None:
        env = make_env("atari:breakout", lives=mode, noops=0, sticky=False, actions="needed")
        obs = env.step(noop(env.act_space))
        fire = {"action": np.int32(1), "reset": NO}
        while not obs["is_last"]:
            obs = env.step(fire)
        lives = ale(env).lives()
        assert lives == (0 if mode == "unused" else 4)
        obs = env.step(noop(env.act_space))
        assert obs["is_first"]
        assert ale(env).lives() == (4 if mode == "episode" else 5)

    def test_rewards_can_be_clipped(self) -> None:
        def best(clip: bool) -> float:
            env = make_env("atari:space_invaders", noops=0, sticky=False, clip_reward=clip)
            env.step(noop(env.act_space))
            fire = {"action": np.int32(1), "reset": NO}
            return max(float(env.step(fire)["reward"]) for _ in range(300))

        assert best(clip=False) >= 5
        assert best(clip=True) == 1


def ale(env):
    return env.env._ale


class TestCrafter:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("crafter")

    def test_achievements_are_logged(self) -> None:
        env = make_env("crafter:reward", area=(16, 16))
        keys = [key for key in env.obs_space if key.startswith("log/achievement_")]
        assert len(keys) == 22
        env.step(noop(env.act_space))
        inner = env.env._env
        inner._player.achievements["wake_up"] += 2
        obs = env.step({"action": np.int32(0), "reset": NO})
        assert obs["log/achievement_wake_up"] == 2
        assert sum(int(obs[key]) for key in keys) == 2
        assert env.step(noop(env.act_space))["log/achievement_wake_up"] == 0

    @pytest.mark.parametrize(("task", "rewarded"), [("reward", True), ("noreward", False)])
    def test_reward_or_none(self, task: str, rewarded: bool) -> None:
        env = make_env(f"crafter:{task}", area=(16, 16))
        env.step(noop(env.act_space))
        env.env._env._player.health = 1
        obs = env.step({"action": np.int32(0), "reset": NO})
        assert (obs["reward"] != 0) == rewarded, "losing health costs"

    def test_death_is_terminal_and_the_limit_is_not(self) -> None:
        env = make_env("crafter:reward", area=(16, 16), length=5)
        env.step(noop(env.act_space))
        env.env._env._player.health = 0
        obs = env.step({"action": np.int32(0), "reset": NO})
        assert obs["is_terminal"]
        obs = env.step(noop(env.act_space))
        while not obs["is_last"]:
            obs = env.step({"action": np.int32(0), "reset": NO})
        assert not obs["is_terminal"]


class TestMiniGrid:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("minigrid")

    def test_missions_that_vary_are_told(self) -> None:
        env = make_env("minigrid:GoToDoor-5x5-v0", obs="symbols")
        inner = env.env
        words = {number: word for word, number in inner._words.items()}
        seen = set()
        for _ in range(20):
            obs = env.step(noop(env.act_space))
            told = " ".join(words[n] for n in obs["mission"].tolist() if n)
            assert told == inner._env.unwrapped.mission
            seen.add(told)
        assert len(seen) > 2

    def test_missions_that_do_not_vary_are_not(self) -> None:
        assert "mission" not in make_env("minigrid:Empty-5x5-v0").obs_space

    def test_pixels_have_a_size(self) -> None:
        assert make_env("minigrid:Empty-5x5-v0").obs_space["image"].shape == (64, 64, 3)
        env = make_env("minigrid:Empty-5x5-v0", size=(56, 48))
        assert env.step(noop(env.act_space))["image"].shape == (56, 48, 3)

    def test_reaching_the_goal_is_terminal(self) -> None:
        env = make_env("minigrid:Empty-5x5-v0")
        obs = env.step(noop(env.act_space))
        forward, right = np.int32(2), np.int32(1)
        for action in (forward, forward, right, forward, forward):
            obs = env.step({"action": action, "reset": NO})
        assert obs["is_terminal"]
        assert obs["reward"] > 0.9


PIXELS = """
import numpy as np
from dreamfleet.envs import make_env, noop
state = make_env("dmc:cartpole_balance", seed=1)
state.step(noop(state.act_space))
assert state.render() is None
env = make_env("dmc:cartpole_balance", seed=1, obs="both", size=(32, 48))
obs = env.step(noop(env.act_space))
assert obs["image"].shape == (32, 48, 3), obs["image"].shape
assert obs["image"].std() > 5, "an empty picture"
assert obs["position"].shape == (3,)
assert "image" not in state.obs_space
"""


class TestDMControl:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("dm_control")

    def test_a_name_is_a_domain_and_a_task(self) -> None:
        known = dmc_suite.constructors()
        assert known["ball_in_cup_catch"].args == ("ball_in_cup", "catch")  # type: ignore[attr-defined]
        assert known["cartpole_balance_sparse"].args == ("cartpole", "balance_sparse")  # type: ignore[attr-defined]

    def test_an_episode_is_a_thousand_steps_and_not_terminal(self) -> None:
        env = make_env("dmc:cartpole_balance", repeat=10)
        obs, steps = env.step(noop(env.act_space)), 0
        while not obs["is_last"]:
            obs = env.step({"action": np.zeros(1, np.float32), "reset": NO})
            steps += 1
        assert steps == 100
        assert not obs["is_terminal"]

    def test_pixels_without_a_screen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a process of its own, because a renderer is chosen once for each."""
        for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY"):
            monkeypatch.delenv(name, raising=False)
        try:
            dmc_suite.pick_renderer()
        except EnvError as error:
            pytest.skip(str(error))
        result = subprocess.run(
            [sys.executable, "-c", PIXELS], capture_output=True, text=True, check=False, timeout=300
        )
        assert result.returncode == 0, result.stderr

    def test_a_renderer_is_picked_by_what_works(self, monkeypatch) -> None:
        for name in ("DISPLAY", "WAYLAND_DISPLAY"):
            monkeypatch.delenv(name, raising=False)
        libraries: set[str] = {"osmesa"}

        def run(*_: object, env: dict[str, str], **__: object) -> SimpleNamespace:
            return SimpleNamespace(returncode=int(env["MUJOCO_GL"] not in libraries))

        monkeypatch.setattr(dmc_suite.subprocess, "run", run)
        assert dmc_suite.pick_renderer() == "osmesa"
        libraries.add("egl")
        assert dmc_suite.pick_renderer() == "egl"
        monkeypatch.setenv("DISPLAY", ":0")
        assert dmc_suite.pick_renderer() == "glfw"
        monkeypatch.delenv("DISPLAY")
        libraries.clear()
        with pytest.raises(EnvError, match="apt install libegl1"):
            dmc_suite.pick_renderer()
