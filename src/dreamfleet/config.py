"""Every setting of a run.

Importable without JAX: all processes pass it around, and most of them stay small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from dreamfleet.agents.registry import BUILT_IN, AgentType, find_agent
from dreamfleet.errors import ConfigError
from dreamfleet.files import read_now
from dreamfleet.replay.config import ReplayConfig
from dreamfleet.settings import (
    AboveZero,
    Code,
    Count,
    CountOrZero,
    Fixed,
    Fraction,
    Incidental,
    Joined,
    Local,
    Mark,
    PerHost,
    PerRole,
    Section,
    Setting,
    ZeroOrMore,
    changed,
    flattened,
    is_under,
    require,
    settings,
    to_dict,
    validate,
)
from dreamfleet.trust import CodeRef, code_in

if TYPE_CHECKING:
    from dreamfleet.transport import Keys, RoleKey

_WHAT = Section("what")
_END = Section("when it ends")
_PROCESSES = Section("processes")
_LEARNING = Section("learning")
_WRITTEN = Section("what is written and shown")
_SOURCES = Section("starting from other runs")


@dataclass(frozen=True)
class Resources:
    """What one worker asks for."""

    cpu: ZeroOrMore = 0.0
    """CPU cores; 0 for no requirement."""
    gpu: ZeroOrMore = 0.0
    """Accelerators; a fraction, such as 0.5, shares one."""
    memory: CountOrZero = 0
    """Bytes of memory; 0 for no requirement."""
    custom: dict[str, AboveZero] = field(default_factory=dict)
    """Custom resources of the cluster, such as simulator=1."""

    def __post_init__(self) -> None:
        validate(self)

    def amounts(self) -> dict[str, float]:
        """Everything that is asked for, by its name in a cluster."""
        own = {"CPU": self.cpu, "GPU": self.gpu, "memory": float(self.memory)}
        return {name: float(each) for name, each in {**own, **self.custom}.items() if each}


@dataclass(frozen=True)
class RunResources:
    """What each role asks for, per process."""

    agent: Resources = field(default_factory=lambda: Resources(cpu=1))
    """The process that acts and learns."""
    actor: Resources = field(default_factory=lambda: Resources(cpu=1))
    """Each further actor, if there are several `actors`."""
    env: Resources = field(default_factory=lambda: Resources(cpu=1))
    """Each process of environments."""
    replay: Resources = field(default_factory=Resources)
    """Each shard of the replay."""
    evaluator: Resources = field(default_factory=Resources)
    """The evaluator, with its environments, if there is `eval_every`."""
    logger: Resources = field(default_factory=Resources)
    """The logger."""

    def __post_init__(self) -> None:
        validate(self)


CONFIG_FILE = "config.json"
"""In the directory of a run: its latest settings."""

PROGRESS_STEPS = 20
"""Steps of an environment after which its failures before them are forgiven."""
OUTPUTS = ("jsonl", "media", "tensorboard", "wandb", "mlflow")
"""The outputs of this package; all others are named as `package.module:Class`."""


class ForeignSettings(Struct, frozen=True):
    """Settings of an agent whose code was not imported, as they stand in a config.json."""

    name: str
    """What the agent calls its group of settings."""
    values: Mapping[str, Any]


_LOGDIR = Path("runs/{task}")


@dataclass(frozen=True)
class RunConfig:
    """One run of the fleet. Settings that cannot work together are refused at once.

    The defaults are those of the command, the preset `default`: gym:CartPole-v1 on two cores.
    """

    task: Annotated[Joined[Fixed[Code[str]]], _WHAT] = "gym:CartPole-v1"
    """The environment: SUITE:NAME (gym, dmc, atari, atari100k, crafter, minigrid or bundled),
    package.module:factory, or package.module:Id-v0 for an id that the module registers."""
    env_options: Annotated[Joined[dict[str, Any]], _WHAT] = field(default_factory=dict)
    """Options of the task, such as time_limit=500."""
    logdir: Annotated[Incidental[PerRole[Path]], _WHAT] = _LOGDIR
    """The run's directory; an existing run is resumed. {task} stands for the name of the task."""
    seed: Annotated[Incidental[Joined[CountOrZero]], _WHAT] = 0
    """Seed of the agent, of the environments and of the replay's samples."""
    steps: Annotated[Incidental[CountOrZero], _END] = 30_000
    """Training environment steps after which the run ends; 0 for no end."""
    duration: Annotated[Incidental[PerHost[ZeroOrMore]], _END] = 0.0
    """Seconds after which the run ends; 0 for no end."""
    target_score: Annotated[Incidental[float | None], _END] = None
    """End the run at this mean score of the last 20 episodes, or of a round of `eval_every`; None
    for no end. Evaluation episodes count if there are evaluation environments, else training
    episodes."""

    eval_episodes: Annotated[Incidental[PerHost[CountOrZero]], _END] = 20
    """Episodes of the evaluation at the end, and of each round of `eval_every`; 0 for none."""
    eval_every: Annotated[Incidental[PerHost[CountOrZero]], _END] = 0
    """Training environment steps between two rounds of evaluation, played by `eval_envs`
    environments (at least one); 0 for none."""
    eval_max_steps: Incidental[PerHost[Count]] = 27_000
    """Steps after which an evaluation episode is cut short; its score so far counts. The final
    evaluation also cuts episodes at the number of trained steps."""

    launcher: Annotated[Incidental[str], _PROCESSES] = "local"
    """What starts the roles: local (processes of this machine), serial (one thread, for debuggers
    and repeatable runs) or ray (processes of a Ray cluster)."""
    ray_address: Incidental[PerHost[Local[str]]] = ""
    """The Ray cluster: auto (this machine is part of it), HOST:PORT, ray://HOST:PORT (from
    outside), or local (a new one). Empty takes RAY_ADDRESS, the cluster of `ray start` on this
    machine, or a new one."""
    ray_runtime_env: Incidental[PerHost[Local[dict[str, Any]]]] = field(default_factory=dict)
    """Ray's runtime environment of the workers: files and packages that the machines lack, such as
    working_dir=. pip=[\"minigrid\"]."""
    ray_wait: Incidental[PerHost[ZeroOrMore]] = 0.0
    """Seconds to wait for Ray nodes with the resources of the workers, such as those of an
    autoscaler; 0 refuses a run without them."""
    resources: Incidental[PerHost[RunResources]] = field(default_factory=RunResources)
    """What each role's process asks for, where the launcher places processes on machines."""
    agent: Annotated[Fixed[Code[str]], _WHAT] = "dreamer"
    """What acts and learns: dreamer, random, or your own as package.module:name."""
    hosts: CountOrZero = 1
    """Hosts that train one agent together, each with its own environments and replay. Start the
    same command on each, with the same directory; the launcher ray starts all. 0 takes the number
    from Slurm or Ray."""
    host_index: Incidental[PerHost[CountOrZero]] = 0
    """Number of this host, from 0; Slurm and Ray set it."""
    coordinator: Incidental[PerHost[str]] = ""
    """HOST:PORT of host 0, as the other hosts reach it. Empty: host 0 takes a free port and
    publishes it in the run's directory."""
    envs: Annotated[PerHost[Count], _PROCESSES] = 8
    """Environments that collect training data; with several `hosts`, of each."""
    eval_envs: Annotated[Incidental[PerHost[CountOrZero]], _PROCESSES] = 0
    """Environments for evaluation while training: for the rounds of `eval_every`, or else all the
    time. Their data is kept apart."""
    envs_per_process: Annotated[PerHost[Joined[Count]], _PROCESSES] = 8
    """Environments that share a process and are stepped together, one message for all."""
    actors: Incidental[PerHost[Joined[Count]]] = 1
    """Policy servers; environment n calls number n % actors. The first is part of the agent's
    process. Others have their own process on the CPU, with parameters about a second old."""
    bind: Incidental[PerHost[str]] = ""
    """Where other machines may join with `dreamfleet join`: 0.0.0.0 (every network), a name or
    address of this machine, or an interface such as eth0, each also with :PORT; empty for nowhere.
    """
    expect_envs: Incidental[PerHost[CountOrZero]] = 0
    """Environments that must be connected before the run starts, including joined machines; 0
    starts with the first one."""
    env_lanes: PerHost[Joined[Annotated[int, Meta(ge=1, le=256)]]] = 1
    """Groups that the environments of a process are split into, with a message each: one is stepped
    while the others wait. Use two or more over a slow network."""
    remote_envs: Incidental[PerHost[bool]] = False
    """Start no environments here: `dreamfleet role env` starts them elsewhere, or, with `bind`,
    `dreamfleet join`."""
    remote_replay: Incidental[bool] = False
    """Start no replay here: `dreamfleet role replay` starts it elsewhere."""
    replay_shards: Fixed[Annotated[int, Meta(ge=1, le=1024)]] = 1
    """Processes of the replay: process n % replay_shards stores the steps of environment n, and
    batches are drawn from all. It cannot change on resume."""

    actor_addr: Incidental[PerRole[str]] = "ipc://{auto}"
    """Where the actor listens, such as tcp://10.0.0.5:5551; {auto} chooses a free port or file."""
    replay_addr: Incidental[PerRole[str]] = "ipc://{auto}"
    """Where the replay listens; further `replay_shards` listen at the next ports or files."""
    logger_addr: Incidental[PerRole[str]] = "ipc://{auto}"
    """Where the logger listens."""
    learner_addr: Incidental[PerRole[str]] = "ipc://{auto}"
    """Where the learner listens, if there are several `actors`, which call it."""
    keys: Incidental[PerRole[str]] = ""
    """File of the run key or of a role's key, which tcp addresses need; by default made in the
    logdir."""
    actor_batch: PerHost[Annotated[int, Meta(ge=-1)]] = 8
    """Environments in a policy call, at most those of an actor; 0 or less takes half of them."""
    actor_wait: PerHost[ZeroOrMore] = 0.02
    """Seconds that a policy call waits for more environments."""
    actor_threads: PerHost[Count] = 1
    """Threads that prepare batches and answers; one at a time calls the policy."""

    batch_size: Annotated[Count, _LEARNING] = 16
    """Sequences in a training batch; those of all `hosts` together."""
    batch_length: Annotated[Count, _LEARNING] = 32
    """Steps that are trained on in a sequence."""
    report_length: Incidental[Count] = 32
    """Steps in a sequence that is reported on; a longer one is cut to batch_length."""
    report_batches: Incidental[Count] = 1
    """Batches in a report."""
    # An update for every eighth step: updates dominate the cost, so more data is nearly free.
    train_ratio: Annotated[float, Meta(ge=-1), _LEARNING] = 64.0
    """Replayed steps trained on per environment step (a repeated action is one step); 0 or less for
    no limit. Training starts after max(batch_size, envs) x (batch_length + context) steps."""
    catch_up: bool = True
    """Make the updates that were due before training started: some at once, the others at the end
    of a run with `steps`. The reference does not."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """What the replay keeps, and which sequences are trained on."""

    log_every: Incidental[PerHost[AboveZero]] = 10.0
    """Seconds between two writes of metrics. In a serial run 100 environment steps are a second,
    here and in `report_every`."""
    report_every: Incidental[ZeroOrMore] = 300.0
    """Seconds between two reports, and between two videos of an environment; 0 for never."""
    outputs: Annotated[Incidental[PerHost[Code[tuple[str, ...]]]], _WRITTEN] = ("jsonl", "media")
    """Where metrics go: jsonl (metrics.jsonl), media (images and videos as files), tensorboard,
    wandb, mlflow, or your own as package.module:Class."""
    metrics_port: Incidental[Annotated[int, Meta(ge=0, le=65535)]] = 0
    """Port of this machine where Prometheus reads the newest metrics; 0 for none."""
    save_every: Incidental[ZeroOrMore] = 120.0
    """Seconds between two checkpoints; 0 saves at the end only. The first one comes after a minute,
    and the intervals double up to this."""
    profile: Incidental[bool] = False
    """Write JAX's profile of a few training steps to the folder `profile`, once."""
    episode_timeout: Incidental[AboveZero] = 180.0
    """Seconds without a step after which a disconnected environment is dropped, with its episode.
    """

    prefill: Annotated[tuple[str, ...], _SOURCES] = ()
    """Directories of runs whose steps a new run starts with."""
    offline: Annotated[tuple[str, ...], _SOURCES] = ()
    """Directories of runs to learn from without environments; `steps` counts updates then."""
    pretrain: Fixed[CountOrZero] = 0
    """Updates that a new run makes with the steps of `prefill` before it acts; 0 for none."""
    offline_fraction: Fixed[Fraction] = 0.0
    """Share of every training batch that is drawn from the steps of `prefill`; 0 draws from all
    steps alike."""
    from_checkpoint: Annotated[str, _SOURCES] = ""
    """A run's directory, or a checkpoint, that a new run starts from; empty for none."""
    from_checkpoint_regex: str = ""
    """Which entries of `from_checkpoint` are taken, matched from their start; empty for all."""

    on_failure: Incidental[Joined[Literal["restart", "stop"]]] = "restart"
    """Whether a process that fails is started again, or ends the run."""
    max_restarts: Incidental[Joined[CountOrZero]] = 10
    """Failures of one process, or of one environment, without progress in between, after which the
    run ends. Progress is a finished episode, 20 steps, a checkpoint, stored steps or written
    metrics."""
    on_nan: Incidental[Joined[Literal["end", "stop"]]] = "end"
    """What ends if a reward or observation holds NaN or infinity: the episode, before the bad step
    is stored, or the run."""
    env_timeout: Incidental[PerHost[Joined[ZeroOrMore]]] = 300.0
    """Seconds that an environment may take to start or step before it is killed and restarted; 0
    for no limit."""

    agent_config: Any = None
    """Settings of the agent, such as a `DreamerConfig`; None for its defaults. Flags and files have
    them under the agent's name, such as `dreamer.loss.horizon`."""

    def __post_init__(self) -> None:
        validate(self)
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in self.env_options.items()}
        object.__setattr__(self, "env_options", options)  # as they were before JSON
        if "{task}" in str(self.logdir):
            object.__setattr__(self, "logdir", _in_place(self.logdir, self.task))
        if not isinstance(self.agent_config, ForeignSettings):
            agent = self.agent_type
            settings = agent.default() if self.agent_config is None else self.settings_of(agent)
            object.__setattr__(self, "agent_config", settings)
        for condition, sentence in _CONFLICTS:
            if found := condition(self):
                raise ConfigError(sentence.format(c=self, found=found))

    @property
    def host_batch(self) -> int:
        """Sequences of a training batch that come from this host."""
        return self.batch_size // max(self.hosts, 1)

    @property
    def host_seed(self) -> int:
        """The seed of what hosts do not have in common: environments, and the replay's samples."""
        return self.seed + (self.host_index << 96)

    @property
    def run_dir(self) -> Path:
        """The directory of the whole run; `logdir` is that of this host."""
        return self.logdir.parents[1] if self.hosts > 1 and self.host_index else self.logdir

    @property
    def checkpoints(self) -> Path:
        """Where the agent's checkpoints are, those of all hosts."""
        return self.run_dir / "ckpt" / "agent"

    @property
    def all_envs(self) -> int:
        """Environments that the actors serve; those of the rounds of `eval_every` are others."""
        return self.envs + (0 if self.eval_every else self.eval_envs)

    def envs_of(self, actor: int) -> range:
        """The environments that one of the actors serves."""
        return range(actor, self.all_envs, self.actors)

    @property
    def known_envs(self) -> int:
        """Environments that the actor serves, as far as they are known before others join."""
        own = 0 if self.bind and self.remote_envs else self.all_envs
        return max(own, self.expect_envs)

    @property
    def policy_batch(self) -> int:
        """Environments in a full policy call of the first actor."""
        return self.policy_batch_of(0)

    def policy_batch_of(self, actor: int) -> int:
        """Environments in a full policy call of one of the actors."""
        known = len(range(actor, self.known_envs, self.actors))
        wanted = self.actor_batch if self.actor_batch > 0 else known // 2
        # A call that waits for several lanes of a process synchronises them, and hides no delay.
        most = -(-len(self.envs_of(actor)) // self.env_lanes)
        # Others may join, and fill it.
        return max(1, wanted if self.bind else min(wanted, most))

    @property
    def window(self) -> int:
        """Steps in a stored sequence: what is trained on and the context before it."""
        return self.batch_length + self.context

    @property
    def context(self) -> int:
        """Steps that the agent needs before those that it trains on."""
        return self.agent_type.context(self.settings_of(self.agent_type))

    @property
    def agent_type(self) -> AgentType[Any]:
        """The agent's entry in the registry. This imports the code that `agent` names."""
        return find_agent(self.agent)

    @property
    def code_refs(self) -> list[CodeRef]:
        """Code outside of this package that the settings name, as far as the agent is known."""
        return code_in((each.path, each.value) for each in self.settings(mark=Mark.CODE))

    @property
    def named_code(self) -> list[str]:
        """The names in `code_refs`."""
        return [ref.name for ref in self.code_refs]

    def settings_of(self, agent: AgentType[Any]) -> Any:
        """The agent's settings as an instance of its own class, also if they were read from a
        file without importing the agent."""
        if isinstance(self.agent_config, ForeignSettings):
            values = self.agent_config.values
            return changed(agent.config(), values, f"{agent.name}.", strict=False)
        require(
            isinstance(self.agent_config, agent.config),
            f"agent_config is a {type(self.agent_config).__name__}, and the agent {agent.name} "
            f"takes a {agent.config.__name__}: set agent_config=None for its defaults.",
        )
        return self.agent_config

    @property
    def report_window(self) -> int:
        """Steps of a sequence that is reported on."""
        return min(self.report_length, self.batch_length)

    @property
    def updates(self) -> int:
        """Updates of the whole run; 0 if it has no end, or no limit of updates for each step."""
        if self.offline:
            return self.steps
        ratio = max(0.0, self.train_ratio)
        made = int(self.steps * ratio / (self.batch_size * self.batch_length))
        return made and made + self.pretrain

    @property
    def limiter_tolerance(self) -> int:
        """Sequences that learning may be ahead, and steps that acting may be, of `train_ratio`."""
        return 4 * self.host_batch

    @property
    def message_steps(self) -> int:
        """Steps in a message of an actor to the replay, unless one policy call has more. What the
        limiter tolerates keeps acting and learning in step. Many environments send four steps of
        each at once: larger messages cost less."""
        return max(self.limiter_tolerance, min(256, 4 * len(self.envs_of(0))))

    @cached_property
    def run_keys(self) -> Keys | RoleKey | None:
        """What clients connect with: the run key, or the key of a role; None if there is none."""
        if _keys is not None:
            return _keys
        if not self.keys:
            return None
        from dreamfleet.transport import load_key  # a policy that is used alone needs no network

        return load_key(self.keys)

    @property
    def server_keys(self) -> Keys | None:
        """The run key, which servers need; None if the run has none."""
        from dreamfleet.transport import RoleKey

        keys = self.run_keys
        if not isinstance(keys, RoleKey):
            return keys
        raise ConfigError(
            f"{self.keys} is the key of the role {keys.role!r}, and a server needs the run key: "
            "the file 'keys' of the run's directory."
        )

    @property
    def labels(self) -> Mapping[str, str]:
        """The agent's settings stand under its name in flags and files."""
        foreign = isinstance(self.agent_config, ForeignSettings)
        return {"agent_config": self.agent_config.name if foreign else self.agent_type.name}

    def settings(self, mark: Mark | None = None) -> list[Setting]:
        """Every setting, or those with a mark. Settings of an agent whose code was not imported are
        one without marks."""
        return [each for each in settings(self) if mark is None or mark in each.marks]

    def changed(self, changes: Mapping[str, Any]) -> RunConfig:
        """The configuration with some settings changed, by their path: `{"envs": 4,
        "dreamer.loss.horizon": 100, "dreamer.model": "1m"}`. Groups of settings may also be
        mappings, as in a file. Another agent starts with its defaults. This imports the agent's
        code, also if nothing is changed.

        Raises:
            ConfigError: There is no such setting, or its value does not fit.
        """
        name = str(changes.get("agent", self.agent))
        agent, start = find_agent(name), self
        if name != self.agent:
            start = replace(self, agent=name, agent_config=None)
        elif isinstance(self.agent_config, ForeignSettings):
            start = replace(self, agent_config=self.settings_of(agent))
        if "task" in changes and "logdir" not in changes and self.has_default_logdir:
            changes = {**changes, "logdir": _LOGDIR}  # it follows the task, unless it was chosen
        return changed(start, changes)

    @property
    def has_default_logdir(self) -> bool:
        """Whether the directory follows from the task."""
        return self.logdir == _in_place(_LOGDIR, self.task)

    if not TYPE_CHECKING:  # which would take every name for one of its own

        def __getattr__(self, name: str) -> Any:
            """The agent's settings under its name, such as `config.dreamer`, as flags have them."""
            mine = self.__dict__.get("agent_config")
            # Settings of an agent whose code was not imported do not import it here either.
            known = mine is not None and not isinstance(mine, ForeignSettings)
            if known and name == find_agent(self.agent).name:
                return mine
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON has it; the agent's settings stand under the agent's name."""
        foreign = self.agent_config
        if isinstance(foreign, ForeignSettings):
            return {**to_dict(self), foreign.name: foreign.values}
        return to_dict(self)

    def to_json(self) -> str:
        """The configuration as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def flat(self, without: Mark | None = None) -> dict[str, Any]:
        """Every setting by its path, with values as JSON has them; without those that have a
        mark."""
        left_out = [each.path for each in self.settings(mark=without)] if without else []
        return {k: v for k, v in flattened(self.to_dict()).items() if not is_under(k, left_out)}

    def experiment(self) -> dict[str, Any]:
        """The settings that make a run another experiment, as `flat` has them."""
        return self.flat(without=Mark.INCIDENTAL)

    @classmethod
    def from_json(cls, text: str | bytes) -> RunConfig:
        """The configuration that `to_json` wrote. Settings that this version does not have are
        ignored, and those that are missing get their defaults.

        Code that the text names is never imported: settings of an agent that is not built in stay
        plain values until `changed` is called.
        """
        try:
            values = {"agent": "dreamer", "logdir": _LOGDIR, **json.loads(text)}
            name = values["agent"]
            if name in BUILT_IN:
                theirs = find_agent(name).config()
            else:
                groups = {k: v for k, v in values.items() if isinstance(v, dict)}
                unknown = [key for key in groups if key not in cls.__dataclass_fields__]
                key = unknown[-1] if unknown else str(name).rpartition(":")[2]
                theirs = ForeignSettings(key, values.pop(key, {}))
            start = cls(agent=name, agent_config=theirs)
            return changed(start, values, strict=False)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"This is not the configuration of a run: {str(error).rstrip('.')}. Use the "
                "version of Dreamfleet that wrote it."
            ) from None


