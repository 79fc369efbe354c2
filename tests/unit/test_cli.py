"""The command line: commands, exit codes, streams."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dreamfleet import __version__, cli
from dreamfleet.cli import COMMANDS, console, main
from dreamfleet.envs.registry import SUITES


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert main([]) == 0
    assert capsys.readouterr().out == text


def test_the_help_of_a_task_lists_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    (text,) = re.findall(r"SUITE:NAME \(([^)]*)\)", " ".join(capsys.readouterr().out.split()))
    assert sorted(re.findall(r"\w+", text.replace(" or ", " "))) == sorted(SUITES)


def test_names_with_colons_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich takes `:factory:` for an emoji."""
    console.say("my.module:factory: made")
    console.complain("my.module:factory: not found")
    printed = capsys.readouterr()
    assert "my.module:factory: made" in printed.out
    assert "my.module:factory: not found" in printed.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"dreamfleet {__version__}"


def test_a_typing_error_suggests_the_right_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tarin"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bench", "chaos", "soak"])
def test_a_command_that_has_moved_names_the_new_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert f"use make {name} ARGS=" in sentence


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(30, "Read-only file system", "/x/run"), "/x/run: Read-only file system: fix its"),
        (OSError(28, "No space left on device"), "No space left on device: make room"),
        (MemoryError(), "There is not enough memory: end other programs"),
        (RuntimeError("can't start new thread"), "There is not enough memory: end other programs"),
    ],
    ids=["read-only", "full", "memory", "threads"],
)
def test_what_the_machine_refuses_is_told_in_a_sentence(
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert main(["doctor"]) == 1
    assert words in capsys.readouterr().err


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/x")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(FileNotFoundError):
        main(["doctor"])


def test_the_console_script_and_the_module_are_the_same() -> None:
    script = Path(sys.executable).with_name("dreamfleet")
    for command in ([str(script)], [sys.executable, "-m", "dreamfleet.cli"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"dreamfleet {__version__}"


HEARD: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
VERSION = [sys.executable, "-m", "dreamfleet.cli", "--version"]


def test_a_command_works_with_closed_streams() -> None:
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "-", *VERSION], **HEARD)
    assert (closed.returncode, closed.stdout) == (0, "")
    assert closed.stderr == (
        "error: Standard output is closed, so nothing is shown: redirect it to a file.\n"
    )
    assert subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "-", *VERSION], **HEARD).returncode == 0


def test_a_terminal_without_unicode_shows_question_marks() -> None:
    code = (
        "from dreamfleet.cli import main\n"
        "from dreamfleet.cli.console import complain, say\n"
        "from dreamfleet.display import print_line\n"
        "print_line('1 ± 2')\n"
        "main(['--version'])\n"
        "say('3 ± 4')\n"
        "complain('5 ± 6')\n"
    )
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, **HEARD)
    first, _, second = done.stdout.splitlines()
    assert (first, second, done.stderr) == ("1 ? 2", "3 ? 4", "error: 5 ? 6\n")


@pytest.mark.parametrize("case", ["options", "preset", "sweep"])
def test_a_wrong_value_is_told_in_a_sentence(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: 5\n")
    words = {
        "options": ["train", "--env-options", "{bad", "--print-config"],
        "preset": ["train", "--config", str(file), "--print-config"],
        "sweep": ["sweep", "--agent", "random", "--logdir", str(file)],
    }[case]
    assert main(words) == 2
    assert "error:" in capsys.readouterr().err
