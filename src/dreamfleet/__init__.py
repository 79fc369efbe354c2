"""Dreamfleet trains DreamerV3 with a fleet of processes."""

from importlib.metadata import version

from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.spaces import Space

__version__ = version("dreamfleet")

__all__ = ["ConfigError", "DreamfleetError", "Space", "__version__"]
