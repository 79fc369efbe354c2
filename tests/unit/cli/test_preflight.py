"""What cannot work is refused before anything is started, with numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.agent import size_preset
from dreamfleet.cli import main
from dreamfleet.cli.preflight import check_directory, check_files, check_memory, preflight
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError

CONFIG = RunConfig(envs=4, batch_size=16, batch_length=64, logdir=Path("nowhere"))


class Closing:
    closed = 0

    def close(self) -> None:
        Closing.closed += 1


def test_an_ordinary_run_passes_and_the_environment_is_closed() -> None:
    preflight(CONFIG, lambda _: Closing())
    assert Closing.closed == 1


def test_a_batch_that_the_replay_never_holds_is_refused() -> None:
    needed = 16 * 65
    preflight(replace(CONFIG, replay_capacity=needed), lambda _: Closing())
    with pytest.raises(ConfigError, match=r"1,040 steps at least.*replay_capacity=1,039 never"):
        preflight(replace(CONFIG, replay_capacity=needed - 1), lambda _: Closing())


def test_environments_that_do_not_fit_are_refused() -> None:
    config = RunConfig(envs=100, eval_envs=10, envs_per_process=10)
    check_memory(config, 60e6, available=int(1.2e9))
    with pytest.raises(ConfigError, match=r"110 environments in 11 processes of about 100 MB need "
                       r"1\.1 GB, and 1\.0 GB of memory are free"):  # fmt: skip
        check_memory(config, 60e6, available=int(1.0e9))
    check_memory(replace(config, remote_envs=True, actor_addr="tcp://h:1"), 60e6, available=1)


def test_processes_that_the_shell_has_no_files_for_are_refused() -> None:
    check_files(RunConfig(envs=200, envs_per_process=10), limit=1024)
    check_files(RunConfig(envs=10_000), limit=-1)  # no limit
    with pytest.raises(ConfigError, match=r"303 processes need about 1312 open files.*allows 1024"):
        check_files(RunConfig(envs=300), limit=1024)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "bundled:catch"}, "with task gym:CartPole-v1, not bundled:catch"),
        ({"agent": "random"}, "with agent dreamer, not random"),
        ({"model": "1m"}, "with dreamer.model another size"),
    ],
)
def test_a_directory_belongs_to_one_run(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    there = replace(CONFIG, logdir=tmp_path)
    check_directory(there)
    (tmp_path / "config.json").write_text(there.to_json())
    check_directory(replace(there, steps=5, seed=1))
    if "model" in changes:
        changes = {"dreamer": replace(there.dreamer, model=size_preset(changes["model"]))}
    with pytest.raises(ConfigError, match=words):
        check_directory(replace(there, **changes))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "replay_capacity=10"], "replay_capacity=10 never holds as many"),
        (["--set", "replay_capcity=10"], "did you mean 'replay_capacity'?"),
        (["--set", "dreamer.loss.horizn=10"], "did you mean 'dreamer.loss.horizon'?"),
        (["--set", "dreamer.loss=10"], "There is no setting 'dreamer.loss'"),
        (["--set", "envs=0"], "envs=0 is too small: it is at least 1.\n"),
        (["--set", "envs=many"], "Expected `int`, got `str` - at `envs`"),
        (["--env-options", "hats=3", "--task", "bundled:catch"], "no option 'hats'"),
        (["--task", "gym:CartPoel-v1"], "CartPole"),
        (["--preset", "defualt"], "did you mean 'default'?"),
    ],
)
def test_the_command_says_so_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    logdir = tmp_path / "run"
    assert main(["train", "--logdir", str(logdir), *arguments]) == 1
    assert words in capsys.readouterr().err
    assert not logdir.exists()
