"""Packages that only some tasks need."""

from __future__ import annotations

import importlib
from types import ModuleType

from dreamfleet.envs.errors import MissingExtraError
from dreamfleet.errors import install_command


def need(module: str, suite: str, *, extra: str | None) -> ModuleType:
    """Import a suite's package, or say in one sentence how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        command = install_command(extra) if extra else "pip install dreamfleet"
        raise MissingExtraError(
            f"Tasks of {suite}: need the Python package {error.name}: {command}"
        ) from error
