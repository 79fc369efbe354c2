"""`dreamfleet check-env` from the command line."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dreamfleet.cli import main
from dreamfleet.cli.check_env import suggestion
from dreamfleet.cli.train import config_of
from dreamfleet.envs.diagnose import Diagnosis
from dreamfleet.fleet import isolated
from dreamfleet.fleet.isolated import user_frames
from dreamfleet.presets import PRESETS
from dreamfleet.spaces import Space

MODULE = """
import gymnasium
import numpy as np


class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = float(self.np_random.integers(5))
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place += 1
        return np.array([self.place * SCALE], np.float32), 1.0, self.place >= 10, False, {}
"""


UNBOUNDED = (
    MODULE.replace("SCALE", "1")
    .replace("Corridor", "Unbounded")
    .replace("spaces.Discrete(2)", "spaces.Box(-np.inf, np.inf, (1,), np.float32)")
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # What another test put there must not help this one.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    return tmp_path


def run(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "dreamfleet.cli", "check-env", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **options,
    )


def test_a_sound_environment(here: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["check-env", "bundled:catch", "--steps", "200"]) == 0
    out = capsys.readouterr().out
    assert "image" in out
    assert "in 200 random steps" in out
    assert "[0, 256)" in out, "the notation of the documentation"
    assert "[0, 3)" in out
    assert "steps/s" in out
    assert "bundled:catch is fine." in out
    assert (here / "check-env.png").read_bytes().startswith(b"\x89PNG")


def test_it_ends_with_a_command_to_start_with(here: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["check-env", "bundled:catch", "--steps", "50", "--options", "size=[32,32]"]) == 0
    out = capsys.readouterr().out
    assert "\ndreamfleet train --task bundled:catch --preset pixels\n" in out
    assert "Suggestion: preset pixels, because the task has images:\n" in out


def image(height: int, width: int) -> Space:
    return Space(np.uint8, (height, width, 3))


@pytest.mark.parametrize(
    ("task", "space", "preset", "size"),
    [
        ("gym:CartPole-v1", Space(np.float32, (4,)), "default", None),
        ("dmc:walker_walk", Space(np.float32, (4,)), "dmc_cpu", None),
        ("my:Env", image(64, 64), "pixels", None),
        ("my:Env", image(480, 640), "pixels", (64, 64)),
        ("my:Env", image(50, 50), "pixels", (64, 64)),
    ],
)
def test_the_suggestion_follows_from_what_is_observed(task, space, preset, size) -> None:
    text = suggestion(task, {"level": 3}, Diagnosis({"it": space}, steps_per_second=1e6))
    assert text.startswith(f"Suggestion: preset {preset}, because the task ")
    words = shlex.split(text.splitlines()[-1])
    assert words[:2] == ["dreamfleet", "train"]
    config = config_of(words[2:])
    assert config.env_options["level"] == 3
    given = {name for word in words for name in [word.partition("=")[0]]}
    assert ("size" in given) == (size is not None)
    assert size in (None, config.env_options.get("size"))


def test_slow_environments_are_spread_over_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamfleet.cli.check_env.cores", lambda: 4)
    envs = PRESETS["default"].envs
    slow = Diagnosis({"it": Space(np.float32, (4,))}, steps_per_second=10)
    assert suggestion("my:Env", {}, slow).endswith(f" --envs-per-process {envs // 4}")


def test_what_was_assumed_about_spaces_is_told(here: Path, capsys: pytest.CaptureFixture) -> None:
    (here / "unbounded.py").write_text(UNBOUNDED)
    assert main(["check-env", "unbounded:Unbounded", "--steps", "20"]) == 0
    assert re.search(r"^note    .*'action'.*bounds", capsys.readouterr().out, re.MULTILINE)


def test_options_and_the_place_of_the_picture(here: Path, capsys: pytest.CaptureFixture) -> None:
    sheet = here / "new" / "sheet.png"
    args = ["--options", "balls=2", "size=[48,48]", "--steps", "50", "--sheet", str(sheet)]
    assert main(["check-env", "bundled:catch", *args]) == 0
    assert "(48, 48, 3)" in capsys.readouterr().out
    assert sheet.exists()
    assert not (here / "check-env.png").exists()


def test_your_own_environment_in_the_current_directory(here: Path) -> None:
    (here / "my_env.py").write_text(MODULE.replace("SCALE", "1"))
    (here / "json.py").write_text("raise ImportError('it hides that of Python')")
    command = Path(sys.executable).with_name("dreamfleet")
    result = subprocess.run(
        [command, "check-env", "my_env:Corridor", "--steps", "100"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "my_env:Corridor is fine." in result.stdout
    assert not (here / "check-env.png").exists(), "there is nothing to see"


def test_a_broken_environment_is_an_error_with_the_fix(here: Path) -> None:
    (here / "my_env.py").write_text(MODULE.replace("SCALE", "3"))
    result = run("my_env:Corridor", cwd=here)
    assert result.returncode == 1
    assert "'vector' runs from" in result.stdout
    assert "widen obs_space['vector'] or clip" in result.stdout
    assert "my_env:Corridor has 1 problem, see above." in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_what_is_seen_only_when_asked_for_is_asked_for(
    here: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["check-env", "gym:CartPole-v1", "--steps", "50"]) == 0
    assert "frames         20 in check-env.png" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "code"), [("[32,32]", 0), ("[256,256]", 0), ("[50,64]", 1)])
def test_a_size_is_a_problem_if_the_agent_refuses_it_and_fine_if_not(
    here: Path, capsys: pytest.CaptureFixture, size: str, code: int
) -> None:
    assert (
        main(["check-env", "bundled:catch", "--steps", "20", "--options", f"size={size}"]) == code
    )
    out = capsys.readouterr().out
    assert ("problem Image 'image' is 50x64; both sides must be multiples of 16" in out) == code
    assert ("multiples" in out) == code


ONE_OF_ITS_KIND = """
import gymnasium
from dreamfleet.envs.bundled import Catch