def _is_reachable(address: str) -> bool:
    """Whether other machines can know an address: a port that is chosen later is published in the
    run's directory, and a file or name of this machine is no use to them."""
    return "{auto}" not in address or address.startswith("tcp://")


_ADDR = (
    "that other machines can reach: write tcp://HOST:PORT, or tcp://HOST:{{auto}} if they share "
    "the run's directory"
)
_CONFLICTS: Sequence[tuple[Callable[[RunConfig], object], str]] = (
    (lambda c: not isinstance(c.agent_config, ForeignSettings)
     and c.agent_type.name in c.__dataclass_fields__,
     "The agent {c.agent} is named {c.agent_type.name!r}, which is a setting of every run: give "
     "its type another name."),
    (lambda c: [name for name in c.outputs if name not in OUTPUTS and ":" not in name],
     f"There is no output {{found[0]!r}}: choose from {', '.join(OUTPUTS)}, or write "
     "package.module:Class for your own."),
    (lambda c: "seed" in c.env_options,
     "env_options may not hold a seed: every environment gets its own; set the run's seed."),
    (lambda c: c.from_checkpoint_regex and not c.from_checkpoint,
     "from_checkpoint_regex needs from_checkpoint: set both."),
    (lambda c: c.offline and c.prefill,
     "offline and prefill are mutually exclusive: name all directories after offline."),
    (lambda c: c.offline and (c.pretrain or c.offline_fraction),
     "pretrain and offline_fraction are for runs that collect steps: use prefill, not offline."),
    (lambda c: c.offline_fraction and c.replay.fractions.priority,
     "offline_fraction cannot be used with replay.fractions.priority: leave one out."),
    (lambda c: c.offline_fraction and c.replay_shards > 1,
     "offline_fraction cannot be used with replay_shards={c.replay_shards}: leave one out."),
    (lambda c: c.offline and (c.bind or c.actors > 1 or c.eval_every),
     "offline trains without environments: leave bind, actors and eval_every out."),
    (lambda c: c.eval_every and not c.eval_episodes,
     "eval_every needs eval_episodes of 1 or more."),
    (lambda c: c.replay_shards > c.envs and not c.offline and not c.bind,
     "replay_shards={c.replay_shards} with envs={c.envs} would leave shards without steps: use at "
     "most as many shards as environments, or set bind, so that other machines can join."),
    (lambda c: c.expect_envs > c.all_envs and not c.bind,
     "expect_envs={c.expect_envs} exceeds the {c.all_envs} environments of the run: lower it, or "
     "set bind, so that other machines can join."),
    (lambda c: 1 < c.actors > c.all_envs and not c.bind,
     "actors={c.actors} exceeds the {c.all_envs} environments of the run: use fewer actors."),
    # Machines that join are told the addresses.
    (lambda c: c.remote_envs and not c.bind and not _is_reachable(c.actor_addr),
     f"remote_envs needs an actor_addr {_ADDR}, or set bind, so that they can join."),
    (lambda c: c.remote_replay and not _is_reachable(c.replay_addr),
     f"remote_replay needs a replay_addr {_ADDR}."),
    (lambda c: c.hosts > 1 and c.batch_size % c.hosts,
     "A batch of {c.batch_size} sequences does not split over {c.hosts} hosts: choose a batch_size "
     "that is a multiple of {c.hosts}."),
    (lambda c: 1 < c.hosts <= c.host_index,
     "There is no host_index={c.host_index} of {c.hosts} hosts: they are numbered from 0."),
    (lambda c: c.hosts > 1 and (
        c.launcher == "serial" or c.offline or c.prefill or c.remote_replay),
     "Several hosts need their own data and processes: leave launcher=serial, offline, prefill and "
     "remote_replay out, or set hosts=1."),
)  # fmt: skip
"""What cannot work, and the sentence that says so of the configuration `c` and what was `found`."""

_keys: Keys | RoleKey | None = None


def use_keys(keys: Keys | RoleKey) -> None:
    """Use this key for every run, from now on in this process: a launcher has brought it to a
    machine that may not have the file."""
    global _keys
    _keys = keys


def _in_place(logdir: Path, task: str) -> Path:
    """The directory with the name of the task in place of {task}."""
    name = re.sub(r"[^\w.=-]+", "-", task.removeprefix("__main__:")).strip("-.")
    return Path(str(logdir).replace("{task}", name or "environment"))


def read_config(logdir: Path) -> RunConfig:
    """The configuration of the run in a directory. This imports nothing that it names.

    Raises:
        ConfigError: The directory holds no run, or its configuration is damaged.
    """
    return replace(read_config_file(logdir / CONFIG_FILE), logdir=logdir)


def read_config_file(path: Path) -> RunConfig:
    """The configuration in a file; see `read_config`."""
    try:
        return RunConfig.from_json(read_now(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path.parent} holds no run: there is no {path}. Name the directory of a run."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ConfigError as error:
        raise ConfigError(f"{path} is not valid. {error}") from None
