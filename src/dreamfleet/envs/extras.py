"""Packages that only some tasks need."""

from __future__ import annotations

import importlib
from types import ModuleType

from dreamfleet.envs.errors import MissingExtraError


def need(module: str, suite: str, *, extra: str | None) -> ModuleType:
    """Import a suite's package, or say in one sentence how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = f"dreamfleet[{extra}]" if extra else "dreamfleet"
        raise MissingExtraError(
            f"Tasks of {suite}: need the Python package {error.name}: pip install '{package}'"
        ) from error
