"""Environments that are given as Python objects."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from dreamfleet.config import RunConfig
from dreamfleet.envs import EnvError, UnknownTaskError, make_env
from dreamfleet.envs.bundled import Dummy
from dreamfleet.envs.registry import maker_of, name_of, same_task


class Maker:
    def __call__(self) -> Any:
        return Dummy()


def local() -> Callable[[], Any]:
    def make() -> Any:
        return Dummy()

    return make


@pytest.mark.parametrize(
    ("env", "name", "directory"),
    [
        ("gym:ALE/Pong-v5", "gym:ALE/Pong-v5", "gym-ALE-Pong-v5"),
        (Dummy, "dreamfleet.envs.bundled:Dummy", "dreamfleet.envs.bundled-Dummy"),
        (lambda: Dummy(), "__main__:<lambda>", "lambda"),
        (partial(Dummy, length=5), "__main__:Dummy(length=5)", "Dummy-length=5"),
        (partial(partial(Dummy, "x"), size=(8, 8)), "__main__:Dummy('x', size=...)",
         "Dummy-x-size="),
        (local(), "__main__:local.<locals>.make", "local.-locals-.make"),
        (Maker(), "__main__:Maker(...)", "Maker"),
        (Maker().__call__, "__main__:Maker(...).__call__", "Maker-...-.__call__"),
    ],
)  # fmt: skip
def test_an_object_has_the_name_by_which_others_can_import_it_or_one_that_nobody_can(
    env: Any, name: str, directory: str
) -> None:
    assert name_of(env) == name
    assert RunConfig(task=name).logdir == Path("runs") / directory
    if not isinstance(env, str) and name.startswith("__main__"):
        with pytest.raises(UnknownTaskError, match=r"put it into a module and write --task module"):
            make_env(name)


def test_an_environment_instead_of_what_makes_it_is_refused() -> None:
    with pytest.raises(EnvError, match="every process makes its own environment: pass the class"):
        name_of(gymnasium.make("CartPole-v1"))


def test_a_task_of_this_program_is_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    class Mine(Dummy):
        __module__ = "__main__"

    monkeypatch.setattr(__main__, "Mine", Mine, raising=False)
    assert maker_of("__main__:Mine") is Mine
    assert make_env("__main__:Mine").obs_space
    assert maker_of("bundled:dummy") == "bundled:dummy"
    # Everything else could be any function of a module that the program has imported.
    monkeypatch.setattr(__main__, "os", os, raising=False)
    monkeypatch.setattr(__main__, "system", os.system, raising=False)
    monkeypatch.setattr(__main__, "three", 3, raising=False)
    for name in ("os.system", "system", "three", "Mine.step", "missing", "__builtins__"):
        for make in (maker_of, make_env):
            with pytest.raises(UnknownTaskError, match="write --task module:"):
                make(f"__main__:{name}")


def test_an_environment_may_move_from_a_program_to_a_module() -> None:
    assert same_task("__main__:Target", "envs:Target")
    assert same_task("envs:Target", "__main__:Target")
    assert not same_task("__main__:Target", "envs:Other")
    assert not same_task("other:Target", "envs:Target")
