"""The wheel builds, and works where there is no checkout; the locks say nothing of hosts."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


LOCKS = ("base.txt", "build.txt", "dev.txt")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `make wheel` does in a new clone."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "locks", clone / "locks")
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "wheel"],
        cwd=clone, check=True, capture_output=True, text=True,
        # The tests may have been started by make.
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(commands: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    _, *words, directory = shlex.split(commands[-1])
    assert directory == "dist"
    subprocess.run([sys.executable, *words, out], cwd=ROOT, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


def test_a_wheel_needs_neither_developer_tools_nor_jax(commands: list[str]) -> None:
    """They take minutes to install, a wheel seconds to build."""
    assert set(re.findall(r"locks/\w+\.txt", "\n".join(commands))) == {"locks/build.txt"}


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {
        str(path.relative_to(source))
        for path in (source / "dreamfleet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == files | {"dreamfleet/metrics/glossary.md"}
    assert "dreamfleet/py.typed" in inside


def test_the_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Installed beside the dependencies of this environment, but not beside its checkout."""
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        "import dreamfleet, pathlib, sys\n"
        "from dreamfleet.cli import main\n"
        "from dreamfleet.transport import Client, Server\n"
        f"assert pathlib.Path(dreamfleet.__file__).is_relative_to({str(target)!r})\n"
        "server = Server('ipc://{auto}')\n"
        "server.bind('double', lambda x: 2 * x)\n"
        "with server, Client(server.address) as client:\n"
        "    assert client.double(21).result(20) == 42\n"
        "sys.exit(main(['--version']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dreamfleet ")


@pytest.mark.parametrize("name", LOCKS)
def test_locks_pin_every_package_with_hashes_and_name_no_host(name: str) -> None:
    text = (ROOT / "locks" / name).read_text()
    entries = re.findall(r"^([a-z0-9][^\s=]*)==\S+.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    blocks = re.split(r"\n(?=[a-z0-9])", text)[1:]
    assert len(blocks) >= 5
    assert all("--hash=sha256:" in block for block in blocks)
    assert len(entries) == len(blocks)
    assert "://" not in text


@pytest.mark.parametrize("name", LOCKS)
def test_locks_name_everything_that_their_packages_need(name: str) -> None:
    """They are installed without looking for what else is needed. pip before 23.3 looks for a
    package with an extra on its own, takes the newest one, and refuses it for its hash."""
    for recipe in ("Makefile", "Dockerfile"):
        for line in re.findall(r".*--require-hashes.*", (ROOT / recipe).read_text()):
            assert "--no-deps" in line
    text = (ROOT / "locks" / name).read_text()
    locked = set(re.findall(r"^([a-z0-9][^\s=\[]*)(?:\[.+\])?==", text, re.MULTILINE))
    left, seen = [(package, "") for package in locked], set[tuple[str, str]]()
    while left:
        package, extra = left.pop()
        if (package, extra) in seen:
            continue
        seen.add((package, extra))
        try:
            needs = metadata.requires(package) or []
        except metadata.PackageNotFoundError:  # one of another platform
            continue
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                other = canonicalize_name(need.name)
                assert other in locked, f"{package} needs {need}"
                left += [(other, more) for more in need.extras]
    assert len(seen) >= len(locked) >= 5


def test_a_checkout_brings_the_pip_that_messages_speak_of() -> None:
    assert re.search(r"^pip==", (ROOT / "locks" / "base.txt").read_text(), re.MULTILINE)
