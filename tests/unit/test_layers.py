"""Imports point downward only, and the heavy ones stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dreamfleet

SOURCE = Path(dreamfleet.__file__).parent

# Top to bottom. A module may import from its own layer's package and from lower layers.
LAYERS = [
    ["cli"],
    ["view"],
    ["training"],
    ["display", "hub", "sweep"],
    ["evaluation"],
    ["parallel"],
    ["fleet"],
    ["roles"],
    ["dream"],
    ["resuming"],
    ["offline", "plotting"],
    ["datasets"],
    ["policy"],
    ["export"],
    ["presets"],
    ["config"],
    ["trust"],
    ["agents", "replay", "metrics"],
    ["envs"],
    ["transport"],
    ["checkpoint", "clock", "masks"],
    ["spaces"],
    ["files", "formatting", "memory", "settings", "statistics"],
    ["errors"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_packages(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
            if node.module == "dreamfleet":
                names |= {f"dreamfleet.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("dreamfleet.")}


def violations(package: str, source: str) -> list[str]:
    return [
        f"{package} imports {target}"
        for target in sorted(imported_packages(source))
        if target in RANK and target != package and RANK[target] <= RANK[package]
    ]


def modules() -> list[Path]:
    return [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path: Path) -> None:
    package = package_of(path)
    assert package in RANK, f"{package} has no layer: add it to LAYERS and to ARCHITECTURE.md"
    assert violations(package, path.read_text()) == []


def test_the_rule_catches_an_upward_import() -> None:
    assert violations("transport", "from dreamfleet.replay import Replay") != []
    assert violations("replay", "from dreamfleet.agents import Dreamer") != []
    assert violations("errors", "import dreamfleet.spaces") != []
    assert violations("replay", "from dreamfleet.transport import Client") == []


ROLES = ("actor", "learner", "replay", "logger", "env")


@pytest.mark.parametrize("role", ROLES)
def test_roles_import_no_role(role: str) -> None:
    tree = ast.parse((SOURCE / "roles" / f"{role}.py").read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not {f"dreamfleet.roles.{other}" for other in ROLES} & set(modules)


NO_JAX = """
import sys
import dreamfleet.transport, dreamfleet.replay, dreamfleet.envs, dreamfleet.metrics
import dreamfleet.checkpoint, dreamfleet.roles, dreamfleet.parallel, dreamfleet.presets
from dreamfleet.agents import DreamerConfig, RandomAgent, find_agent, size_preset
kind = find_agent("dreamer")
kind.stored_space({}, {}, kind.config())
sys.exit("jax" in sys.modules)
"""


def test_light_layers_never_import_jax() -> None:
    """Environment, replay and logger processes start quickly and stay small."""
    assert subprocess.run([sys.executable, "-c", NO_JAX], check=False).returncode == 0
