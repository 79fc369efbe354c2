"""From the name of a task to its environment.

A task is `SUITE:NAME`, or `package.module:factory` for any callable that returns a Gymnasium or
native environment, or `package.module:Id-v0` for an id that the module registers with Gymnasium.

A suite is a module with a function `constructors`: what makes the environments, by name. Keyword
arguments of that are the task's options, always with `seed`. A suite is imported when one of its
tasks is made, so that an environment process loads only what it needs. A new one is a line in
`SUITES`.

A factory that any process can import is known by its name, `module:name`. One that only this
program has (a class of a script or a notebook, a lambda, a partial) is named after `__main__`. Such
a name tells runs apart; other programs need the object, or a name that they can import.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from dreamfleet.envs.base import EnvError, UnknownTaskError
from dreamfleet.envs.wrappers import ActionRepeat, AgentEnv, Bounds, TimeLimit
from dreamfleet.errors import ConfigError, MissingExtraError, did_you_mean
from dreamfleet.settings import Count, CountOrZero, convert, load_module, load_object

if TYPE_CHECKING:
    from dreamfleet.envs.lanes import Lanes

PROGRAM = "__main__:"
"""The start of the names of tasks that only one program has."""

Task = str | Callable[..., Any]

SUITES: Mapping[str, str] = {
    "bundled": "dreamfleet.envs.bundled",
    "gym": "dreamfleet.envs.gym",
    "dmc": "dreamfleet.envs.dmc",
    "atari": "dreamfleet.envs.atari",
    "atari100k": "dreamfleet.envs.atari:constructors_100k",
    "crafter": "dreamfleet.envs.crafter",
    "minigrid": "dreamfleet.envs.minigrid",
}
# A factory's name holds no hyphen.
_GYM_ID = re.compile(r":.*-v\d+$")

GENERAL: Mapping[str, Any] = {
    "repeat": Count | None,
    "time_limit": CountOrZero,
    "size": tuple[Count, Count] | None,
    "image_layout": str | dict[str, str] | None,
    "action_bounds": Bounds | dict[str, Bounds] | None,
    "log_info": str | tuple[str, ...] | None,
}
"""Options that every task has, and their types."""
_NOT_OF_SUITES = {
    "image_layout": "it always returns images in the right layout",
    "log_info": "it logs everything by itself",
}
# Options that a task may implement itself: Atari pools over the repeated frames.
_OWN = {"repeat", "size", *_NOT_OF_SUITES}


def make_env(
    task: Task,
    *,
    seed: int = 0,
    repeat: int | None = None,
    time_limit: int = 0,
    size: tuple[int, int] | None = None,
    image_layout: str | dict[str, str] | None = None,
    action_bounds: Bounds | dict[str, Bounds] | None = None,
    log_info: str | Sequence[str] | None = None,
    **options: Any,
) -> AgentEnv:
    """The environment of a task, ready for an agent.

    Dtypes are unified, spaces checked and continuous actions normalised to -1..1 and clipped.

    Args:
        task: `gym:CartPole-v1`, `dmc:walker_walk`, `atari:pong`, `crafter:reward`,
            `minigrid:Empty-5x5-v0`, `bundled:catch` or `package.module:factory`; or the factory
            itself, which is given the seed if it has a parameter of that name.
        seed: Of this environment; give each its own (`env_seed`).
        repeat: Take each action this often; None for what the suite does by itself.
        time_limit: End an episode after this many actions of the agent; 0 for no limit.
        size: Resize images to this height and width.
        image_layout: The order of the axes of images, for all or by key, where it cannot be
            recognised or is wrong: hwc, chw, hw, shwc (s for the frames of a stack) and so on;
            flat takes an array as a vector, and none keeps its shape.
        action_bounds: The lowest and the highest value of continuous actions that have no bounds,
            for all or by key.
        log_info: Names in the `info` of a Gymnasium environment whose numbers are logged, beside
            `success` and `is_success`.
        options: The suite's own, such as `obs="pixels"`.

    Returns:
        The environment. Its `notes` say what was recognised or assumed, a sentence each.

    Raises:
        UnknownTaskError: Nothing has this name.
        MissingExtraError: The suite's package is not installed.
        ConfigError: The task has no such option, or its value cannot work.
        SpaceError: The environment's spaces cannot be used.
    """
    given = (repeat, time_limit, size, image_layout, action_bounds, log_info)
    return _make(task, None, seed, dict(zip(GENERAL, given, strict=True)), options)


def make_lanes(task: Task, lanes: int, *, seed: int = 0, **options: Any) -> Lanes:
    """A vectorised environment of so many lanes; see `dreamfleet.envs.lanes` and `make_env`.

    Raises:
        As `make_env`; also for an option that cannot be applied to lanes.
    """
    general = {name: options.pop(name, 0 if name == "time_limit" else None) for name in GENERAL}
    return cast("Lanes", _make(task, lanes, seed, general, options))


def make_visible_env(task: Task, *, seed: int = 0, **options: Any) -> AgentEnv:
    """The environment of a task, made so that it renders frames if it can."""
    return make_env(task, seed=seed, **{**options, **rendering_options(task)})


def rendering_options(task: Task) -> dict[str, Any]:
    """The options with which a task renders frames; none if it always does, or never."""
    # Only if they are named: a factory may pass any keyword on to a function that lacks it.
    make, parameters, _ = _factory(task)
    if "render" in parameters:
        return {"render": True}
    # Classes of Gymnasium that declare nothing have an empty list.
    modes = getattr(make, "metadata", {}).get("render_modes") or ["rgb_array"]
    wanted = "render_mode" in parameters and "rgb_array" in modes
    return {"render_mode": "rgb_array"} if wanted else {}


def is_vectorised(task: Task, options: Mapping[str, Any]) -> bool:
    """Whether a task makes vector environments: a factory with a parameter `num_envs`, or a task of
    `gym:` with the option `vectorization`."""
    _, parameters, in_suite = _factory(task)
    if not in_suite:
        return "num_envs" in parameters
    known = parameters.get("vectorization")
    return known is not None and bool(options.get("vectorization", known.default))


def by_number(
    make: Callable[..., Any], task: Task, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function that makes environments of a task by their number, and whose `vectorised` says
    whether it takes `lanes`. That imports the task, which only an environment process may do."""
    result = functools.partial(make)
    result.vectorised = functools.partial(is_vectorised, task, options)  # type: ignore[attr-defined]
    return result


