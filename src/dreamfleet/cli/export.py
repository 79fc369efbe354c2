"""`dreamfleet export LOGDIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dreamfleet.cli.console import say
from dreamfleet.policy import Policy, run_of


def export(
    logdir: Path,
    /,
    format: Literal["onnx", "stablehlo"] = "onnx",  # noqa: A002 - the option's name
    out: Path | None = None,
    latent: Literal["mode", "sample"] = "sample",
    actions: Literal["mode", "sample"] = "sample",
    best: bool = False,
    task: str | None = None,
    trust: bool = False,
) -> None:
    """Write a trained policy as a graph for programs without Dreamfleet.

    The graph is one call of the recurrent policy for any number of rows. It takes observations,
    the state and, where something is sampled, random numbers. It gives actions in the environment's
    units and the next state. policy.json beside it names everything. The graph is compared with the
    policy before it is written.

    Args:
        logdir: A run's directory, or one checkpoint.
        format: Onnx for onnxruntime and others; stablehlo for XLA and jax.export.
        out: The folder to write; without it, export in the run's directory.
        latent: Sample the latent state, as in training, or take its mode.
        actions: Sample actions, as in evaluation, or take the mode of the policy.
        best: Take the checkpoint with the best evaluation score instead of the newest.
        task: Another environment than the one that the run names.
        trust: Import your own environment or networks that the run names.
    """
    policy = Policy.load(logdir, "best" if best else "latest", trust=trust)
    folder = out or run_of(logdir) / "export"
    contract = policy.export(
        folder, format=format, latent=latent, actions=actions, env=task, trust=trust
    )
    for report in contract["parity"]["batches"]:
        ms = report["milliseconds"]
        say(
            f"{report['batch']:>3} rows   {report['one_step']:.1e} off in one step, "
            f"{report['free_run']:.1e} in {report['steps']} steps; "
            f"{ms['exported']:.2f} ms, policy {ms['policy']:.2f} ms"
        )
    say(f"{contract['file']} and policy.json are in {folder}")
