"""The root of every error Dreamfleet raises on purpose.

    DreamfleetError
    ├── ConfigError        a setting that cannot work; the message names it and the fix
    ├── MissingExtraError  an optional package is not installed; the message holds the command
    ├── MetricsError       scores that cannot be read, or videos that cannot be written
    ├── CheckpointError    in checkpoint.py
    ├── EvaluationError    in evaluation.py: every episode failed
    ├── ExportError        in export.py: a policy that cannot be exported
    ├── HubError           in hub.py: the Hub refuses something, or cannot be reached
    ├── SweepError         in sweep.py: runs of a sweep have failed
    └── one subtree for each other package, shown in its own `errors.py` (`envs` in `base.py`)

A program that shows a clean sentence instead of a traceback catches `DreamfleetError`. Its
message is written for the person: it says what is wrong and what to do about it. Anything else
that escapes is a bug.
"""

import difflib
import importlib.util
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


class DreamfleetError(Exception):
    """Something a person can understand and fix."""


class ConfigError(DreamfleetError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class MissingExtraError(DreamfleetError, ImportError):
    """An optional package that is needed and not installed."""


class MetricsError(DreamfleetError):
    """Scores that cannot be read, or videos that cannot be written."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a sentence about a word that is none of the known ones."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def first_line(error: BaseException) -> str:
    """The beginning of what an error of another package says, for a sentence of ours."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def import_extra(module: str, purpose: str, extra: str, *, hint: str = "") -> ModuleType:
    """Import a package that belongs to an extra of this one.

    Args:
        module: Its name.
        purpose: What needs it, in the plural: it starts the sentence that is raised.
        extra: The extra that installs it.
        hint: What to do instead of installing the extra, where that would not help.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{purpose} need the Python package {error.name}: {hint or install_command(extra)}"
        ) from error


def install_command(extra: str) -> str:
    """The command that adds an extra of this package to the interpreter that is running.

    A person who runs `.venv/bin/dreamfleet` without activating .venv has another pip on the PATH,
    which would install into another place.
    """
    pip = shutil.which("pip")
    ours = pip is not None and Path(pip).parent == Path(sys.executable).parent
    # Without a pip here, the person who made this environment knows what to type instead.
    through = "" if ours or importlib.util.find_spec("pip") is None else f"{sys.executable} -m "
    return f"{through}pip install 'dreamfleet[{extra}]'"