def _make(
    task: Task, lanes: int | None, seed: int, general: dict[str, Any], options: dict[str, Any]
) -> AgentEnv:
    """One environment, or one of so many lanes."""
    make, accepted, in_suite = _factory(task)
    vectorised, owner = is_vectorised(task, options), name_of(task).removeprefix(PROGRAM)
    if "num_envs" in options and (vectorised or in_suite):
        raise ConfigError("num_envs is not an option: set envs and envs_per_process.")
    for name, value in general.items():
        if in_suite or name not in accepted:
            convert(name, value, GENERAL[name])
        if in_suite and name in _NOT_OF_SUITES and name not in accepted and value is not None:
            raise ConfigError(f"{task} has no option {name!r}: {_NOT_OF_SUITES[name]}.")
    for name in accepted.keys() & _OWN:
        value, general[name] = general[name], None
        options |= {} if value is None else {name: value}
    check_options(owner, accepted, options, ("seed", *(["num_envs"] if vectorised else [])))
    for name in options.keys() & accepted.keys() if in_suite else ():
        convert(name, options[name], accepted[name].annotation)
    repeat, limit = general["repeat"] or 1, general["time_limit"]
    if vectorised and repeat > 1:
        raise ConfigError(
            f"repeat cannot be applied to the lanes of {owner}: repeat actions in the factory, and "
            "leave it out."
        )
    seeded = {"seed": seed} if "seed" in accepted else {}
    count = {"num_envs": lanes or 1} if vectorised else {}
    try:
        env = make(**seeded, **count, **options)
    except TypeError as error:
        # Without options this is a bug of the factory, which needs its whole traceback.
        if not options:
            raise
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ConfigError(f"{task} cannot be made with {given}: {error}.") from error
    asked = {name: general[name] for name in _NOT_OF_SUITES}
    last = {name: general[name] for name in ("size", "action_bounds")}
    if vectorised:
        from dreamfleet.envs.lanes import Lanes, OneLane, VectorLanes

        if not isinstance(env, VectorLanes):
            env = VectorLanes(env, lanes or 1, seed=seed, **asked)
        env.limit_time(limit)
        return Lanes(env, **last) if lanes else AgentEnv(OneLane(env), **last)
    # Suites are native, seeded, and have their images as agents take them.
    if not in_suite:
        env, how = _adapted(env, seed, **asked)
        last |= how
    if repeat > 1:
        env = ActionRepeat(env, repeat)
    return AgentEnv(TimeLimit(env, limit) if limit else env, **last)


