"""Training from Python: what `dreamfleet train` does.

    from dreamfleet import train
    result = train(MyEnv, steps=10_000, dreamer__model="1m")

`configure` gives the configuration that the command line would make of some settings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.checkpoint import Checkpoint, step_of
from dreamfleet.config import RunConfig, read_config
from dreamfleet.display import live, print_line
from dreamfleet.envs.registry import PROGRAM, Task, is_shared, maker_of, name_of
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.evaluation import Evaluation, EvaluationError, EvaluationInterrupted, evaluate, keep
from dreamfleet.fleet.claim import claim_directory
from dreamfleet.fleet.factories import MakeOutput, environment, factories, logger
from dreamfleet.fleet.preflight import preflight
from dreamfleet.fleet.record import record_state
from dreamfleet.fleet.supervisor import Say
from dreamfleet.formatting import clock
from dreamfleet.metrics.evaluations import FILE_NAME as EVALUATIONS
from dreamfleet.metrics.evaluations import evaluation_from, evaluation_metrics, recorded_round
from dreamfleet.metrics.frames import find_encoder
from dreamfleet.metrics.outputs.jsonl import JsonlTail
from dreamfleet.parallel import combined
from dreamfleet.policy import Policy
from dreamfleet.resuming import differences, holds_run, resolve, steps_made, unknown
from dreamfleet.roles.runtime import sigterm_interrupts
from dreamfleet.roles.scaling.hosts import this_host
from dreamfleet.roles.spaces_file import write_spaces
from dreamfleet.settings import takes_settings
from dreamfleet.trust import Trust

log = logging.getLogger(__name__)

OnLog = Callable[[int, dict[str, Any]], object] | None
OnEpisode = Callable[[int, float, int], object] | None
OnCheckpoint = Callable[[int, Path], object] | None


def configure(
    changes: Mapping[str, Any],
    preset: str | None = None,
    *,
    trust: Trust = False,
    say: Say = log.info,
) -> RunConfig:
    """The configuration of a run with some settings changed, as the command makes it.

    A run that exists keeps its last settings; a new one has those of a preset. The
    directory is named after the task, and an offline run takes its task from the first source.

    Args:
        changes: Values by path, such as `{"envs": 4, "dreamer.model": "1m"}`. `env_options` are
            added to those of the run or of the preset.
        preset: Its name; None for the default one.
        trust: Import code outside of this package that the directory of a run names.
        say: Takes a line if the run has other settings than the preset.

    Raises:
        ConfigError: There is no such preset or setting, a value does not fit, or the run names code
            that `changes` do not name again.
    """
    return resolve(changes, preset, trust=trust, say=say)


@takes_settings(RunConfig)
def train(
    config: RunConfig | Task | None = None,
    *,
    env: Task | None = None,
    preset: str | None = None,
    say: Say = print_line,
    display: Callable[[Path], AbstractContextManager[Say]] | None = live,
    on_log: OnLog = None,
    on_episode: OnEpisode = None,
    on_checkpoint: OnCheckpoint = None,
    trust: Trust = False,
    **settings: Any,
) -> Evaluation | None:
    """Train an agent with a fleet of processes until the run ends, then evaluate it.

    The same directory again resumes the run. A script needs no guard around this call: processes do
    not import the program that started them.

    Args:
        config: The run, or its environment alone; None for the preset, or for the run in `logdir`
            if there is one, with the settings that follow.
        env: The environment: a task (`gym:CartPole-v1`, `module:factory`), a class, or a function
            that returns an environment, also one of a script or a notebook; None for the task of
            the configuration.
        preset: The settings to start from; None for the default ones.
        say: Takes lines for the user.
        display: Shows the run in this directory while it trains, and gives what takes the lines
            about progress; None lets `say` take them.
        on_log: Called in this process with the step and the metrics of every entry of
            `metrics.jsonl`, every `log_every` seconds.
        on_episode: The same with the step, score and length of every training episode.
        on_checkpoint: The same with the step and directory of a new checkpoint. An exception in any
            of the three ends the run in order, with a checkpoint, and is raised here;
            `StopTraining` only ends it.
        trust: Import code outside of this package that the directory of a run names. Otherwise name
            it again, such as `agent="my_module:MyAgent"`.
        settings: Those of `RunConfig` by their name, such as `steps=10_000`. Those of the agent are
            `agent_config=DreamerConfig(...)`, or one by one, two underscores for a dot:
            `dreamer__loss__horizon=100`. `outputs` may also hold classes of your own, which are
            made in the logger's process with the run's directory.

    Returns:
        The evaluation at the end; None if `eval_episodes` is 0.

    Raises:
        ConfigError: The run cannot work; nothing was started.
        FleetError: A process failed, and the run ended because of it.
        KeyboardInterrupt: The user ended the run; everything is saved.
    """
    if config is not None and not isinstance(config, RunConfig):
        if env is not None:
            raise ConfigError("Two environments are given: leave one of them out.")
        config, env = None, config
    for name in ("outputs", "offline", "prefill"):
        value = settings.get(name)
        if isinstance(value, (str, Path)) or callable(value):  # one of them
            settings[name] = [value]
    outputs = [each for each in settings.get("outputs", ()) if not isinstance(each, str)]
    if "outputs" in settings:
        settings["outputs"] = [each for each in settings["outputs"] if isinstance(each, str)]
    if objects := [each for each in outputs if not callable(each)]:
        raise ConfigError(
            f"An output is made in the logger's process: pass the class {type(objects[0]).__name__}"
            ", or a function that returns the object, which is called with the run's directory."
        )
    config = _config_of(config, env, preset, settings, trust, say)
    if on_log and "jsonl" not in config.outputs:
        raise ConfigError("on_log reads the output jsonl: add jsonl to outputs.")
    if config.launcher == "ray" and config.hosts != 1:
        if outputs or on_log or on_episode or on_checkpoint:
            raise ConfigError(
                "Callbacks and outputs that are classes do not work with several hosts on Ray: "
                "leave them out, or set hosts=1."
            )
        return _train_on_nodes(config, env, say)
    config = this_host(config)
    maker = _maker(config, env)
    with sigterm_interrupts():  # so that nothing is left behind
        found = preflight(config, partial(environment, config, maker), say)
    for note in found.notes:
        say(note)
    if found.log_info:
        config = _with_logged(config, found.log_info)
    start = time.monotonic()
    result = None
    with claim_directory(config.logdir, say):
        follower = Follower(config.logdir, on_log, on_episode, on_checkpoint)
        if not _is_over(config, say):
            made = vars(factories(config, maker, outputs, found.spaces))
            write_spaces(config, *found.spaces)
            _keep_output(config, found.output)
            try:
                with display(config.logdir) if display else nullcontext(say) as progress:
                    combined(**made, args=config, say=say, progress=progress, tick=follower.poll)
                    follower.poll()
            except StopTraining as reason:
                say(f"The run was ended by a callback. {reason}".strip())
        if config.eval_episodes:
            record_state(config.logdir, "evaluating")
            result = final_evaluation(config, start, say, maker, outputs)
            with suppress(StopTraining):  # there is nothing left to end
                follower.poll()
    if config.profile and (folder := config.logdir / "profile" / "jax").is_dir():
        say(
            f"{folder} holds a profile of a few training steps: https://ui.perfetto.dev opens its "
            f"perfetto_trace.json.gz; after 'pip install xprof', 'xprof --logdir {folder}' shows "
            "all of it."
        )
    say(f"Took {clock(time.monotonic() - start)}. Results: {config.logdir}")
    return result


def _with_logged(config: RunConfig, names: Sequence[str]) -> RunConfig:
    """Declare names of `info` in all environments of the run, whose keys have to be the same."""
    given = config.env_options.get("log_info") or ()
    log_info = (*((given,) if isinstance(given, str) else given), *names)
    return config.changed({"env_options": {**config.env_options, "log_info": log_info}})


def _train_on_nodes(config: RunConfig, env: Task | None, say: Say) -> Evaluation | None:
    """Train on the nodes of a Ray cluster, each of which is a host; returns what host 0 found."""
    from dreamfleet.fleet.ray_hosts import run_hosts  # needs Ray

    evaluations = JsonlTail(config.logdir / EVALUATIONS, from_end=True)
    run_hosts(partial(train, env=env if callable(env) else None, display=None), config, say)
    final = [row for row in evaluations.read() if row.get("kind") == "final"]
    return evaluation_from(final[-1]) if final else None


def _keep_output(config: RunConfig, text: str) -> None:
    """What the environment wrote before the start goes where the processes write, too."""
    if text:
        path = config.logdir / "logs" / "preflight.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)


def _config_of(
    config: RunConfig | None,
    env: Task | None,
    preset: str | None,
    settings: Mapping[str, Any],
    trust: Trust,
    say: Say,
) -> RunConfig:
    """The configuration that the arguments of `train` stand for."""
    changes = _changes(env, settings)
    there = (config or RunConfig()).changed({"task": changes["task"]} if "task" in changes else {})
    if is_shared(there.task) and "logdir" not in changes and there.has_default_logdir:
        raise ConfigError(
            f"{there.task.removeprefix(PROGRAM)} does not identify an environment, so another one "
            "would resume its run: pass logdir=..., or a class or function with its own name."
        )
    if config is None:
        return configure(changes, preset, trust=trust, say=say)
    if preset is not None:
        raise ConfigError("A configuration has its settings already: leave the preset out.")
    return config.changed(changes) if changes else config


def _changes(env: Task | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as settings by their path."""
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    if env is not None:
        if "task" in changes:
            raise ConfigError("env and task mean the same: give one of them.")
        changes["task"] = name_of(env)
    if "agent" in changes:
        changes["agent"] = _agent_name(changes["agent"])
    return changes