class Single(Catch):
    there = 0

    def __init__(self, seed=0):
        super().__init__(seed=seed)
        if Single.there:
            raise RuntimeError("the device is taken")
        Single.there += 1

    def close(self):
        Single.there -= 1


def broken():
    raise OSError("no such device")


class Growing(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seed):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (seed + 1,))

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}
"""


def test_an_environment_of_which_there_can_be_only_one_is_named_as_that(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (here / "one_of_its_kind.py").write_text(ONE_OF_ITS_KIND)
    monkeypatch.syspath_prepend(str(here))
    assert main(["check-env", "one_of_its_kind:Single", "--steps", "50"]) == 0
    out = capsys.readouterr().out
    assert "failed beside the first: RuntimeError('the device is taken')" in out
    assert "--preset pixels --envs 1\n" in out
    assert out.endswith("one_of_its_kind:Single can be used.\n")
    assert main(["check-env", "one_of_its_kind:Growing", "--steps", "50"]) == 1
    assert "'vector' is float32[1] in the first and float32[2] in the s" in capsys.readouterr().out
    assert main(["check-env", "one_of_its_kind:broken"]) == 1
    assert "problem The constructor raised OSError: no such device." in capsys.readouterr().out


HANGING = """
import ctypes
from dreamfleet.envs.bundled import Catch

hang = ctypes.PyDLL(None).sleep  # in C, and nothing else of Python runs meanwhile


class Constructor(Catch):
    def __init__(self, seed=0):
        hang(1000)


class Reset(Catch):
    count = 0

    def _begin(self):
        self.count += 1
        if self.count == 3:
            hang(1000)
        return super()._begin()


class Step(Catch):
    count = 0

    def _advance(self, action):
        self.count += 1
        if self.count == 42:
            self.simulate()
        return super()._advance(action)

    def simulate(self):
        print("simulating")
        hang(1000)
"""

CRASHING = """
import ctypes
import os
from dreamfleet.envs.bundled import Catch


class Crash(Catch):
    def _advance(self, action):
        ctypes.string_at(0)


class Leave(Catch):
    def _begin(self):
        os._exit(0)


class Chatty(Catch):
    def _advance(self, action):
        print("still here")
        return super()._advance(action)