def _adapted(env: Any, seed: int, image_layout: Any, log_info: Any) -> tuple[Any, dict[str, Any]]:
    """A Gymnasium environment adapted, a native one as it is; and options of `AgentEnv`."""
    name = type(env).__name__
    if hasattr(env, "obs_space") and hasattr(env, "act_space") and hasattr(env, "step"):
        if log_info:
            raise ConfigError(
                f"{name} has no info: leave log_info out, and return what is to be logged as keys "
                "that start with log/."
            )
        # What `make_env` has made is arranged.
        return env, {"arrange": not isinstance(env, AgentEnv), "image_layout": image_layout}
    if hasattr(env, "num_envs") and hasattr(env, "step"):
        raise EnvError(
            f"{name} is a vector environment: give its factory a parameter num_envs, or return one "
            f"environment, and Dreamfleet makes envs={env.num_envs} of them."
        )
    if hasattr(env, "observation_space") and hasattr(env, "action_space"):
        from dreamfleet.envs.gym import GymEnv

        return GymEnv(env, seed=seed, image_layout=image_layout, log_info=log_info), {}
    raise EnvError(
        f"{name} is not an environment: it needs obs_space, act_space and step, or the interface "
        "of gymnasium.Env."
    )


# --- suites and factories -------------------------------------------------------------------------


def suites() -> list[str]:
    """The suites, whether their packages are installed or not."""
    return list(SUITES)


def tasks(suite: str) -> list[str]:
    """The tasks of a suite, without its prefix.

    Raises:
        MissingExtraError: The suite's package is not installed.
    """
    return sorted(_constructors(suite))


def is_bundled(task: str) -> bool:
    """Whether a task belongs to a suite of this package, so that no other module is named."""
    suite, _, name = task.partition(":")
    return suite in SUITES and ":" not in name


def _constructors(suite: str) -> dict[str, Callable[..., Any]]:
    module, _, name = SUITES[suite].partition(":")
    found = getattr(importlib.import_module(module), name or "constructors")
    return cast("dict[str, Callable[..., Any]]", found())


def _in_suite(task: Task) -> bool:
    """Whether a suite makes the task. `module:Id-v0` is an id as Gymnasium writes it."""
    return isinstance(task, str) and (
        task.partition(":")[0] in SUITES or bool(_GYM_ID.search(task))
    )


def _factory(task: Task) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter], bool]:
    """What makes the environments of a task, its parameters, and whether a suite has it."""
    make, in_suite = _constructor(task) if isinstance(task, str) else task, _in_suite(task)
    # Options are checked by our own annotations; those of other packages may mean anything.
    return make, inspect.signature(make, eval_str=in_suite).parameters, in_suite


def _constructor(task: str) -> Callable[..., Any]:
    prefix, colon, name = task.partition(":")
    if not colon or not name:
        raise UnknownTaskError(f"There is no task {task!r}: write SUITE:NAME.{_suggestions(task)}")
    suite, name = (prefix, name) if prefix in SUITES else ("gym", task)
    try:
        if not _in_suite(task):
            make: Any = maker_of(task) if task.startswith(PROGRAM) else load_object(task)
        elif suite == "gym" and ":" in name:  # the module is imported first
            module, _, short = name.rpartition(":")
            load_module(module, name)
            make = (known := _constructors("gym")).get(short)
            if make is None:
                close = difflib.get_close_matches(short, known, n=1, cutoff=0.8)
                hint = f"did you mean {close[0]}?" if close else "check the spelling."
                raise UnknownTaskError(f"The module {module!r} registers no {short}: {hint}")
        else:
            make = _constructors(suite).get(name)
    except ConfigError as error:
        raise UnknownTaskError(f"{error}{_suggestions(task)}") from error
    if make is None:
        own = f" If a module of yours registers it, write module:{name}." if suite == "gym" else ""
        raise UnknownTaskError(f"There is no task {task!r}.{_suggestions(task)}{own}")
    if not callable(make):
        raise UnknownTaskError(
            f"{task} is not callable: name a function that returns an environment."
        )
    return cast("Callable[..., Any]", make)


