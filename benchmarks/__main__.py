"""`python -m benchmarks NAME`, or `make bench ARGS='NAME --json F'`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.report import report, split_settings
from dreamfleet.cli.console import complain
from dreamfleet.errors import DreamfleetError

BENCHMARKS = {
    "agent": "Dreamer: train step, policy call, memory, compile time; each size",
    "fleet": "steps/s of a whole fleet, beside vectorised environments that only step",
    "transport": "steps/s and latency of calls between processes, beside portal",
    "replay": "insert, sample, update and reopen; cost per call from 10^4 to 2*10^6 steps",
    "scale": "CPU time of every role, and steps/s with 1 to 1,024 connections",
    "lanes": "steps/s of vectorised environments, beside their bare loop",
    "network": "steps/s behind a network delay, with 1, 2 and 4 lanes",
    "hostile": "steps/s and memory of an encrypted fleet while its servers are attacked",
    "view": "the web page: time to open, what it takes from a run (needs Chromium)",
    "lowering": "operations of every agent program for CUDA and TPU, without a device",
    "soak": "memory, files, sockets and threads of every process while a run trains",
}


def parser() -> argparse.ArgumentParser:
    """One sub-command per benchmark."""
    made = argparse.ArgumentParser(
        prog="benchmarks",
        formatter_class=partial(argparse.HelpFormatter, width=110, max_help_position=14),
        description="Measure on a quiet machine. A ratio is ours to the peer's; above 1 is better.",
    )
    commands = made.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, line in BENCHMARKS.items():
        command = commands.add_parser(name, help=line, description=line)
        command.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
        command.add_argument("--quick", action="store_true", help="only show that it works")
        if name == "agent":
            command.add_argument(
                "--sizes", default="1m", help="such as 1m,12m,25m, or all (default: 1m)"
            )
            command.add_argument("--kind", choices=("vector", "image", "all"), default="all")
            command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        elif name == "soak":
            command.add_argument("logdir", type=Path, help="directory for the run; it must be new")
            command.add_argument("--minutes", type=float, default=60.0)
            command.epilog = "Settings of `dreamfleet train` follow after --, as in -- --envs 8"
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    words, settings = split_settings(sys.argv[1:] if arguments is None else arguments)
    options = vars(parser().parse_args(words))
    name, json = options.pop("name"), options.pop("json")
    if name == "soak":
        options["settings"] = settings
    try:
        report(importlib.import_module(f"benchmarks.{name}").run(**options), json)
    except DreamfleetError as error:
        complain(str(error))
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
