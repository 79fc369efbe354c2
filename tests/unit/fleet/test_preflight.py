"""What cannot work is refused before anything is started, with numbers."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from dreamfleet.agents import SpaceError
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.envs import EnvError, make_env
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.preflight import (
    check_directory,
    check_disk,
    check_memory,
    check_messages,
    check_place,
    preflight,
    replay_bytes,
    step_bytes,
)
from dreamfleet.replay import Fractions
from dreamfleet.replay.config import ReplayConfig
from dreamfleet.roles.spaces_file import SPACES_FILE, write_spaces
from dreamfleet.spaces import Space
from dreamfleet.training import train
from dreamfleet.transport import AddressError

CONFIG = RunConfig(
    envs=4,
    envs_per_process=1,
    batch_size=16,
    batch_length=64,
    logdir=Path("nowhere"),
    launcher="serial",  # environments are made in this process
)


FLAGS = {name: Space(bool) for name in ("is_first", "is_last", "is_terminal")}


class Closing:
    closed = 0
    act_space: ClassVar = {"action": Space(np.int32, (), 0, 2), "reset": Space(bool)}

    def __init__(self, height: int = 64, width: int = 64) -> None:
        image = Space(np.uint8, (height, width, 3))
        self.obs_space = {"image": image, "reward": Space(np.float32), **FLAGS}

    def step(self, action: Any) -> Any:
        obs = {key: np.zeros(space.shape, space.dtype) for key, space in self.obs_space.items()}
        return {**obs, "is_first": np.asarray(action["reset"])}

    def close(self) -> None:
        Closing.closed += 1


def test_an_ordinary_run_passes_and_environments_are_closed() -> None:
    for config, made in (
        (CONFIG, 2),
        # A second one is only made where there is one.
        (replace(CONFIG, envs=1), 1),
        (replace(CONFIG, envs=1, eval_envs=1), 2),
        (replace(CONFIG, remote_envs=True, actor_addr="tcp://h:1"), 1),
    ):
        Closing.closed = 0
        preflight(config, lambda _: Closing())
        assert Closing.closed == made


class Given(gymnasium.Env[Any, Any]):
    """Returns what it is made with."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reset: Any = 0.0, reward: Any = 0.0, size: int = 1) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (size,))
        self._reset, self._reward = reset, reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.full(self.observation_space.shape, 0) + self._reset, {}

    def step(self, action: Any) -> Any:
        return np.zeros(self.observation_space.shape), self._reward, False, False, {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: make_env(lambda: Given(reset=np.zeros((3, 1)))), r"shape \(3, 1\), but the spa"),
        (lambda _: make_env(lambda: Given(reset=7.0)), "runs from 7.0 to 7.0, outside its space"),
        (lambda _: make_env(lambda: Given(reset=np.nan)), "'vector' holds NaN or infinity"),
        (
            lambda _: make_env(lambda: Given(reward=[1.0, 2.0])),
            r"reward is \[1.0, 2.0\]: return one",
        ),
        (
            lambda n: make_env(lambda: Given(size=n + 3)),
            r"'vector' is float32\[3\] in the first and float32\[4\] in the second. Give all of",
        ),
    ],
)
def test_the_first_reset_and_step_are_made_before_the_start(make: Any, words: str) -> None:
    with pytest.raises(SpaceError, match=words):
        preflight(CONFIG, make)


def test_a_reward_in_an_array_of_one_is_taken() -> None:
    preflight(CONFIG, lambda _: make_env(lambda: Given(reward=np.ones((1,)))))


def test_an_environment_of_which_there_can_be_only_one_is_named_as_that() -> None:
    there: list[int] = []

    class Single(Closing):
        def __init__(self) -> None:
            super().__init__()
            if there:
                raise BlockingIOError("the device is taken")
            there.append(1)

        def close(self) -> None:
            there.clear()

    words = r"second environment failed beside the first: .*device is taken.*use --envs 1, without"
    with pytest.raises(EnvError, match=words):
        preflight(CONFIG, lambda _: Single())
    preflight(replace(CONFIG, envs=1), lambda _: Single())