def _agent_name(agent: Any) -> str:
    """The name of an agent's type, by which every process finds it."""
    kind = agent if isinstance(agent, (str, type)) else type(agent)
    name = name_of(kind)
    if name.startswith(PROGRAM):
        raise ConfigError(
            f"Every process imports the agent by its name, and {name.removeprefix(PROGRAM)} exists "
            'in this program only: put its type into a module, and write agent="module:Name".'
        )
    return name


def _maker(config: RunConfig, env: Task | None) -> Task:
    """What makes the environments of a run, in whichever process."""
    if config.offline:
        return config.task
    only_here = callable(env) and config.task.startswith(PROGRAM)
    maker = env if env and only_here else maker_of(config.task)
    if (config.remote_envs or config.bind) and not isinstance(maker, str):
        raise ConfigError(
            f"Environments of other machines (remote_envs, bind) are made by programs that do not "
            f"have {config.task}: put it into a module, and name it as module:name."
        )
    return maker


@takes_settings(RunConfig)
def resume(logdir: Path | str, **arguments: Any) -> Evaluation | None:
    """Resume the run in a directory with its last settings.

    Args:
        logdir: Its directory.
        arguments: Those of `train`, which also says what is returned and raised: settings to
            change, the environment if it is one of this program, `trust`, callbacks.
    """
    read_config(Path(logdir))  # there has to be one
    return train(logdir=logdir, **arguments)


