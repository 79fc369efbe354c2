"""Tasks that are given as Python objects: their names, and what makes them.

A class or a function that any process can import is known by its name, `module:name`, and nothing
else is special about it. What only this program has (it stands in a script or a notebook, or is a
lambda or a partial) is named after `__main__`. Such a name tells runs apart; other programs need
the object, or a name that they can import.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from dreamfleet.envs.base import EnvError, UnknownTaskError

PROGRAM = "__main__:"
"""How the names of tasks start that only one program has."""

Task = str | Callable[..., Any]


def name_of(env: Any) -> str:
    """The name of an environment's class, of a function that makes one, or of a task.

    Raises:
        EnvError: It is none of these.
    """
    if isinstance(env, str):
        return env
    if not callable(env):
        what = type(env).__name__
        raise EnvError(
            f"env is an object of {what}, and every process makes its own environment: pass the "
            f"class, or a function that returns one, such as lambda: {what}()."
        )
    name = _path_of(env)
    return name if name and _importable(name, env) else f"{PROGRAM}{_described(env)}"


def maker_of(task: str) -> Task:
    """What makes the environments of a task: the object, if other processes cannot import it.

    Of a program only what it has defined itself is taken: `__main__:os.system` would be any
    function of a module that it has imported.

    Raises:
        UnknownTaskError: This program has no such object.
    """
    if not task.startswith(PROGRAM):
        return task
    found = vars(sys.modules["__main__"]).get(task.removeprefix(PROGRAM))
    if not callable(found) or getattr(found, "__module__", None) != "__main__":
        raise UnknownTaskError(only_there(task))
    maker: Callable[..., Any] = found
    return maker


def only_there(task: str) -> str:
    """Why the environment of a task that another program had cannot be made here."""
    name = task.removeprefix(PROGRAM)
    plain = name if name.isidentifier() else "NAME"
    return (
        f"The environment {name} was defined in the program that trained with it: put it into a "
        f"module and write --task module:{plain}, or from Python pass env=."
    )


def same_task(before: str, now: str) -> bool:
    """Whether two names may be those of one task: it may have moved from a program to a module, or
    back."""
    if before == now:
        return True
    moved = before.startswith(PROGRAM) or now.startswith(PROGRAM)
    return moved and before.rpartition(":")[2] == now.rpartition(":")[2]


def is_shared(task: str) -> bool:
    """Whether another object of a program may have this name as well: all lambdas have one name,
    and neither what a function holds from outside nor every value of a partial stands in it."""
    return task.startswith(PROGRAM) and any(
        each in task for each in ("<lambda>", "<locals>", "...")
    )


def _path_of(env: Any) -> str:
    module, name = getattr(env, "__module__", None), getattr(env, "__qualname__", None)
    return f"{module}:{name}" if module and name and module != "__main__" else ""


def _importable(name: str, env: Any) -> bool:
    """Whether a fresh process would find the same object by this name."""
    module, _, path = name.partition(":")
    try:
        found = attrgetter(path)(sys.modules[module])
        return found is env and importlib.util.find_spec(module) is not None
    except (AttributeError, KeyError, ValueError, ImportError):
        return False


def _described(env: Any) -> str:
    if isinstance(env, functools.partial):
        given = [*map(_value, env.args), *(f"{k}={_value(v)}" for k, v in env.keywords.items())]
        return f"{_described(env.func)}({', '.join(given)})"
    if inspect.ismethod(env) and not isinstance(env.__self__, type):
        return f"{_described(env.__self__)}.{env.__name__}"
    return str(getattr(env, "__qualname__", None) or f"{type(env).__qualname__}(...)")


def _value(value: Any) -> str:
    # Of anything else the text may differ from one start to the next.
    return repr(value) if isinstance(value, (str, int, float, bool, type(None))) else "..."
