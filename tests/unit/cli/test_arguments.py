"""Readable help, options made from settings, and mistakes answered in a sentence."""

from __future__ import annotations

import re
import shlex
import typing
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.agents import size_preset
from dreamfleet.cli import COMMANDS, EXAMPLES, OPTIONS, find, main
from dreamfleet.cli.arguments import call, function_options, parse, summary_of
from dreamfleet.cli.train import config_of, options_of
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.presets import PRESETS, preset
from dreamfleet.settings import Section, Setting, convert, describe

OTHERS = [name for name in COMMANDS if name not in OPTIONS]


def shown(text: str, options: list[Setting]) -> None:
    """Every option and its whole sentence is in the text, which fits into a terminal."""
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text, "something is cut off"
    # A sentence may be cut into lines that stand beside the flags.
    words = " ".join(text.split())
    for option in options:
        assert option.help, f"{option.flag} has no help"
        assert option.flag in text
        assert option.help.split()[-1] in words


@pytest.mark.parametrize("command", OTHERS)
def test_every_option_is_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    shown(text, function_options(find(COMMANDS[command])))
    assert summary_of(find(COMMANDS[command])).split("\n")[0] in text


@pytest.mark.parametrize("command", OTHERS)
def test_the_help_lists_every_name_that_may_be_given(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    words = re.findall(r"[\w-]+", capsys.readouterr().out)
    for option in function_options(find(COMMANDS[command])):
        if option.positional and typing.get_origin(option.type) is typing.Literal:
            assert set(typing.get_args(option.type)) <= set(words)


def test_the_help_says_what_may_be_left_out_and_how_to_switch_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["view", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: dreamfleet view [FOLDER] [OPTIONS]\n")
    assert re.search(r"FOLDER +A run's directory, or a folder of runs. \(runs\)", text)
    assert re.search(r"--browser, --no-browser +Also .* \(on\)", text)
    assert main(["plot", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: dreamfleet plot LOGDIRS ... [OPTIONS]\n")
    assert main(["train", "--help-all"]) == 0
    assert "--replay.online, --replay.no-online\n" in capsys.readouterr().out


def test_the_help_of_train_shows_what_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    short = [o for o in options_of([]) if any(isinstance(mark, Section) for mark in o.marks)]
    assert len(short) <= 24
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    shown(text, short)
    assert len(re.findall(r"^  --", text, re.MULTILINE)) == len(short)
    titles = re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)
    assert (titles[0], titles[-1]) == ("what", "examples")
    assert f"({preset('default').steps})" in text
    assert main(["train", "--preset", "pixels", "--help"]) == 0
    assert f"({preset('pixels').steps})" in capsys.readouterr().out


def test_resume_has_the_options_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "--help-all"]) == 0
    text = capsys.readouterr().out
    own = ("preset", "logdir", "set", "trust")
    shown(text, [option for option in options_of([]) if option.path not in own])
    assert text.startswith("usage: dreamfleet resume LOGDIR [OPTIONS]\n")
    assert "--preset" not in text
    assert main(["resume", "--help"]) == 0
    assert "--trust" in capsys.readouterr().out
    assert f"({preset('default').steps})" not in text, "a run has its own"


@pytest.mark.parametrize("agent", ["dreamer", "random"])
def test_every_setting_has_a_flag_and_is_in_the_whole_help(
    agent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of(["--agent", agent])
    config = RunConfig(agent=agent)
    assert {setting.path for setting in config.settings()} <= {option.path for option in options}
    assert main(["train", "--agent", agent, "--help-all"]) == 0
    shown(capsys.readouterr().out, options)


def value_for(option: Setting) -> list[str]:
    """Words that say the option's default again."""
    if option.value in (None, "", ()) or isinstance(option.value, dict):
        return []
    if isinstance(option.value, tuple):
        return [option.flag, *map(str, option.value)]
    if option.is_switch:
        return [option.flag] if option.value else []
    return [option.flag, str(option.value)]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_typed_out_is_the_preset(name: str) -> None:
    """Every flag is read as the value of its setting."""
    words = [word for option in options_of(["--preset", name]) for word in value_for(option)]
    typed = config_of([*words, "--preset", name, "--logdir", "runs/x"])
    assert typed == preset(name).changed({"logdir": "runs/x"})


def test_flags_are_settings() -> None:
    line = (
        "--dreamer.model 1m --dreamer.loss.entropy-scale=0.001 --dreamer.model.mults 2 3 "
        "--replay.capacity 5000 --replay.no-online --batch_size 3 --outputs jsonl --remote-envs "
        "--actor-addr tcp://h:1 --target-score 10 --env-options repeat=2 size=[8,8] "
        "--set dreamer.loss.horizon=50 envs_per_process=2 catch_up=False eval_max_steps=5e3 "
        'prefill=\'["a","b"]\' ray_runtime_env=\'{"pip":["x"]}\' dreamer.execution.prefetch=3'
    )
    config = config_of(shlex.split(line))
    agent = config.agent_config
    assert (agent.model.deter, agent.model.mults) == (size_preset("1m").deter, (2, 3))
    assert (agent.loss.entropy_scale, agent.loss.horizon) == (0.001, 50.0)
    assert (config.replay.capacity, config.replay.online, config.batch_size) == (5000, False, 3)
    assert (config.outputs, config.remote_envs, config.target_score) == (("jsonl",), True, 10.0)
    assert config.env_options == {"repeat": 2, "size": (8, 8)}
    assert config.logdir == Path("runs/gym-CartPole-v1")
    assert (config.envs_per_process, config.catch_up, config.eval_max_steps) == (2, False, 5000)
    assert (config.prefill, config.ray_runtime_env) == (("a", "b"), {"pip": ["x"]})
    pixels = config_of(["--preset", "pixels", "--env-options", "repeat=2", "--envs", "3"])
    assert pixels.env_options == {"size": (32, 32), "repeat": 2}
    assert (pixels.envs, pixels.policy_batch) == (3, 3)
    short = config_of(["--batch-length", "8"])
    assert (short.batch_length, short.report_window) == (8, 8)
    assert config_of(["--batch-length", "8", "--report-length", "4"]).report_length == 4


def test_whole_numbers_may_be_written_short() -> None:
    line = (
        "--steps 1e6 --batch-size 1_6 --replay.max-bytes 1.5e9 --set envs=4e0 replay.capacity=2e4"
    )
    config = config_of(shlex.split(line))
    assert (config.steps, config.batch_size, config.replay.max_bytes) == (10**6, 16, 1_500_000_000)
    assert (config.envs, config.replay.capacity) == (4, 20_000)
    assert all(type(each) is int for each in (config.steps, config.envs, config.replay.max_bytes))


@pytest.mark.parametrize(
    "line", [line.split(" | ")[0] for line in EXAMPLES.strip().splitlines()], ids=str
)
def test_every_example_is_a_command(line: str) -> None:
    """Parsed as it stands there; what it does is tested where the command is."""
    command, *arguments = shlex.split(line)
    if command in ("train", "resume"):
        config_of(arguments if command == "train" else ["--logdir", *arguments])
        return
    if command in OPTIONS:
        options = find(OPTIONS[command])([])
    else:
        options = function_options(find(COMMANDS[command]))
    values = parse(options, arguments)
    for option in options:
        if option.path in values:
            convert(option.flag, values[option.path], option.type)
    assert values or not arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--stesp", "5"], "no option --stesp. Did you mean --steps?"),
        (["train", "--train_ration=5"], "Did you mean --train-ratio?"),
        (["train", "--dreamer.los.horizon", "5"], "Did you mean --dreamer.loss.horizon?"),
        (["train", "--steps", "abc"], "steps=abc is not valid: use a whole number, at least 0.\n"),
        (["train", "--replay.capacity=0"], "replay.capacity=0 is not valid: use a whole number"),
        (["train", "--dreamer.model", "1k"], "dreamer.model=1k is not valid: use one of debug"),
        (["train", "--set", "dreamer.loss.horizn=1"], "did you mean 'dreamer.loss.horizon'?"),
        (["train", "--agent", "random", "--dreamer.loss.horizon", "1"], "There is no setting"),
        (["train", "--agent", "dreamr"], "Did you mean 'dreamer'?"),
        (["train", "--agent", "nowhere:AGENT"], "There is no module 'nowhere'"),
        (["train", "--launcher", "cloud"], "There is no launcher 'cloud': choose from local, ray"),
        (["train", "runs/x"], "Unexpected argument 'runs/x'. See --help."),
        (["eval", "runs", "--vidoe", "x.mp4"], "Did you mean --video?"),
        (["eval"], "LOGDIR is missing. See 'dreamfleet eval --help'."),
        (["eval", "runs", "--episodes", "many"], "--episodes=many is not valid: use a whole num"),
        (["status", "runs", "--zzz"], "no option --zzz. See --help."),
        (["check-env", "bundled:catch", "--options", "size"], "NAME=VALUE, not 'size'"),
        (["train", "--task"], "--task needs a value: text.\n"),
        (["train", "--task", "--steps", "5"], "--task needs a value"),
        (["train", "--batch_size", "-x"], "--batch-size needs a value: a whole number, at least 1"),
        (["train", "--outputs"], "--outputs needs a value: a list"),
        (["eval", "runs", "--video"], "--video needs a value: a path"),
        (["eval", "--logdir", "runs"], "no option --logdir. Did you mean LOGDIR?"),
        (["train", "--steps", "1.5"], "steps=1.5 is not valid: use a whole number, at least 0.\n"),
        (["train", "--steps", "1e300"], "steps=1e+300 is not valid: use a whole number"),
        (["train", "--steps", "inf"], "steps=inf is not valid: use a whole number"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "changes", [{"steps": -1}, {"dreamer.loss.horizon": 0.5}, {"replay.capacity": 0}, {"envs": 0}]
)
def test_python_and_the_command_refuse_with_the_same_sentence(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from dreamfleet import configure

    with pytest.raises(ConfigError) as caught:
        configure(changes)
    ((path, value),) = changes.items()
    assert main(["train", f"--{path.replace('_', '-')}", str(value)]) == 2
    assert capsys.readouterr().err.strip() == f"error: {caught.value}"


def test_a_function_is_called_with_what_was_typed() -> None:
    got: list[Any] = []

    def command(
        name: str, /, count: int = 1, many: tuple[Path, ...] = (), on: bool = False
    ) -> None:
        got.append((name, count, many, on))

    import typing

    command.__annotations__ = typing.get_type_hints(command)
    call("test", command, ["--on", "x", "--count", "-3", "--many", "a", "b"])
    call("test", command, ["x", "--no-on"])
    assert got == [("x", -3, (Path("a"), Path("b")), True), ("x", 1, (), False)]


def test_every_number_of_the_command_line_has_words_for_its_range() -> None:
    for option in options_of([]):
        assert describe(option.type), option.flag
