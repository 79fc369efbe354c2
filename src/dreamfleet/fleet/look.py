"""What a run needs to know of its environment before it starts.

The environment is made in a process of its own, where it may hang, crash or print; with the serial
launcher in this one, for a debugger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import psutil

from dreamfleet.envs import EnvError
from dreamfleet.envs.diagnose import Tell, own_traceback
from dreamfleet.errors import DreamfleetError
from dreamfleet.fleet.watched import Person, Say, run_watched
from dreamfleet.roles.runtime import pickled
from dreamfleet.spaces import Space, spaces_from_json, spaces_to_json


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
    output: str = ""
    """What it wrote."""


def look_at_environments(
    make_env: Callable[[int], Any], *, both: bool, tell: Tell | None = None
) -> Look:
    """Make an environment, and one more if processes will hold several, and close them.

    No more than needed: somebody's environment may be slow to start, or a thing there is one of.
    """
    count, me = 2 if both else 1, psutil.Process()
    taken = [me.memory_info().rss]

    def close(env: Any, number: int) -> None:
        if tell:
            tell("close", number, count)
        env.close()

    with ExitStack() as stack:
        for number in range(count):
            if tell:
                tell("constructor", number, count)
            env = make_env(number)
            stack.callback(close, env, number)
            taken.append(me.memory_info().rss)
        first, further = max(0, taken[1] - taken[0]), max(0, taken[-1] - taken[1])
        notes = list(getattr(env, "notes", ()))
        return Look(env.obs_space, env.act_space, first, further, notes)


def look_apart(make_env: Callable[[int], Any], *, both: bool, timeout: float, say: Say) -> Look:
    """The same in a process of its own.

    Raises:
        ConfigError: `make_env` cannot be sent there.
        EnvError: The environment raised, hangs, or ended its process.
        DreamfleetError: It cannot be made as it was asked for.
    """
    # What names code of the person's is unpickled there as a part of the constructor.
    make = pickled("the environment", make_env)
    found, output = run_watched(
        cloudpickle.dumps(partial(_look, make=make, both=both)),
        timeout=timeout,
        setting="env_timeout",
        say=say,
    )
    spaces = {key: spaces_from_json(found[key]) for key in ("obs_space", "act_space")}
    return Look(**{**found, **spaces, "output": output})


def _look(person: Person, make: bytes, both: bool) -> dict[str, Any]:
    """What the other process does."""
    call = "constructor"

    def tell(name: Any, done: int, steps: int) -> None:
        nonlocal call
        call = name
        person.tell(name, done, steps)

    try:
        tell("constructor", 0, 1)
        look = look_at_environments(cloudpickle.loads(make), both=both, tell=tell)
    except DreamfleetError as error:
        if error.__cause__ is not None and isinstance(error, EnvError):
            person.say(own_traceback(error.__cause__))
        raise
    except (Exception, SystemExit) as error:
        person.say(own_traceback(error))
        where = "The constructor" if call == "constructor" else f"{call}()"
        what = f"{where} raised {type(error).__name__}: {error}".rstrip(".")
        raise EnvError(f"{what}. Fix it; check-env tells more about an environment.") from error
    spaces = {"obs_space": look.obs_space, "act_space": look.act_space}
    return {**look._asdict(), **{key: spaces_to_json(value) for key, value in spaces.items()}}
