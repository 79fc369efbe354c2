"""Sweeps run what is missing, and go on where they were stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dreamfleet import ConfigError, sweep
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.plotting import runs_of
from dreamfleet.sweep import Range, Sweep, SweepError, read_values, result_of

TRAIN = """
import json, pathlib, signal, sys, time
words = sys.argv[1:]
logdir = pathlib.Path(words[words.index("--logdir") + 1])
logdir.mkdir(parents=True, exist_ok=True)
with (logdir / "starts").open("a") as file:
    file.write("x")
(logdir / "config.json").write_text(pathlib.Path("config.json").read_text())
changes = words[words.index("--set") + 1 :] if "--set" in words else []
changed = dict(word.split("=") for word in changes)
score = float(changed.get("x", 1)) + float(words[words.index("--seed") + 1]) / 100
if not pathlib.Path("silent").exists():
    row = json.dumps({"step": 900, "episode/score": score})
    (logdir / "scores.jsonl").write_text(row + chr(10))
if pathlib.Path("wait").exists() and score < float(pathlib.Path("wait").read_text()):
    time.sleep(60)
sys.exit(pathlib.Path("broken").exists() and "x=1" in changes)
"""


@pytest.fixture(autouse=True)
def trainings_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings that write a score and end."""
    Path("config.json").write_text(RunConfig(steps=1000).to_json())
    monkeypatch.setattr(sweep, "tied", lambda words: [sys.executable, "-c", TRAIN, *words])
    monkeypatch.setattr(sweep, "_POLL_SECONDS", 0.05)


def made(values: dict[str, Any] | None = None, **changes: Any) -> Sweep:
    read = {path: read_values(path, value) for path, value in (values or {}).items()}
    options: dict[str, Any] = {"seeds": [0, 1], "say": lambda _: None} | changes
    return Sweep(Path("sweep"), ["--task", "bundled:catch"], read, **options)


def starts() -> dict[str, int]:
    return {each.parent.name: len(each.read_text()) for each in Path("sweep").glob("*/starts")}


def test_values() -> None:
    assert read_values("a", "log(1e-5, 1e-3)") == Range("log", 1e-5, 1e-3)
    assert read_values("a", "uniform(-1,1)") == Range("uniform", -1, 1)
    assert read_values("a", "int(1,8)") == Range("int", 1, 8)
    assert read_values("a", "1,2") == ("1", "2")
    assert read_values("a", 0.5) == ("0.5",)
    assert read_values("a", (64, 64)) == ("[64, 64]",)
    assert read_values("a", "auto") == ("auto",)
    for wrong in ("log(0,1)", "int(1,2.5)", "uniform(2,1)", "log(a,b)"):
        with pytest.raises(ConfigError, match="is not a range"):
            read_values("a", wrong)


def test_every_combination_is_run_once() -> None:
    made({"a.x": "1,2", "b.x": "3"}, parallel=2).start()
    assert set(starts().values()) == {1}
    assert len(starts()) == 4
    made({"a.x": "1,2", "b.x": "3"}, seeds=[0, 1, 2]).start()
    assert set(starts().values()) == {1}
    assert len(starts()) == 6
    with pytest.raises(ConfigError, match="holds a sweep with other settings"):
        made({"a.x": "1,2"}).start()


def test_what_has_failed_is_run_again() -> None:
    Path("broken").touch()
    with pytest.raises(SweepError, match=r"2 runs have failed: read .*log"):
        made({"x": "1,2"}).start()
    assert len(starts()) == 4
    Path("broken").unlink()
    made({"x": "1,2"}).start()
    assert sorted(starts().values()) == [1, 1, 2, 2]
    assert {result_of(each)["state"] for each in runs_of(Path("sweep"))} == {"complete"}  # type: ignore[index]


