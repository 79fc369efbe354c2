"""How long compiling took the last time."""

from dataclasses import replace
from pathlib import Path

from fleet_parts import small_run

from dreamfleet.roles.compile_times import CompileTimes


def test_the_last_time_with_the_same_settings_is_the_estimate(tmp_path: Path) -> None:
    times, args = CompileTimes(tmp_path / "cache"), small_run(tmp_path)
    assert "the first time takes" in times.estimate(args)
    times.add(args, 0.2)  # an agent that compiles nothing
    assert "the first time takes" in times.estimate(args)
    times.add(args, 70.4)
    times.add(args, 41.3)
    elsewhere = replace(args, logdir=tmp_path / "other", steps=7, seed=3)
    assert times.estimate(elsewhere) == "with these settings it took 41 s the last time"
    assert "the first time takes" in times.estimate(replace(args, batch_size=3))


def test_a_file_that_cannot_be_used_is_as_empty(tmp_path: Path) -> None:
    args = small_run(tmp_path)
    (tmp_path / "compile_seconds.json").write_text("[1, 2")
    times = CompileTimes(tmp_path)
    assert "the first time takes" in times.estimate(args)
    times.add(args, 5.0)
    assert times.estimate(args).endswith("5 s the last time")
    CompileTimes(tmp_path / "compile_seconds.json").add(args, 5.0)  # no folder can be there
