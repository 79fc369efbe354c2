"""Objects that a setting names as `package.module:name`."""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter
from pathlib import Path, PurePath
from types import ModuleType

from dreamfleet.errors import ConfigError, did_you_mean


def load_object(path: str) -> object:
    """What `package.module:name` names; modules of the current directory are found as well.

    Raises:
        ConfigError: There is no such module or no such name in it, or it cannot be imported.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{path!r} names no object: write package.module:name.")
    loaded = load_module(module, path)
    try:
        found: object = attrgetter(name)(loaded)
    except AttributeError:
        hint = did_you_mean(name, vars(loaded), "check the spelling.")
        raise ConfigError(f"The module {module!r} has no {name!r}: {hint}") from None
    return found


def load_module(module: str, path: str) -> ModuleType:
    """The module that is part of `path`, also from the current directory.

    Raises:
        ConfigError: There is no such module, or it cannot be imported.
    """
    if module.endswith(".py") or "/" in module:
        file, name = PurePath(module.removesuffix(".py")), path.rpartition(":")[2]
        dotted = file.name if file.is_absolute() else ".".join(file.parts)
        raise ConfigError(f"{path!r} names a file: drop .py and write {dotted}:{name}.")
    # Installed commands, unlike `python file.py`, do not look into the current directory. It goes
    # last, so that nothing installed is shadowed.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that exists but imports one that does not has another problem.
        if not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{module} cannot be imported: {error}; install it.") from error
        raise ConfigError(
            f"There is no module {module!r}, which {path!r} names: install it, or start from the "
            "directory that holds it."
        ) from None