def test_a_stopped_sweep_goes_on() -> None:
    Path("wait").write_text("1.005")
    stopped = made(parallel=2, seeds=[0, 1, 2])
    said: list[str] = []

    def stop_after_two(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            stopped._stop.set()

    stopped.say = stop_after_two
    stopped.start()
    assert [line.split(":")[0] for line in sorted(said)] == ["seed=1", "seed=2"]
    assert result_of(Path("sweep/seed=0")) is None
    Path("wait").unlink()
    made(seeds=[0, 1, 2]).start()
    assert starts() == {"seed=0": 2, "seed=1": 1, "seed=2": 1}


def needs_optuna() -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'dreamfleet[sweep]'")


def test_a_search_goes_on_and_finds_better_settings() -> None:
    needs_optuna()
    made({"x": "uniform(0,10)"}, trials=3, seeds=[0]).start()
    assert len(starts()) == 3
    made({"x": "uniform(0,10)"}, trials=12, seeds=[0]).start()
    assert len(starts()) == 12
    assert set(starts().values()) == {1}
    study = made({"x": "uniform(0,10)"})._study()
    assert study.best_value == pytest.approx(study.best_params["x"])


@pytest.mark.parametrize("trouble", ["broken", "silent"])
def test_a_search_whose_trials_all_fail_ends(trouble: str) -> None:
    """And tries as many new settings when it is started again."""
    needs_optuna()
    Path(trouble).touch()
    for count in (2, 4):
        search = made({"x": "1", "y": "uniform(0,10)"}, trials=2, seeds=[0])
        if trouble == "broken":
            with pytest.raises(SweepError, match="2 runs have failed"):
                search.start()
        else:
            search.start()
        assert len(starts()) == count
    Path(trouble).unlink()
    made({"x": "1", "y": "uniform(0,10)"}, trials=2, seeds=[0]).start()
    assert len(starts()) == 6


def test_a_trial_that_was_left_behind_is_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_optuna()
    search = made({"x": "log(1,10)"}, trials=1)
    left = search._next(search._study())
    monkeypatch.setattr(sweep.psutil, "pid_exists", lambda _: False)
    search.start()
    assert {result_of(each)["setting"]["x"] for each in runs_of(Path("sweep"))} == {  # type: ignore[index]
        str(left.params["x"])
    }
    assert len(starts()) == 2


def test_trials_that_fall_behind_are_stopped() -> None:
    needs_optuna()
    search = made({"x": "uniform(0,10)"}, seeds=[0])
    study = search._study()
    optuna = pytest.importorskip("optuna")
    values = {"x": search.values["x"].distribution(optuna)}  # type: ignore[union-attr]
    for score in (5.0, 6.0, 7.0, 8.0):
        parts = dict.fromkeys(range(20), score)
        told = {"value": score, "intermediate_values": parts}
        study.add_trial(
            optuna.trial.create_trial(params={"x": score}, distributions=values, **told)
        )
    Path("wait").write_text("4")  # what scores less goes on until it is stopped
    study.enqueue_trial({"x": 1.0})
    search._try(study, study.ask(fixed_distributions=values))
    assert study.get_trials()[-1].state.name == "PRUNED"
    assert result_of(Path("sweep/trial-0004_seed-0"))["state"] == "pruned"  # type: ignore[index]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--task", "bundled:catch", "--logdir", "sweep", "--seeds", "3,4"]
    assert main([*words, "--set", "dreamer.loss.horizon=50,100"]) == 0
    shown = capsys.readouterr().out
    assert "horizon=50,seed=3: complete, score 1.03" in shown
    assert "dreamer.loss.horizon=100" in shown
    assert json.loads(Path("sweep/sweep.json").read_text())["train"] == ["--task", "bundled:catch"]
    for wrong, sentence in (
        (["--set", "dreamer.loss.horizonn=1"], "horizon"),
        (["--set", "seed=1"], "--seeds"),
        (["--seeds", "a"], "whole numbers"),
        (["--set", "train_ratio=log(2,1)"], "is not a range"),
    ):
        assert main(["sweep", *wrong]) == 2
        assert sentence in capsys.readouterr().err


def test_without_optuna_a_range_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", "--set", "train_ratio=log(1,2)", "--logdir", "sweep"]) == 1
    assert "dreamfleet[sweep]" in capsys.readouterr().err
