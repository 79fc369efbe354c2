"""What a run needs to know of its environment before it starts.

The environment is tried in a child process, where it may hang, crash or print; with the serial
launcher in this process, for a debugger.
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
from dreamfleet.envs.diagnose import ONLY_ONE, Tell, different_spaces, try_out
from dreamfleet.errors import DreamfleetError
from dreamfleet.fleet.isolated import Reporter, Say, run_isolated
from dreamfleet.roles.runtime import pickled
from dreamfleet.spaces import Space, SpaceError, spaces_from_json, spaces_to_json

_SPACES = ("obs_space", "act_space")


class EnvProbe(NamedTuple):
    """The spaces of an environment, and what else was found when it was made."""

    obs_space: Mapping[str, Space]
    act_space: Mapping[str, Space]
    bytes: int = 0
    """Memory that the first one of a process takes, with the code that it loads."""
    further_bytes: int = 0
    """Memory that another one takes."""
    notes: Sequence[str] = ()
    """What was recognised or assumed, a sentence each."""
    log_info: Sequence[str] = ()
    """Names in its `info` that ask to be logged."""
    output: str = ""
    """What it printed."""

    @property
    def spaces(self) -> tuple[Mapping[str, Space], Mapping[str, Space]]:
        """Of observations and of actions."""
        return self.obs_space, self.act_space


def probe_env(
    make_env: Callable[[int], Any],
    *,
    both: bool,
    number: int = 0,
    tell: Tell = lambda *_: None,
    second: Callable[[], EnvProbe] | None = None,
) -> EnvProbe:
    """Make an environment, reset it, take one step, and close it.

    Args:
        make_env: Called with the number of the environment.
        both: Probe a second one meanwhile, as the run will have several.
        number: Of the environment.
        tell: Called before each call of the environment.
        second: Probes the second one; None for in this process.

    Raises:
        EnvError: It breaks the contract, or there can be no second one.
        SpaceError: A space and a value disagree, or the two environments have different spaces.
    """
    me = psutil.Process()
    before = me.memory_info().rss
    tell("constructor", number, 0)
    env = make_env(number)
    try:
        try_out(env, tell)
        taken = max(0, me.memory_info().rss - before)
        notes, names = list(getattr(env, "notes", ())), tuple(getattr(env, "unlogged", ()))
        probe = EnvProbe(env.obs_space, env.act_space, taken, 0, notes, names)
        if both:
            here = partial(probe_env, make_env, both=False, number=1, tell=tell)
            probe = probe._replace(further_bytes=_probe_second(probe, second or here).bytes)
    except BaseException:
        with suppress(Exception):  # the first error counts
            env.close()
        raise
    tell("close", number, 0)
    env.close()
    return probe


def _probe_second(first: EnvProbe, probe: Callable[[], EnvProbe]) -> EnvProbe:
    """Probe a second environment while the first one exists."""
    try:
        second = probe()
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, DreamfleetError) else repr(error)
        raise EnvError(
            f"A second environment failed beside the first: {what.rstrip('.')}. {ONLY_ONE}"
        ) from error
    if different := different_spaces(first[:2], second[:2]):
        raise SpaceError(different)
    return second


def probe_in_subprocess(
    make_env: Callable[[int], Any] | bytes,
    *,
    both: bool,
    timeout: float,
    say: Say,
    apart: bool = False,
    number: int = 0,
) -> EnvProbe:
    """Do the same in a child process.

    Args:
        make_env: Called with the number of the environment; or that, pickled.
        both: See `probe_env`, as `number`.
        timeout: Seconds that a call of the environment may take; 0 for no timeout.
        say: Takes lines to print.
        apart: Whether the second one has a process of its own, too.

    Raises:
        ConfigError: `make_env` cannot be pickled.
        EnvError: The environment raised, hangs, or ended its process.
        DreamfleetError: It cannot be made as configured.
    """
    # Pickled by itself, so that it is unpickled as a part of the constructor: that imports user
    # code.
    make = make_env if isinstance(make_env, bytes) else pickled("the environment", make_env)

    def child(reporter: Reporter) -> dict[str, Any]:
        def second() -> EnvProbe:
            reporter.call(None)  # that process has timeouts of its own
            found = probe_in_subprocess(
                make, both=False, timeout=timeout, say=reporter.say, number=1
            )
            sys.stdout.write(found.output)
            return found

        reporter.call("constructor", number)
        beside = second if apart else None
        found = probe_env(
            cloudpickle.loads(make), both=both, number=number, tell=reporter.call, second=beside
        )
        return {**found._asdict(), **{key: spaces_to_json(getattr(found, key)) for key in _SPACES}}

    found, output = run_isolated(child, timeout=timeout, setting="env_timeout", say=say)
    spaces = {key: spaces_from_json(found[key]) for key in _SPACES}
    return EnvProbe(**{**found, **spaces, "output": output})
