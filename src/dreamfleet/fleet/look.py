"""What a run needs to know of its environment before it starts.

The environment is tried out in a process of its own, where it may hang, crash or print; with the
serial launcher in this one, for a debugger.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import psutil

from dreamfleet.envs import EnvError
from dreamfleet.envs.diagnose import (
    ONLY_ONE,
    Call,
    Tell,
    different_spaces,
    own_traceback,
    try_out,
)
from dreamfleet.errors import DreamfleetError
from dreamfleet.fleet.watched import Person, Say, run_watched
from dreamfleet.roles.runtime import pickled
from dreamfleet.spaces import Space, SpaceError, spaces_from_json, spaces_to_json


class Look(NamedTuple):
    """The spaces of an environment, and what else was found when it was made."""

    obs_space: Mapping[str, Space]
    act_space: Mapping[str, Space]
    bytes: int
    """Memory that the first one of a process takes, with the code that it loads."""
    further_bytes: int
    """Memory that another one takes."""
    notes: list[str]
    """What was recognised or assumed."""
    log_info: Sequence[str] = ()
    """Names in its `info` that ask to be logged."""
    output: str = ""
    """What it wrote."""


def look_at_environments(
    make_env: Callable[[int], Any],
    *,
    both: bool,
    number: int = 0,
    tell: Tell | None = None,
    second: Callable[[], Look] | None = None,
) -> Look:
    """Make an environment, reset it, take one step, and close it.

    Args:
        make_env: Called with the number of the environment.
        both: Do the same with a second one meanwhile, as the run will have several.
        number: Of the environment.
        tell: Told before each call of the environment.
        second: Looks at the second one; None for in this process.

    Raises:
        EnvError: It breaks the contract, or there can be no second one.
        SpaceError: A space and a value disagree, or the two environments have different spaces.
    """
    me = psutil.Process()
    before = me.memory_info().rss
    if tell:
        tell("constructor", number, 0)
    env = make_env(number)
    try:
        try_out(env, tell)
        taken = max(0, me.memory_info().rss - before)
        notes, names = list(getattr(env, "notes", ())), tuple(getattr(env, "unlogged", ()))
        look = Look(env.obs_space, env.act_space, taken, 0, notes, names)
        if both:
            here = partial(look_at_environments, make_env, both=False, number=1, tell=tell)
            look = look._replace(further_bytes=_look_beside(look, second or here).bytes)
    except BaseException:
        with suppress(Exception):  # it is not what went wrong
            env.close()
        raise
    if tell:
        tell("close", number, 0)
    env.close()
    return look


def _look_beside(look: Look, second: Callable[[], Look]) -> Look:
    """Look at a second environment while the first one is there."""
    try:
        other = second()
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, DreamfleetError) else repr(error)
        raise EnvError(
            f"A second environment failed beside the first: {what.rstrip('.')}. {ONLY_ONE}"
        ) from error
    if different := different_spaces(look[:2], other[:2]):
        raise SpaceError(different)
    return other


def look_apart(
    make_env: Callable[[int], Any], *, both: bool, timeout: float, say: Say, apart: bool = False
) -> Look:
    """The same in a process of its own.

    Args:
        make_env: Called with the number of the environment.
        both: See `look_at_environments`.
        timeout: Seconds that a call of the environment may take; 0 for no timeout.
        say: Takes lines for the person.
        apart: Whether the second one has a process of its own, too.

    Raises:
        ConfigError: `make_env` cannot be sent there.
        EnvError: The environment raised, hangs, or ended its process.
        DreamfleetError: It cannot be made as it was asked for.
    """
    # What names code of the person's is unpickled there as a part of the constructor.
    return _run(pickled("the environment", make_env), 0, both, apart, timeout, say)


def _run(make: bytes, number: int, both: bool, apart: bool, timeout: float, say: Say) -> Look:
    found, output = run_watched(
        cloudpickle.dumps(partial(_look, make, number, both, apart, timeout)),
        timeout=timeout,
        setting="env_timeout",
        say=say,
    )
    spaces = {key: spaces_from_json(found[key]) for key in ("obs_space", "act_space")}
    return Look(**{**found, **spaces, "output": output})


def _look(
    make: bytes, number: int, both: bool, apart: bool, timeout: float, person: Person
) -> dict[str, Any]:
    """What the other process does."""
    call: Call = "constructor"

    def tell(name: Call, done: int, steps: int) -> None:
        nonlocal call
        call = name
        person.tell(name, done, steps)

    def second() -> Look:
        person.tell(None, 0, 0)  # that process is watched by itself
        look = _run(make, 1, False, False, timeout, person.say)
        sys.stdout.write(look.output)
        return look

    try:
        tell("constructor", number, 0)
        make_env = cloudpickle.loads(make)
        look = look_at_environments(
            make_env, both=both, number=number, tell=tell, second=second if apart else None
        )
    except DreamfleetError as error:
        cause = error.__cause__
        if isinstance(error, EnvError) and cause and not isinstance(cause, DreamfleetError):
            person.say(own_traceback(cause))
        raise
    except (Exception, SystemExit) as error:
        person.say(own_traceback(error))
        where = "The constructor" if call == "constructor" else f"{call}()"
        what = f"{where} raised {type(error).__name__}: {error}".rstrip(".")
        raise EnvError(f"{what}. Fix it; check-env tells more about an environment.") from error
    spaces = {"obs_space": look.obs_space, "act_space": look.act_space}
    return {**look._asdict(), **{key: spaces_to_json(value) for key, value in spaces.items()}}
