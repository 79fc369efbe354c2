"""The root of every error Dreamfleet raises on purpose.

    DreamfleetError
    ├── ConfigError       a setting that cannot work; the message names it and the fix
    └── one subtree a layer, drawn in its own `errors.py`

Whoever wants to show a clean sentence instead of a traceback catches `DreamfleetError`: its
message is written for the person, says what is wrong and what to do about it. Anything else that
escapes is a bug.
"""

import importlib.util
import shutil
import sys
from pathlib import Path


class DreamfleetError(Exception):
    """Something a person can understand and fix."""


class ConfigError(DreamfleetError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


def install_command(extra: str) -> str:
    """The command that adds an extra of this package to the interpreter that is running.

    Who runs `.venv/bin/dreamfleet` without activating .venv has another pip on the PATH, which
    would install into another place.
    """
    pip = shutil.which("pip")
    ours = pip is not None and Path(pip).parent == Path(sys.executable).parent
    # Without a pip here, whoever made this environment knows what to say instead.
    through = "" if ours or importlib.util.find_spec("pip") is None else f"{sys.executable} -m "
    return f"{through}pip install 'dreamfleet[{extra}]'"
