"""Typed signatures: the arguments of a call are checked against the annotations of its method.

Annotations are those that msgspec knows, with the bounds of `msgspec.Meta`, and arrays with their
dtype. A parameter without an annotation takes anything.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from dreamfleet.transport.errors import ArgumentError

_PLACE = re.compile(r" - at `\$\[(\d+)\](.*)`$")


class Parameters:
    """What a method takes.

    Args:
        method: Its name, shown in errors.
        function: Its function. One without a signature, or with `*args`, takes anything.
        skipped: Parameters at the front that are not sent.
    """

    def __init__(self, method: str, function: Callable[..., Any], skipped: int = 0) -> None:
        self._method = method
        self._struct: type[msgspec.Struct] | None = None
        self._names: list[str] = []
        self._dtypes: list[tuple[int, np.dtype[Any]]] = []
        self._least, self._most = 0, float("inf")
        try:
            found = list(inspect.signature(function, eval_str=True).parameters.values())
        except (TypeError, ValueError):  # some callables have no signature
            return
        if any(each.kind == each.VAR_POSITIONAL for each in found):
            return
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = [each for each in found if each.kind in positional][skipped:]
        self._names = [each.name for each in found]
        self._least = sum(each.default is each.empty for each in found)
        self._most = len(found)
        fields: list[Any] = []
        for index, each in enumerate(found):
            kind = Any if each.annotation is each.empty else each.annotation
            optional = () if each.default is each.empty else (each.default,)
            fields.append((each.name, kind, *optional))
            dtype = get_args(get_args(kind)[1])[0] if get_origin(kind) is np.ndarray else Any
            if dtype is not Any:
                self._dtypes.append((index, np.dtype(dtype)))
        if any(each.annotation is not each.empty for each in found):
            self._struct = msgspec.defstruct(method, fields, array_like=True)
            msgspec.msgpack.Decoder(self._struct)  # raises for what cannot be checked

    def take(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a call, as the method takes them.

        Raises:
            ArgumentError: It does not take them.
        """
        if not self._least <= len(args) <= self._most:
            raise ArgumentError(f"{self._method!r} does not take {len(args)} arguments.")
        if self._struct is None:
            return args
        try:
            taken = msgspec.structs.astuple(msgspec.convert(args, self._struct))
        except msgspec.ValidationError as problem:
            raise ArgumentError(self._sentence(str(problem))) from None
        except Exception as problem:  # msgspec takes an array for something that has keys
            raise ArgumentError(
                f"{self._method!r} does not take these arguments: {problem}."
            ) from None
        for index, dtype in self._dtypes:
            if taken[index].dtype != dtype:
                text = f"Expected dtype {dtype}, got {taken[index].dtype} - at `$[{index}]`"
                raise ArgumentError(self._sentence(text))
        return taken

    def _sentence(self, problem: str) -> str:
        place = _PLACE.search(problem)
        if place is None:
            return f"{self._method!r}: {problem}."
        name = self._names[int(place[1])] + place[2]
        return f"{self._method!r} does not take this {name!r}: {problem[: place.start()]}."
