"""Commands that are thin: a function each, which calls a part of the package and prints.

What only one of them needs is imported when it is called.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from dreamfleet.cli.console import note, out, say, write
from dreamfleet.config import read_config, read_config_file
from dreamfleet.errors import ConfigError, DreamfleetError, import_extra
from dreamfleet.settings import AboveZero, Count, CountOrZero, Mark, ZeroOrMore

_WAIT_SECONDS, _STATUS_SECONDS, _END_SECONDS = 3.0, 10.0, 10.0


def eval(  # noqa: A001 - the command's name
    logdir: Path,
    /,
    episodes: Count = 10,
    greedy: bool = False,
    video: Path | None = None,
    json: bool = False,
    keep: bool = True,
    seed: CountOrZero = 0,
    fps: AboveZero = 20.0,
    agent: str | None = None,
    best: bool = False,
    envs: CountOrZero = 0,
    max_steps: CountOrZero = 0,
    task: str | None = None,
    trust: bool = False,
) -> None:
    """Play complete episodes with a trained agent and print their scores.

    The environments are new ones with seeds that training never uses. Actions are sampled from the
    policy, as in training and in the paper; --greedy takes the mode. The newest checkpoint is used;
    the run may still be training.

    Args:
        logdir: A run's directory, or one checkpoint.
        episodes: How many episodes to play.
        greedy: Take the mode of the policy instead of a sample.
        video: Record the first episode to this file, such as play.mp4.
        json: Print one JSON object in a line, with every return; all other lines go to standard
            error.
        keep: Add the result to the run's evaluations.jsonl, which 'view' and 'plot' show.
        seed: Another seed plays other episodes.
        fps: Frames a second of the video.
        agent: Your own agent, as package.module:name.
        best: Take the checkpoint with the best evaluation score instead of the newest.
        envs: Environments that play at the same time; 0 for the run's eval_envs, or envs.
        max_steps: Steps after which an episode is cut short; 0 for the run's eval_max_steps.
        task: Another environment, or the module:name of one that a script defined.
        trust: Import your own environment, agent or networks that the run names.
    """
    from dreamfleet.evaluation import Evaluation, EvaluationInterrupted, evaluate
    from dreamfleet.policy import Policy

    def show(result: Evaluation) -> None:
        if json:
            say(dumps(result.record()))
            return
        say(f"returns        {'  '.join(f'{value:.4g}' for value in result.returns)}")
        say("\n".join([f"mean return    {result.summary()}", *result.notes()]))

    tell = note if json else say
    which: Any = "best" if best else "latest"
    policy = Policy.load(logdir, which, agent=agent, greedy=greedy, trust=trust)
    assert policy.blueprint is not None
    tell(f"{task or policy.blueprint.config.task} after {policy.step:,} steps; {policy.protocol}")
    about: dict[str, Any] = {"logdir": logdir, "kind": "asked" if keep else "", "say": tell}
    about |= {"env": task, "trust": trust, "seed": seed, "video": video, "fps": fps}
    try:
        result = evaluate(policy, episodes=episodes, envs=envs, max_steps=max_steps, **about)
    except EvaluationInterrupted as interrupt:
        found = interrupt.result
        tell(f"Interrupted after {len(found.returns) if found else 0} of {episodes} episodes")
        if found:
            show(found)
        raise
    show(result)
    if result.video_error:
        raise ConfigError(f"No video was recorded: {result.video_error}")
    if video:
        tell(f"video          {video}")


def status(
    logdir: Path,
    /,
    follow: bool = False,
    json: bool = False,
    svg: Path | None = None,
    check: bool = False,
) -> None:
    """Show what a run is doing, also from another terminal.

    Args:
        logdir: The run's directory.
        follow: Repeat until Ctrl-C; without a terminal until the run ends.
        json: Print one JSON object in a line instead of the table.
        svg: Also write the table to this file, as a picture.
        check: Print nothing, and exit with code 1 unless the run is alive and responds: a health
            check for containers.
    """
    from dreamfleet.display import live, picture, picture_svg
    from dreamfleet.fleet.status import Watcher

    watcher = Watcher(logdir, 0.0 if check else math.inf)  # all scores at once
    found = watcher.look(_WAIT_SECONDS)
    if check:
        if found is None or not found.running:
            how = "has not begun" if found is None else f"is {found.state}"
            raise DreamfleetError(f"The run in {logdir} {how}.")
        if found.state != "evaluating" and not found.responding:
            raise DreamfleetError(f"The run in {logdir} runs, but its logger does not respond.")
        return
    if found is None:
        read_config(logdir)  # says what is wrong with it
        raise ConfigError(f"The run in {logdir} has just started: try again in some seconds.")
    if svg:
        write(svg, picture_svg(found))
    if follow and out.is_terminal and not json:
        with live(logdir, out):
            threading.Event().wait()
    while found is not None:
        if json:
            out.print(found.to_json(), markup=False, soft_wrap=True)
        else:
            say(picture(found))
        if not follow or not found.running:
            return
        time.sleep(_STATUS_SECONDS)
        found = watcher.look(_WAIT_SECONDS)


def view(
    folder: Path = Path("runs"),
    /,
    host: str = "127.0.0.1",
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None,
    browser: bool = True,
    trust: bool = False,
) -> None:
    """Serve a page about a run, or a folder of runs, live while they run and afterwards.

    The printed address holds a token, which every request needs. Only this
    machine reaches the page, unless you name another address to listen on.

    Args:
        folder: A run's directory, or a folder of runs.
        host: The address to listen on, such as 0.0.0.0 for all networks.
        port: The port; without one 8765, or another one if that is taken.
        browser: Also open the page in a browser, if there is a terminal.
        trust: Import your own environments, agents or networks that the runs name,
            to dream with them and to evaluate them.
    """
    import_extra("nicegui", "Pages in a browser", "web")
    from dreamfleet.view.app import is_loopback, serve

    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}: name one that holds runs, or a run.")

    def ready(url: str) -> None:
        say(url)
        if not is_loopback(host):
            say("The address gives access to the runs. The connection is not encrypted.")
        say("Ctrl-C ends the page; runs continue.")
        if browser and out.is_terminal:
            webbrowser.open(url)

    serve(folder, host=host, port=port, trust=trust, ready=ready)


@contextmanager
def page_beside(logdir: Path) -> Iterator[None]:
    """A page about a run, by a process that ends with the block, or with this process."""
    from dreamfleet.fleet.preflight import check_place
    from dreamfleet.fleet.tied import tied

    import_extra("nicegui", "Pages in a browser", "web")
    check_place(logdir)
    logdir.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        tied(["dreamfleet.cli", "view", str(logdir), "--no-browser"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        say(f"Page: {url}" if url else "The web page has not started: its process has ended.")
        if url and out.is_terminal:
            webbrowser.open(url)
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


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
    units and the next state. policy.json describes the inputs and outputs. The graph is compared
    with the policy before it is written.

    Args:
        logdir: A run's directory, or one checkpoint.
        format: What to write: onnx for onnxruntime and others, stablehlo for XLA and jax.export.
        out: The folder to write; without it, export in the run's directory.
        latent: Sample the latent state, as in training, or take its mode.
        actions: Sample actions, as in evaluation, or take the mode of the policy.
        best: Take the checkpoint with the best evaluation score instead of the newest.
        task: Another environment than the one that the run names.
        trust: Import your own environment or networks that the run names.
    """
    from dreamfleet.policy import Policy, run_of

    policy = Policy.load(logdir, "best" if best else "latest", trust=trust)
    folder = out or run_of(logdir) / "export"
    contract = policy.export(
        folder, format=format, latent=latent, actions=actions, env=task, trust=trust
    )
    for report in contract["parity"]["batches"]:
        ms = report["milliseconds"]
        say(
            f"{report['batch']:>3} rows   difference {report['one_step']:.1e} in one step, "
            f"{report['free_run']:.1e} in {report['steps']} steps; "
            f"{ms['exported']:.2f} ms a call, policy {ms['policy']:.2f} ms"
        )
    say(f"{contract['file']} and policy.json are in {folder}")


