"""A trained world model to play with, and the real environment beside it."""

from dreamfleet.dream.dream import Dream, Imagined
from dreamfleet.dream.reality import Real, Reality

__all__ = ["Dream", "Imagined", "Real", "Reality"]
