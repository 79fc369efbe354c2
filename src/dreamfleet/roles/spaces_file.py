"""The observations and actions of a run, as its directory keeps them.

Servers check by them what they are sent, an agent that is started by hand is made for them, and
machines that join are told them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write
from dreamfleet.spaces import Space, spaces_from_json, spaces_to_json

log = logging.getLogger(__name__)

SPACES_FILE = "spaces.json"

Spaces = Mapping[str, Space]


def write_spaces(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> None:
    """Keep the spaces in the run's directory."""
    plain = {"obs_space": spaces_to_json(obs_space), "act_space": spaces_to_json(act_space)}
    atomic_write(config.logdir / SPACES_FILE, json.dumps({**_environment_of(config), **plain}))


def read_spaces(config: RunConfig, directory: Path) -> tuple[Spaces, Spaces] | None:
    """The spaces that were kept there; None if there are none, or those of another task."""
    try:
        plain = json.loads((directory / SPACES_FILE).read_text())
        if any(plain[key] != value for key, value in _environment_of(config).items()):
            return None
        return spaces_from_json(plain["obs_space"]), spaces_from_json(plain["act_space"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        log.debug("The spaces in %s cannot be read: %r", directory, error)
        return None


def _environment_of(config: RunConfig) -> dict[str, Any]:
    """What says which environment it is, as JSON has it."""
    plain = json.loads(config.to_json())
    return {"task": plain["task"], "env_options": plain["env_options"]}