def join(
    url: str,
    /,
    envs: CountOrZero | None = None,
    eval_envs: CountOrZero = 0,
    envs_per_process: Count | None = None,
    task: str | None = None,
    trust: bool = False,
    logdir: Path | None = None,
    patience: ZeroOrMore = 3600.0,
) -> None:
    """Join a run on another machine with environments of this one.

    The run prints the line to type when it is started with --bind. Everything else comes from the
    run. Ctrl-C leaves; when the run is over, this command ends.

    Args:
        url: dreamfleet://HOST:PORT/#KEY, in quotes; a file that holds it; or the run's directory,
            if this machine can read it.
        envs: Environments that collect training data; one if not given, none with --eval-envs.
        eval_envs: Environments for evaluation.
        envs_per_process: Environments that share a process; as in the run if not given.
        task: The run's task, if it is your own (package.module:factory). Code that another machine
            names is imported only if you name it too.
        trust: Import the code that the run names.
        logdir: Directory for the logs of the environments; a temporary one if not given.
        patience: Seconds to wait for a run that no longer answers, until it is resumed.
    """
    from dreamfleet.fleet.joining import Offer
    from dreamfleet.fleet.joining import join as join_run
    from dreamfleet.roles.invitations import find_url

    count = (0 if eval_envs else 1) if envs is None else envs
    if not count + eval_envs:
        raise ConfigError("Join with at least one environment: --envs 1.")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    offer = Offer(count, eval_envs, envs_per_process, task, trust)
    join_run(find_url(url), offer, logdir=logdir, patience=patience, say=say)


