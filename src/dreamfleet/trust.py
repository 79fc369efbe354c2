"""The one gate for code that a file names.

The `config.json` of a downloaded run, the blueprint of a checkpoint, a file of settings and the
message of another machine can all name code: environments, agents, networks, outputs. Importing it
runs it. What the user types or passes from Python is trusted; what a file says is not, unless the
user names the same setting again or says `--trust`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from dreamfleet.errors import ConfigError
from dreamfleet.settings import is_under

Trust = bool | str | Collection[str]
"""Whether code that a file names may be imported: all of it, none, or what is named here."""


class CodeRef(NamedTuple):
    """Code outside of this package, and the setting that names it."""

    path: str
    name: str
    given: str = ""
    """What is typed after the name, such as =0.1."""


def code_in(values: Iterable[tuple[str, Any]]) -> list[CodeRef]:
    """The code outside of this package that settings name, by their paths and values."""
    found = []
    for path, value in values:
        if isinstance(value, dict):
            refs = [CodeRef(path, str(name), f"={each}") for name, each in value.items()]
        else:
            names = value if isinstance(value, (tuple, list)) else (value,)
            refs = [CodeRef(path, str(name)) for name in names]
        found += [ref for ref in refs if _is_outside(path, ref.name)]
    return found


def _is_outside(path: str, name: str) -> bool:
    if path != "task":
        return ":" in name  # no name of this package has one
    from dreamfleet.envs.registry import is_bundled  # not every process needs environments

    return not is_bundled(name)


def admit(
    source: Path | str,
    code: Iterable[CodeRef],
    *,
    trust: Trust = False,
    stated: Collection[str] = (),
    may_state: Collection[str] | None = None,
) -> None:
    """Refuse code that only a file names.

    Args:
        source: The file, run or machine that names it.
        code: What it names.
        trust: What the user trusts.
        stated: Paths of the settings that the user has given; a group stands for all in it.
        may_state: Paths that the user may give here, for the message; None for all.

    Raises:
        ConfigError: The user has neither named nor trusted it. The message says how to.
    """
    trusted = (trust,) if isinstance(trust, str) else trust
    refused = [
        ref
        for ref in code
        if not (trusted if isinstance(trusted, bool) else ref.name in trusted)
        and not is_under(ref.path, stated)
    ]
    if not refused:
        return
    from dreamfleet.envs.registry import PROGRAM, only_there

    for ref in refused:
        if ref.path == "task" and ref.name.startswith(PROGRAM):  # trust would not find it either
            raise ConfigError(only_there(ref.name))
    fix = "--trust (trust=True in Python)"
    if may_state is None or {ref.path for ref in refused} <= set(may_state):
        flags = " ".join(f"--{p.replace('_', '-')} {name}{given}" for p, name, given in refused)
        fix = f"{flags}, or {fix}"
    raise ConfigError(
        f"{source} names {' and '.join(ref.name for ref in refused)}, which is not part of "
        f"Dreamfleet. Code that a file or another machine names is imported only if you name it "
        f"too: add {fix}."
    )
