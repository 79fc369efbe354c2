"""`__all__` is exactly what a package offers."""

import importlib
import pkgutil
import types

import pytest

import dreamfleet


def public_packages() -> list[str]:
    nested = [f"dreamfleet.{info.name}" for info in pkgutil.iter_modules(dreamfleet.__path__)]
    return [
        name
        for name in ["dreamfleet", *nested]
        if hasattr(importlib.import_module(name), "__all__")
    ]


@pytest.mark.parametrize("name", public_packages())
def test_all_equals_reality(name: str) -> None:
    package = importlib.import_module(name)
    for key in package.__all__:
        getattr(package, key)  # a name looked up on first use becomes part of reality
    assert sorted(package.__all__) == list(package.__all__)
    if not hasattr(package, "__path__"):  # a module with code of its own also imports for itself
        return
    reality = {
        key
        for key, value in vars(package).items()
        if not key.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", name).startswith("dreamfleet")
    }
    assert set(package.__all__) - {"__version__"} == reality