def invite(logdir: Path, /, name: str | None = None, revoke: str | None = None) -> None:
    """List the lines that let other machines join a run, make another one, or revoke one.

    It works during the run, and while the run is stopped.

    Args:
        logdir: The run's directory.
        name: Make another line with this name and a key of its own.
        revoke: Make the line of this name invalid. Machines that have joined with it
            are disconnected within seconds.
    """
    from dreamfleet.formatting import clock
    from dreamfleet.roles import invitations as book
    from dreamfleet.transport import Keys

    config = read_config(logdir)
    place = book.read_place(logdir)
    if place is None:
        raise ConfigError(
            f"The run in {logdir} cannot be joined: start it with --bind 0.0.0.0, such as "
            f"'dreamfleet resume {logdir} --bind 0.0.0.0'."
        )
    if revoke is not None:
        book.revoke(logdir, revoke)
        say(f"Revoked {revoke}: machines that joined with it are disconnected.")
    if name is not None:
        # The directory may have been moved, and its key with it.
        own = logdir / "keys"
        keys = Keys.load(own) if own.exists() else config.server_keys
        if keys is None:
            raise ConfigError(f"The run's key {own} is missing: restore it from a copy.")
        say(book.join_line(place, book.invite(logdir, name, keys)))
    if revoke is None and name is None:
        for each in book.invitations(logdir):
            age = f"made {clock(max(0.0, time.time() - each.made))} ago"
            line = f"revoked, {age}" if each.revoked else f"{age}\n  {book.join_line(place, each)}"
            say(f"{each.name}  {line}")
        say(book.ports_line(place))


def role(
    name: Literal["actor", "agent", "env", "evaluator", "logger", "replay"],
    /,
    config: Path | None = None,
    first: int = 0,
    count: int | None = None,
    number: Count = 1,
    shard: int = 0,
    trust: bool = False,
    **settings: Annotated[Any, Mark.PER_ROLE],
) -> None:
    """Run one role of a run by hand: on a second computer, under Slurm or under Kubernetes.

    Every role needs the run's config.json, which 'dreamfleet train' writes, and, if the run uses
    tcp, a copy of its file 'keys', with mode 600. Settings that differ here, such as an address,
    may be changed; each change is printed.

    Args:
        name: agent (acts and learns), actor (acts only; one of several `actors`), env
            (environments), evaluator, logger or replay.
        config: The run's config.json; the one in the logdir if not given.
        first: For env: id of the first environment to start here.
        count: For env: number of environments to start here; all others if not given.
        number: For actor: which actor to start here; actor 0 is part of the agent.
        shard: For replay: which of the replay_shards to start here.
        trust: Import your own code that config.json names, such as an environment.
    """
    from dreamfleet.fleet.factories import factories
    from dreamfleet.fleet.workers import fleet_workers
    from dreamfleet.parallel import parallel_envs
    from dreamfleet.resuming import differences, with_changes
    from dreamfleet.roles.runtime import end_signals
    from dreamfleet.roles.spaces_file import read_spaces

    source: Path | None = config or settings.get("logdir")
    if source is None:
        raise ConfigError("Name the run: --logdir DIR, or --config FILE.")
    before = read_config_file(source) if config else read_config(source)
    args = with_changes(before, settings, trust=trust, source=source, may_state=())
    # Fails here and now if the key cannot be read.
    args.run_keys  # noqa: B018
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    there = source if source.is_dir() else source.parent
    parts = factories(args, spaces=read_spaces(args, there))
    say(f"Running {name} of {args.task}")
    for line in differences(before, args):
        say(line)
    if name == "env":
        ids = range(first, args.all_envs if count is None else first + count)
        parallel_envs(parts.make_env_train, parts.make_env_eval, args, say, ids)
        return
    workers = fleet_workers(parts, replace(args, launcher="local", remote_replay=False))
    functions = {each.name: each.function for each in workers}
    index = {"actor": number, "replay": shard}.get(name, 0)
    if (mine := f"{name}-{index}" if index else name) not in functions:
        raise ConfigError(
            f"The run has no {mine}: it has actors={args.actors}, "
            f"replay_shards={args.replay_shards} and eval_every={args.eval_every}; actors and "
            "shards are numbered from 0."
        )
    # Ctrl-C and a closed terminal end a role as it is ended in a fleet: it saves first.
    for each in set(end_signals()) - {signal.SIGTERM}:
        signal.signal(each, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    functions[mine]()