def _is_over(config: RunConfig, say: Say) -> bool:
    """Say what is resumed and what is changed in it; returns whether it has made its steps."""
    step = steps_made(config.run_dir)
    if not step and not holds_run(config.logdir):
        return False
    is_over = 0 < config.steps <= step
    if is_over:
        say(
            f"The run has made its {config.steps:,} steps and is only evaluated: resume it with "
            f"more, such as --steps {2 * step}."
        )
    else:
        say(f"Resuming at step {step:,} with the run's last settings")
    if holds_run(config.logdir):  # or it is another one of its hosts
        before = read_config(config.logdir)
        for line in [*differences(before, config), *unknown(before, config)]:
            say(line)
    return is_over


def final_evaluation(
    config: RunConfig,
    start: float,
    say: Say = log.info,
    env: Task | None = None,
    outputs: Sequence[MakeOutput] = (),
) -> Evaluation:
    """Evaluate the saved policy; say the result, keep it, and a video of the first episode.

    Raises:
        KeyboardInterrupt: The user ended it. What was played until then is said and kept.
    """
    try:
        with sigterm_interrupts():
            return _final_evaluation(config, start, say, env, outputs)
    except KeyboardInterrupt as interrupt:
        result = interrupt.result if isinstance(interrupt, EvaluationInterrupted) else None
        if result is None:
            say("The evaluation was interrupted before its first episode ended.")
        else:
            total = f"{len(result.returns)} of {config.eval_episodes} episodes"
            say(f"The evaluation was interrupted after {total}: mean score {result.summary()}")
        command = "resume" if 0 < config.steps <= steps_made(config.logdir) else "eval"
        say(f"dreamfleet {command} {config.logdir} evaluates again.")
        raise


