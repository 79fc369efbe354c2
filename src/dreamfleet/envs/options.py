"""Options of environments, as they are given: is there such a one, and can its value be right?"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from dreamfleet.errors import ConfigError

GENERAL: Mapping[str, Any] = {
    "repeat": int | None,
    "time_limit": int,
    "size": tuple[int, int] | None,
    "restarts": int,
}
"""Options that every task has, and their kinds."""


def check_option(name: str, value: Any, kind: Any, *, least: int | None = None) -> None:
    """Refuse a value that is not of its kind.

    Args:
        name: The option's.
        value: What was given.
        kind: The annotation of the parameter it is for.
        least: What whole numbers may not be below.

    Raises:
        ConfigError: The message says what fits.
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ConfigError(f"{name}={value} does not fit: {_fitting(kind)}.") from None
    numbers = value if isinstance(value, (tuple, list)) else (value,)
    if least is not None and any(number is not None and number < least for number in numbers):
        raise ConfigError(f"{name} is too small: it has to be at least {least}.")


def check_name(owner: str, name: str, own: Collection[str]) -> None:
    """Refuse an option that is neither general nor the task's own, and name the one that was meant.

    Raises:
        ConfigError: There is no such option.
    """
    if name in own:
        return
    known = sorted({*own, *GENERAL})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}."
    raise ConfigError(f"{owner} has no option {name!r}: {hint}")


def _fitting(kind: Any) -> str:
    """What may be given, for a person."""
    inner = [each for each in typing.get_args(kind) if each is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return f"choose from {', '.join(map(str, inner))}"
    if typing.get_origin(kind) is tuple:
        return f"it is {len(inner)} whole numbers, such as [64,64]"
    if inner:
        return _fitting(inner[0])
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return f"it is {words.get(kind, kind)}"
