#!/usr/bin/env python3
"""Run what the Dockerfile says, without Docker: in a Debian root that debootstrap makes.

Debian with its own Python stands in for the image that the Dockerfile starts from. Every RUN, COPY,
ENV, WORKDIR and USER is then done in that root as Docker would. At the end the container's command
trains a short run as the container's user, while its health check is made; after that run has ended
the same check has to fail. Needs root, Linux and debootstrap; leaves nothing behind:

    sudo deploy/try_dockerfile.py [--build-arg NAME=VALUE ...] [--mount PATH ...]

`--mount` shows a path of this machine inside, which a pip with a mirror may need, and variables
that begin with PIP_ are passed on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SUITE = "bookworm"
PACKAGES = "python3,python3-pip,ca-certificates"
TRAIN = "train --logdir /runs/run --task bundled:dummy --agent random --steps 0 --eval-episodes 0"


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile, each with its arguments in one line."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if line.strip():
            name, _, arguments = line.strip().partition(" ")
            yield name.upper(), arguments.strip()


class Root:
    """A directory that stands for a container, and the state that instructions leave behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.user = "0:0"
        self.directory = "/"
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.arguments: dict[str, str] = {}

    def substitute(self, text: str) -> str:
        known = {**self.arguments, **self.environment}
        return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), text)

    def start(self, command: list[str], **options: object) -> subprocess.Popen[str]:
        """A program in the container."""
        names = {**self.arguments, **self.environment, "HOME": "/root"}
        if self.user != "0:0":
            names["HOME"] = "/home/dreamfleet"
        passed = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        # Debian asks whether its own Python may be written to, the image of Python does not.
        names = {**passed, "PIP_BREAK_SYSTEM_PACKAGES": "1", **names}
        words = ["chroot", f"--userspec={self.user}", str(self.path), "/usr/bin/env", "-i"]
        words += ["-C", self.directory, *(f"{key}={value}" for key, value in names.items())]
        return subprocess.Popen([*words, *command], text=True, **options)  # type: ignore[call-overload]

    def run(self, command: list[str]) -> int:
        return self.start(command).wait()

    def do(self, name: str, arguments: str) -> None:
        """One instruction."""
        if name == "ARG":
            key, _, default = arguments.partition("=")
            self.arguments.setdefault(key, default.strip('"'))
        elif name == "ENV":
            pairs = (word.partition("=") for word in shlex.split(self.substitute(arguments)))
            self.environment |= {key: value for key, _, value in pairs}
        elif name == "WORKDIR":
            self.directory = self.substitute(arguments)
            inside = self.path / self.directory.lstrip("/")
            inside.mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            self.user = arguments
        elif name == "COPY":
            *sources, target = shlex.split(arguments)
            inside = self.path / str(Path(self.directory, target)).lstrip("/")
            for source in sources:
                if (HERE / source).is_dir():
                    ignore = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(HERE / source, inside, dirs_exist_ok=True, ignore=ignore)
                else:
                    into = inside / Path(source).name if target.endswith("/") else inside
                    into.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(HERE / source, into)
        elif name == "RUN":
            if self.run(["/bin/sh", "-c", arguments]):
                sys.exit(f"This failed: RUN {arguments}")
        elif name not in ("FROM", "ENTRYPOINT", "CMD", "HEALTHCHECK"):
            sys.exit(f"This script does not know {name}.")


def train(root: Root, said: Mapping[str, str]) -> None:
    """The container's entry point with a short run, and its health check."""
    entry = json.loads(said["ENTRYPOINT"])
    check = json.loads(said["HEALTHCHECK"].partition("CMD ")[2])
    run = root.start([*entry, *shlex.split(TRAIN)])
    try:
        before = time.monotonic()
        while root.start(check, stderr=subprocess.DEVNULL).wait():
            if run.poll() is not None or time.monotonic() > before + 180:
                sys.exit("The health check does not succeed.")
            time.sleep(1)
        print(f"== healthy after {time.monotonic() - before:.0f} s; stopping it", flush=True)
        run.terminate()  # env, which has become the entry point
        if run.wait(120) != 130:
            sys.exit(f"The container ended with code {run.returncode}.")
    finally:
        run.kill()
    if not root.run(check):
        sys.exit("The health check succeeds although the run has ended.")
    (saved,) = (root.path / "runs" / "run" / "ckpt" / "agent").iterdir()
    print(f"== saved {saved.name}, which belongs to user {saved.stat().st_uid}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the Dockerfile's steps in a Debian root.")
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("--mount", action="append", default=[])
    options = parser.parse_args()
    if os.environ.get("TRY_INSIDE") is None:  # mounts, and whatever is still running, end with it
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        place = tempfile.mkdtemp()
        try:
            again = {**os.environ, "TRY_INSIDE": place}
            sys.exit(subprocess.call([*spaces, sys.executable, *sys.argv], env=again))
        finally:
            shutil.rmtree(place)
    root = Root(Path(os.environ["TRY_INSIDE"]))
    root.path.chmod(0o755)
    print(f"== debootstrap {SUITE} with {PACKAGES}", flush=True)
    made = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root.path)]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    (root.path / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
    subprocess.run(["mount", "-t", "proc", "proc", root.path / "proc"], check=True)
    subprocess.run(["mount", "--rbind", "/dev", root.path / "dev"], check=True)
    shutil.copy("/etc/resolv.conf", root.path / "etc" / "resolv.conf")
    for path in options.mount:
        inside = root.path / path.lstrip("/")
        if Path(path).is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.touch()
        subprocess.run(["mount", "--bind", "--read-only", path, inside], check=True)
    root.arguments = dict(pair.split("=", 1) for pair in options.build_arg)
    said = {}
    for name, arguments in instructions((HERE / "Dockerfile").read_text()):
        print(f"== {name} {arguments}", flush=True)
        said[name] = arguments
        root.do(name, arguments)
    train(root, said)
    size = subprocess.check_output(["du", "-sh", root.path / "usr" / "local"], text=True).split()[0]
    print(f"== everything worked; the image would add {size} to that of Python", flush=True)


if __name__ == "__main__":
    main()
