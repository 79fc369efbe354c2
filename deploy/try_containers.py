#!/usr/bin/env python3
"""Run what Dockerfile and compose.yaml say, without Docker, in a Debian root from debootstrap.

Debian with its own Python stands in for the image that the Dockerfile starts from. Every RUN, COPY,
ENV, WORKDIR and USER is done in that root as Docker would. Then the container's command trains as
the container's user until its health check succeeds, and is stopped. At last every service of
compose.yaml runs in that root, with an address, a host name and volumes of its own, until a short
run has made its steps. Needs Linux, root, debootstrap and PyYAML; leaves nothing behind:

    sudo .venv/bin/python deploy/try_containers.py [--build-arg NAME=VALUE ...] [--mount PATH ...]

`--mount` shows a path of this machine inside, which a pip with a mirror may need, and variables
that begin with PIP_ are passed on.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parents[1]
SUITE = "bookworm"
PACKAGES = "python3,python3-pip,ca-certificates"
SHORT = "--task bundled:dummy --agent random --eval-episodes 0"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET


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

    def words(self, command: list[str]) -> list[str]:
        """What starts a program in the container."""
        names = {**self.arguments, **self.environment, "HOME": "/root"}
        if self.user != "0:0":
            names["HOME"] = "/home/dreamfleet"
        passed = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        # Debian asks whether its own Python may be written to, the image of Python does not.
        names = {**passed, "PIP_BREAK_SYSTEM_PACKAGES": "1", **names}
        words = ["chroot", f"--userspec={self.user}", str(self.path), "/usr/bin/env", "-i"]
        words += ["-C", self.directory, *(f"{key}={value}" for key, value in names.items())]
        return [*words, *command]

    def run(self, command: list[str], **options: Any) -> int:
        return subprocess.call(self.words(command), **options)

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


def train(root: Root, entry: list[str], check: list[str]) -> None:
    """The container's entry point with a run that is stopped once it is healthy."""
    train = f"train --logdir /runs/run --steps 0 {SHORT}".split()
    run = subprocess.Popen(root.words([*entry, *train]))
    try:
        began = time.monotonic()
        while root.run(check, stderr=subprocess.DEVNULL):
            if run.poll() is not None or time.monotonic() > began + 180:
                sys.exit("The health check does not succeed.")
            time.sleep(1)
        say(f"healthy after {time.monotonic() - began:.0f} s; docker stop")
        run.terminate()
        if run.wait(120) != 130:
            sys.exit(f"The container ended with code {run.returncode}.")
    finally:
        run.kill()
    if not root.run(check):
        sys.exit("The health check succeeds although the run has ended.")
    (saved,) = (root.path / "runs" / "run" / "ckpt" / "agent").iterdir()
    say(f"saved {saved.name}, which belongs to user {saved.stat().st_uid}")


class Services:
    """The containers of compose.yaml, each with an address and a host name of its own."""

    def __init__(self, root: Root, entry: list[str]) -> None:
        self._root, self._entry = root, entry
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        shutil.rmtree(root.path / "runs" / "run")
        self._folders(root.path / "runs" / "run", root.path / "runs" / "run" / "invitations")
        self.volumes = root.path / "volumes"
        self._hosts = "127.0.0.1 localhost\n"
        ctypes.CDLL(None).unshare(NEW_NETWORK)  # with nothing but a loopback of its own
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def start(self, name: str, service: dict[str, Any], more: str = "") -> None:
        """Start a service, as often as it says."""
        text = f"{service['command']} {more}"
        command = shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
        for number in range(1, service.get("scale", 1) + 1):
            host = name if service.get("scale", 1) == 1 else f"{name}-{number}"
            address = f"10.0.0.{len(self.started) + 1}"
            subprocess.run(["ip", "address", "add", f"{address}/24", "dev", "lo"], check=True)
            self._hosts += f"{address} {host}\n"
            (self._root.path / "etc" / "hosts").write_text(self._hosts)
            self.started[host] = subprocess.Popen(self.inside(host, service, command))

    def inside(self, host: str, service: dict[str, Any], command: list[str]) -> list[str]:
        """What runs a command of the entry point in the container of a service."""
        steps = [f"hostname {host}"]
        for line in service["volumes"]:
            name, target, *_ = line.split(":")
            volume = self.volumes / name
            self._folders(volume)
            if target == "/runs":  # Docker fills a new volume with what the image has there
                self._folders(volume / "run", volume / "run" / "invitations")
            steps.append(f"mount --bind {volume} {self._root.path}{target}")
        steps.append(f"exec {shlex.join(self._root.words([*self._entry, *command]))}")
        return ["unshare", "--mount", "--uts", "sh", "-ec", "\n".join(steps)]

    def stop(self) -> None:
        for process in self.started.values():
            process.terminate()
        for process in self.started.values():
            process.wait(120)

    def _folders(self, *paths: Path) -> None:
        subprocess.run(["install", "-d", "-o", "1000", "-g", "1000", *paths], check=True)


def compose(root: Root, entry: list[str]) -> None:
    """A short run of compose.yaml, from its first container to its last."""
    services = yaml.safe_load((HERE / "compose.yaml").read_text())["services"]
    running = Services(root, entry)
    try:
        running.start("agent", services["agent"], f"--steps 3000 {SHORT}")
        check = running.inside("agent", services["agent"], ["status", "/runs/run", "--check"])
        began = time.monotonic()
        while subprocess.call(check, stderr=subprocess.DEVNULL):
            if time.monotonic() > began + 180:
                sys.exit("The agent is not healthy.")
            time.sleep(1)
        for name, service in services.items():
            if name != "agent":
                assert service["depends_on"]["agent"]["condition"] == "service_healthy"
                running.start(name, service)
        for name, process in running.started.items():
            if name != "replay" and process.wait(300):
                sys.exit(f"The container {name} ended with code {process.returncode}.")
    finally:
        running.stop()
    status = json.loads((running.volumes / "runs" / "run" / "status.json").read_text())
    machines = status["run"]["machines"]
    for each in machines:
        say(f"{each['name']} made {each['steps']} steps")
    if len(machines) != 2 or not all(each["steps"] for each in machines):
        sys.exit("Not all environment machines took part.")


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run Dockerfile and compose.yaml.")
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
    say(f"debootstrap {SUITE} with {PACKAGES}")
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
        say(f"{name} {arguments}")
        said[name] = arguments
        root.do(name, arguments)
    entry = json.loads(said["ENTRYPOINT"])
    train(root, entry, json.loads(said["HEALTHCHECK"].partition("CMD ")[2]))
    compose(root, entry)
    size = subprocess.check_output(["du", "-sh", root.path / "usr" / "local"], text=True).split()[0]
    say(f"everything worked; the image would add {size} to that of Python")


if __name__ == "__main__":
    main()