def test_remote_environments_whose_spaces_are_known_are_left_alone(tmp_path: Path) -> None:
    config = replace(CONFIG, logdir=tmp_path, remote_envs=True, actor_addr="tcp://h:1")
    first = preflight(config, lambda _: Closing())
    write_spaces(config, *first.spaces)
    Closing.closed = 0
    assert preflight(config, lambda _: Closing(32)).spaces == first.spaces
    changed = replace(config, env_options={"size": 32})
    assert preflight(changed, lambda _: Closing(32)).spaces != first.spaces
    assert Closing.closed == 1
    (tmp_path / SPACES_FILE).write_text("{")
    assert preflight(config, lambda _: Closing()).spaces == first.spaces


def test_spaces_that_the_agent_cannot_take_are_refused() -> None:
    with pytest.raises(SpaceError, match=r"'image' is 50x64.*multiples of .*size=\[64,64\]"):
        preflight(CONFIG, lambda _: Closing(50))
    preflight(CONFIG.changed({"agent": "random"}), lambda _: Closing(50))
    preflight(CONFIG.changed({"dreamer.model.mults": (2, 4)}), lambda _: Closing(48))


def test_images_that_no_message_can_hold_are_refused() -> None:
    local = CONFIG.changed({"launcher": "local", "agent": "random"})
    env = Closing(480, 640)
    words = r"1,024 steps, 944MB of 'image', .*size=\[64,64\], or lower batch_size"
    with pytest.raises(ConfigError, match=words):
        check_messages(local, env.obs_space, env.act_space)
    check_messages(CONFIG, env.obs_space, env.act_space)  # a serial run has no messages
    few = replace(local, batch_size=2)
    check_messages(few, env.obs_space, env.act_space)
    with pytest.raises(ConfigError, match=r"512 steps, 472MB of 'image'"):
        check_messages(replace(few, envs=512), env.obs_space, env.act_space)


def test_what_a_run_starts_from_has_to_be_there(tmp_path: Path) -> None:
    other, logdir = tmp_path / "other", tmp_path / "mine"
    config = replace(CONFIG, logdir=logdir, from_checkpoint=str(other))
    with pytest.raises(ConfigError, match="other holds no checkpoint"):
        preflight(config, lambda _: Closing())
    Checkpoint(other / "ckpt" / "agent").save({"agent": {}}, step=1)
    preflight(config, lambda _: Closing())
    preflight(replace(config, from_checkpoint=str(other / "ckpt" / "agent")), lambda _: Closing())
    wrong = replace(config, from_checkpoint_regex="nets/(encoder")
    with pytest.raises(ConfigError, match="not a regular expression: missing"):
        preflight(wrong, lambda _: Closing())
    # A run that goes on has its own, and what it started from may be gone.
    Checkpoint(logdir / "ckpt" / "agent").save({"agent": {}}, step=1)
    preflight(replace(config, from_checkpoint="gone"), lambda _: Closing())


def test_a_batch_that_the_replay_never_holds_is_refused() -> None:
    needed = 16 * 65
    preflight(CONFIG.changed({"replay.capacity": needed}), lambda _: Closing())
    with pytest.raises(
        ConfigError, match=r"at least 1,040 stored steps.*replay.capacity=1,039 holds"
    ):
        preflight(CONFIG.changed({"replay.capacity": needed - 1}), lambda _: Closing())


def test_priorities_that_nobody_sends_are_refused() -> None:
    prioritised = {"replay.fractions": Fractions(uniform=0.5, priority=0.5)}
    for agent in ("random", "dreamer"):
        with pytest.raises(ConfigError, match=rf"agent {agent} sends none.*set it to 0"):
            preflight(CONFIG.changed({"agent": agent, **prioritised}), lambda _: Closing())