def _suggestions(task: str) -> str:
    """Similar names: of the suite if there is a similar one, of all installed suites otherwise."""
    prefix, colon, name = task.partition(":")
    suites = difflib.get_close_matches(prefix, SUITES, n=2, cutoff=0.7) if colon else []
    wanted = name if colon else task
    candidates: list[str] = []
    for suite in suites or SUITES:
        try:
            known = {each.lower(): each for each in tasks(suite)}
        except MissingExtraError:
            continue
        cutoff = 0.6 if suites else 0.8
        close = difflib.get_close_matches(wanted.lower(), known, n=3, cutoff=cutoff)
        candidates += [f"{suite}:{known[each]}" for each in close]
    if candidates:
        return f" Did you mean {' or '.join(candidates[:3])}?"
    others = f" Suites: {', '.join(SUITES)}; or package.module:factory for your own."
    return "" if "." in prefix else others  # a module


def check_options(
    owner: str,
    parameters: Mapping[str, inspect.Parameter],
    options: Collection[str],
    given: Collection[str],
    own: Collection[str] = (),
) -> None:
    """Refuse options that a constructor does not have (`own`, or its parameters), and one that
    needs more than the options and what it is `given` beside them."""
    known = {*own} or parameters.keys() - {*given}
    unknown = [name for name in options if name not in known]
    if unknown and not takes_anything(parameters):
        names = sorted({*known, *GENERAL})
        hint = did_you_mean(unknown[0], names, f"it has {', '.join(names)}.")
        raise ConfigError(f"{owner} has no option {unknown[0]!r}: {hint}")
    for name, each in parameters.items():
        named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if named and each.default is each.empty and name not in (*options, *given):
            raise ConfigError(
                f"{owner} needs {name!r}: add --env-options {name}=VALUE (check-env: --options "
                f"{name}=VALUE; from Python: env_options={{{name!r}: VALUE}})."
            )


def takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a function takes any keyword."""
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


# --- names of factories ---------------------------------------------------------------------------


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
    return _import_name(env) or f"{PROGRAM}{_described(env)}"


def maker_of(task: str) -> Task:
    """The name of a task, or its factory if that is an object of this program.

    Only objects that the program has defined itself are taken: `__main__:os.system` would be any
    function of a module that it has imported.

    Raises:
        UnknownTaskError: This program has no such object.
    """
    if not task.startswith(PROGRAM):
        return task
    found = vars(sys.modules["__main__"]).get(task.removeprefix(PROGRAM))
    if not callable(found) or getattr(found, "__module__", None) != "__main__":
        raise UnknownTaskError(only_there(task))
    return cast("Task", found)


def only_there(task: str) -> str:
    """The error for a task that only another program has."""
    name = task.removeprefix(PROGRAM)
    plain = name if name.isidentifier() else "NAME"
    return (
        f"The environment {name} was defined in the program that trained with it: put it into a "
        f"module and write --task module:{plain}, or from Python pass env=."
    )


def same_task(before: str, now: str) -> bool:
    """Whether two names may be of one task, which may have moved between a program and a module."""
    moved = before.startswith(PROGRAM) or now.startswith(PROGRAM)
    return before == now or (moved and before.rpartition(":")[2] == now.rpartition(":")[2])


def is_shared(task: str) -> bool:
    """Whether another object of a program may have this name as well: a name does not hold what a
    lambda does, what a closure holds, or every value of a partial."""
    shared = ("<lambda>", "<locals>", "...")
    return task.startswith(PROGRAM) and any(each in task for each in shared)


def _import_name(env: Any) -> str:
    """The name by which a fresh process would find the same object; empty if there is none."""
    module, path = getattr(env, "__module__", None), getattr(env, "__qualname__", None)
    if not module or not path or module == "__main__":
        return ""
    try:
        found = attrgetter(path)(sys.modules[module])
        there = found is env and importlib.util.find_spec(module) is not None
    except (AttributeError, KeyError, ValueError, ImportError):
        return ""
    return f"{module}:{path}" if there else ""


def _described(env: Any) -> str:
    def shown(value: Any) -> str:
        # The text of other values may differ from one start to the next.
        return repr(value) if isinstance(value, (str, int, float, bool, type(None))) else "..."

    if isinstance(env, functools.partial):
        given = [*map(shown, env.args), *(f"{k}={shown(v)}" for k, v in env.keywords.items())]
        return f"{_described(env.func)}({', '.join(given)})"
    if inspect.ismethod(env) and not isinstance(env.__self__, type):
        return f"{_described(env.__self__)}.{env.__name__}"
    return str(getattr(env, "__qualname__", None) or f"{type(env).__qualname__}(...)")