def _final_evaluation(
    config: RunConfig, start: float, say: Say, env: Task | None, outputs: Sequence[MakeOutput]
) -> Evaluation:
    checkpoints = Checkpoint(config.checkpoints)

    def load(path: Path) -> Policy:
        return Policy.load(path, agent=config.agent, trust=config.named_code)

    play = partial(evaluate, env=env, episodes=config.eval_episodes, logdir=config.logdir, say=say)

    def rate(path: Path, score: float | None) -> None:
        keep(say, "The score of the checkpoint", partial(checkpoints.rate, path, score))

    def log_metrics(result: Evaluation) -> None:
        keep(say, "The metrics", partial(_write_metrics, config, result, outputs))

    policy = load(config.logdir)
    if pending := checkpoints.pending():  # a round that the end of the run has interrupted
        step = step_of(pending)
        row = recorded_round(config.logdir, step) or {}
        if not row and step < policy.step:  # else the evaluation at the end is this round
            say(f"Finishing the evaluation round of step {step:,}")
            try:
                found = play(load(pending), kind="round")
                row = found.record()
                log_metrics(found)
            except EvaluationError as error:
                say(f"It failed: {error}")
        rate(pending, row.get("mean"))
    path = config.logdir / "media" / "evaluation" / f"{policy.step:012d}.mp4"
    video, no_video = "media" in config.outputs, ""
    if video:
        try:
            find_encoder()
        except DreamfleetError as error:
            video, no_video = False, str(error)
    max_steps = config.eval_max_steps
    if not config.offline and not config.from_checkpoint:
        # An environment without an end must not play for hours after a run of minutes.
        max_steps = min(max_steps, max(1, policy.step))
    shown = path if video else None
    result = play(policy, max_steps=max_steps, video=shown, kind="final", start=start)
    low, high = min(result.returns), max(result.returns)
    say(f"Evaluation: mean score {result.summary()}, lowest {low:.4g}, highest {high:.4g}")
    for note in result.notes():
        say(note)
    if problem := no_video or result.video_error:
        say(f"No video was recorded: {problem}")
    elif video:
        say(f"Video of its first episode: {path}")
    if config.eval_every and (newest := checkpoints.latest()):
        rate(newest, result.mean)
    log_metrics(result)
    return result


def _write_metrics(config: RunConfig, result: Evaluation, more: Sequence[MakeOutput]) -> None:
    """Add an evaluation to the run's outputs, whose process has ended."""
    outputs = logger(config, more)
    outputs.write(result.step, evaluation_metrics(result.played, result.step))
    outputs.close()


# --- callbacks -----------------------------------------------------------------------------------

# They run in the process that called `train`, so they may use anything of the program: append to a
# list, draw in a notebook, raise. What happened is read from the files that the run writes anyway,
# so callbacks cost the fleet nothing, and a logger that is restarted neither repeats nor loses a
# call.


class StopTraining(Exception):
    """Raise it in a callback to end a run as if its steps were over, with its evaluation."""


class Follower:
    """Calls callbacks for what a run writes from now on; None for nothing. See `train`."""

    def __init__(
        self, logdir: Path, on_log: OnLog, on_episode: OnEpisode, on_checkpoint: OnCheckpoint
    ) -> None:
        self._on_log, self._on_episode, self._on_checkpoint = on_log, on_episode, on_checkpoint
        self._metrics = JsonlTail(logdir / "metrics.jsonl", from_end=True)
        self._scores = JsonlTail(logdir / "scores.jsonl", from_end=True)
        self._checkpoints = Checkpoint(logdir / "ckpt" / "agent")
        self._newest = self._checkpoints.latest()

    def poll(self) -> None:
        """Make the calls for everything that is new."""
        if self._on_log:
            for row in self._metrics.read():
                self._on_log(row.pop("step"), row)
        if self._on_episode:
            for row in self._scores.read():
                self._on_episode(row["step"], row["episode/score"], row.get("episode/length", 0))
        if self._on_checkpoint:
            newest = self._checkpoints.latest()
            if newest is not None and newest != self._newest:
                self._newest = newest
                self._on_checkpoint(step_of(newest), newest)