def test_environments_that_do_not_fit_are_refused() -> None:
    config = RunConfig(envs=100, eval_envs=10, envs_per_process=10)
    check_memory(config, 60e6, 0, available=int(1.2e9))
    with pytest.raises(ConfigError, match=r"110 environments in 11 processes of about 100 MB need "
                       r"1\.1 GB, and 1\.0 GB of memory are free"):  # fmt: skip
        check_memory(config, 60e6, 0, available=int(1.0e9))
    with pytest.raises(ConfigError, match=r"11 processes of about 190 MB need 2\.1 GB"):
        check_memory(config, 60e6, 10e6, available=int(1.2e9))
    check_memory(replace(config, remote_envs=True, actor_addr="tcp://h:1"), 60e6, 1e6, available=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "bundled:catch"}, "with task gym:CartPole-v1, not bundled:catch"),
        ({"agent": "random"}, "with agent dreamer, not random"),
        ({"replay_shards": 2}, "with replay_shards 1, not 2"),
        (
            {"dreamer.model": "1m"},
            "of another size, so these settings cannot be changed: dreamer.model",
        ),
    ],
)
def test_a_directory_belongs_to_one_run(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    there = replace(CONFIG, logdir=tmp_path)
    check_directory(there)
    (tmp_path / "config.json").write_text(there.to_json())
    check_directory(replace(there, steps=5, seed=1))
    check_directory(there.changed({"dreamer.loss.horizon": 50}))
    with pytest.raises(ConfigError, match=words):
        check_directory(there.changed(changes))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replay.capacity", "10"], "replay.capacity=10 holds fewer"),
        (["--set", "replay.capcity=10"], "did you mean 'replay.capacity'?"),
        (["--set", "dreamer.loss.horizn=10"], "did you mean 'dreamer.loss.horizon'?"),
        (["--set", "dreamer.loss=10"], "dreamer.loss=10 is not valid: use the settings inside it"),
        (["--envs", "0"], "envs=0 is not valid: use a whole number, at least 1.\n"),
        (["--set", "envs=many"], "envs=many is not valid: use a whole number, at least 1.\n"),
        (["--env-options", "hats=3", "--task", "bundled:catch"], "no option 'hats'"),
        (["--env-options", "hats=3"], "gym:CartPole-v1 has no option 'hats'"),
        (["--env-options", "obs=pixels"], "'image' is 400x600; both sides must be multiples of 16"),
        (
            ["--agent", "random", "--task", "bundled:catch", "--env-options", "size=[480,640]"],
            "472MB of 'image', and the limit is 268MB: make it smaller, images with",
        ),
        (
            ["--task", "bundled:catch", "--env-options", "size=[480,640]"],
            "'image' is 480x640; both sides must be multiples of 16 from 48 to 256",
        ),
        (["--from-checkpoint", "nowhere"], "nowhere holds no checkpoint"),
        (["--offline", "nowhere"], "nowhere holds no replay"),
        (["--offline", "a", "b", "--prefill", "c"], "name all directories after offline"),
        (["--task", "gym:CartPoel-v1"], "CartPole"),
        (["--task", "kinds.py:Base"], "drop .py and write kinds:Base."),
        (["--preset", "defualt"], "did you mean 'default'?"),
    ],
)
def test_the_command_says_so_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    logdir = tmp_path / "run"
    assert main(["train", "--logdir", str(logdir), *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert "Traceback" not in said.out + said.err
    assert not logdir.exists()


def test_what_was_assumed_about_the_environment_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boundless.py").write_text(
        "import gymnasium, numpy as np\n"
        "def make():\n"
        "    env = gymnasium.make('Pendulum-v1')\n"
        "    env.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))\n"
        "    return env\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dreamfleet.training.combined", lambda **_: None)
    config = CONFIG.changed(
        {"task": "boundless:make", "logdir": tmp_path / "run", "eval_episodes": 0}
    )
    lines: list[str] = []
    train(config, say=lines.append)
    assert sum("has no bounds: the agent acts within -1 to 1" in line for line in lines) == 1


def test_settings_that_cannot_work_well_here_are_warned_of_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("dreamfleet.training.combined", lambda **_: None)
    config = CONFIG.changed(
        {"task": "bundled:catch", "logdir": tmp_path / "run", "eval_episodes": 0}
    )
    lines: list[str] = []
    train(config, say=lines.append)
    (warning,) = (line for line in lines if line.startswith("Warning"))
    assert "settings for vectors, and the task has images: --preset pixels" in warning
    lines.clear()
    train(config.changed({"agent": "random", "logdir": tmp_path / "other"}), say=lines.append)
    assert not any(line.startswith("Warning") for line in lines)


@pytest.mark.parametrize(
    ("logdir", "words"),
    [
        ("file", "file is a file, or a link to nothing, and the run keeps everything in the dir"),
        ("file/run", "file is a file"),
        ("/proc/run", "/proc cannot be written to ("),
        ("/sys/kernel/run", "/sys/kernel cannot be written to ("),
        ("dangling", "dangling is a file, or a link to nothing"),
        ("dangling/run", "dangling is a file, or a link to nothing"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logdir: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("dangling").symlink_to("nowhere")
    assert main(["train", "--logdir", logdir]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_directory_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions do not hold root back, so the system's answer is played."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written to \(Permission denied\): fix its"):
        check_place(tmp_path / "run")


def test_a_disk_that_the_replay_would_fill_is_refused(tmp_path: Path) -> None:
    env = Closing()
    spaces = env.obs_space, env.act_space
    config = RunConfig(agent="random", envs=2, logdir=tmp_path / "run", steps=8_000)
    step = 8 + 64 * 64 * 3 + 4 + 3 + 4
    beside = 100_000_000
    needed = step * (8_000 + 2 * 1024) + beside
    check_disk(config, *spaces, free=needed)
    with pytest.raises(ConfigError) as caught:
        check_disk(config, *spaces, free=needed - 1)
    assert str(caught.value) == (
        f"The replay takes 124MB of disk when it is full, at 12,307 bytes a step, everything else "
        f"about 100MB, and {tmp_path} has room for 224MB: make room, lower replay.capacity "
        "(1,000,000 steps), bound the files with replay.max_bytes, or choose another --logdir."
    )
    named = {setting.path for setting in config.settings()}
    assert {"replay.capacity", "replay.max_bytes"} <= named
    # What bounds the files, and what they take already.
    check_disk(config.changed({"replay.max_bytes": 10**6}), *spaces, free=10**6 + beside)
    check_disk(config.changed({"replay.capacity": 1000}), *spaces, free=1000 * step + beside)
    with pytest.raises(ConfigError, match=r"takes 12\.3GB"):
        check_disk(config.changed({"steps": 0}), *spaces, free=needed)
    with pytest.raises(ConfigError, match="takes"):
        check_disk(config.changed({"eval_envs": 1}), *spaces, free=needed)
    (tmp_path / "run" / "replay").mkdir(parents=True)
    (tmp_path / "run" / "replay" / "a.chunk").write_bytes(bytes(10_000))
    check_disk(config, *spaces, free=needed - 10_000)
    elsewhere = config.changed({"remote_replay": True, "replay_addr": "tcp://h:1"})
    check_disk(elsewhere, *spaces, free=beside)
    with pytest.raises(ConfigError, match=r"else about 100MB, and .* has room for 0B: make"):
        check_disk(elsewhere, *spaces, free=0)


def test_a_disk_that_is_too_small_is_noticed_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("dreamfleet.fleet.preflight.shutil.disk_usage", lambda _: usage)
    assert main(["train", "--logdir", str(tmp_path / "run")]) == 2
    assert "B of disk when it is full" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_temporary_directory_in_which_no_server_can_listen_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 80)))
    with pytest.raises(AddressError, match=r"at most 103 bytes\): set TMPDIR to a shorter path"):
        preflight(replace(CONFIG, launcher="local"))


OBS = {"reward": Space(np.float32), **FLAGS}
VECTOR = {**OBS, "it": Space(np.float32, (4,))}
ACTION = {"action": Space(np.int32, (), 0, 3), "reset": Space(bool)}


def test_the_replay_is_what_is_collected_until_it_is_full() -> None:
    config = RunConfig(agent="random", envs=2, steps=1000, replay=ReplayConfig(5000, chunk=10))
    step = step_bytes(config, VECTOR, ACTION)
    assert step == 8 + 4 + 3 + 16 + 4, "a tick and the columns"
    assert replay_bytes(config, VECTOR, ACTION) == (1000 + 2 * 10) * step
    assert replay_bytes(replace(config, steps=0), VECTOR, ACTION) == 5000 * step


def test_a_port_that_is_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port={port} cannot be used .*another"):
            preflight(replace(CONFIG, metrics_port=port), lambda _: Closing())