"""


def test_what_hangs_is_ended_and_named(here: Path) -> None:
    (here / "hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "dreamfleet.cli", "check-env", "--timeout", "8"]
    checks = {
        name: subprocess.Popen(
            [*command, f"hanging:{name}"],
            cwd=here,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("Constructor", "Reset", "Step")
    }
    said = {name: check.communicate(timeout=300)[0] for name, check in checks.items()}
    assert {check.returncode for check in checks.values()} == {1}
    assert "The constructor did not return within 8 s" in said["Constructor"]
    assert "reset() did not return within 8 s" in said["Reset"]
    assert "Step 42 of 1,000 did not return within 8 s" in said["Step"]
    for name, text in said.items():
        assert "most recent call first" in text
        assert "hanging.py" in text
        assert str(Path(isolated.__file__).parents[1]) not in text, "only the user's frames"
        assert "threading.py" not in text
        assert ("simulate" in text) == (name == "Step")


@pytest.mark.parametrize(
    ("name", "words"),
    [("Crash", "ended with SIGSEGV in step 1 of 1,000"),
     ("Leave", "ended with code 0 in reset()")],
)  # fmt: skip
def test_an_environment_that_ends_the_process_does_not_end_the_command(
    here: Path, capsys: pytest.CaptureFixture, name: str, words: str
) -> None:
    (here / "crashing.py").write_text(CRASHING)
    assert main(["check-env", f"crashing:{name}"]) == 1
    said = capsys.readouterr()
    assert words in said.err
    if name == "Crash":
        assert "crashing.py" in said.out


def test_what_an_environment_prints_is_shown_in_part(
    here: Path, capsys: pytest.CaptureFixture
) -> None:
    (here / "crashing.py").write_text(CRASHING)
    assert main(["check-env", "crashing:Chatty"]) == 0
    out = capsys.readouterr().out
    assert out.count("still here") == 20
    assert " more lines ..." in out
    assert out.endswith("crashing:Chatty is fine.\n")


def test_a_module_that_fails_is_shown_with_its_traceback(
    here: Path, capsys: pytest.CaptureFixture
) -> None:
    (here / "failing.py").write_text("def load():\n    return open('weights')\n\nload()\n")
    assert main(["check-env", "failing:make"]) == 1
    out = capsys.readouterr().out
    assert "problem The constructor raised FileNotFoundError" in out
    assert "in load" in out


SLOW = """
import threading
from dreamfleet.envs.bundled import Catch

def slow():
    print("made")
    threading.Event().wait(3)
    return Catch()
"""


def test_progress_is_told_without_a_terminal(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (here / "slow_start.py").write_text(SLOW)
    monkeypatch.setattr(isolated, "_SAY_SECONDS", 0.5)
    assert main(["check-env", "slow_start:slow", "--steps", "5"]) == 0
    out = capsys.readouterr().out
    assert out.count("  made") == 3, "for the steps, for the same seed, and for another seed"
    assert re.search(r"Waiting for the constructor, 0:\d\d \(\d s in this call\)\n", out), out


def test_only_frames_and_threads_of_user_code_are_shown() -> None:
    ours = Path(isolated.__file__)
    trace = f"""Fatal Python error: Segmentation fault

Thread 0x1 (most recent call first):
  File "{ours}", line 1 in _end_with_parent
  File "/lib/threading.py", line 2 in run

Thread 0x3 (most recent call first):
  File "/lib/threading.py", line 6 in wait
  File "{ours}", line 7 in follow

Current thread 0x2 (most recent call first):
  File "/lib/socket.py", line 3 in recv
  File "/home/me/envs.py", line 4 in step
  File "{ours}", line 5 in main
"""
    assert (
        user_frames(trace)
        == """Fatal Python error: Segmentation fault

Current thread 0x2 (most recent call first):
  File "/lib/socket.py", line 3 in recv
  File "/home/me/envs.py", line 4 in step"""
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["gym:CartPol-v1"], "Did you mean gym:CartPole-v1"),
        (["bundled:catch", "--options", "ball=2"], "did you mean 'balls'"),
        (["bundled:catch", "--options", "balls"], "NAME=VALUE"),
        (["bundled:catch", "--steps", "0"], "at least 1"),
        (["gym:CartPole-v1", "--options", "hats=3"], "no option 'hats': it has"),
        (["gym:CartPole-v1", "--options", "size=32"], "size=32 is not valid"),
        (["bundled:catch", "--steps", "20", "--sheet", "."], ". cannot be written: Is a directory"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(
    here: Path, capsys: pytest.CaptureFixture, args: list[str], words: str
) -> None:
    assert main(["check-env", *args]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
