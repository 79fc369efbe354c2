"""A trained agent as a function from observations to actions.

    policy = Policy.load("runs/cartpole")
    action, state = policy({"vector": observation})
    action, state = policy({"vector": observation}, state)

Nothing but the checkpoint is needed: no replay, no environment, no configuration file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Agent, Arrays, Mode, Player
from dreamfleet.agents.registry import BUILT_IN, AgentType, find_agent
from dreamfleet.checkpoint import Checkpoint, Snapshot, Which, read_checkpoint
from dreamfleet.config import ForeignSettings, RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.settings import Mark, settings
from dreamfleet.spaces import (
    FLAGS,
    Space,
    spaces_from_json,
    spaces_to_json,
    without_logs,
    without_reset,
)
from dreamfleet.trust import Trust, admit, code_in

if TYPE_CHECKING:
    from dreamfleet.envs.registry import Task
    from dreamfleet.export import Format

Spaces = Mapping[str, Space]

_RAW = "or use policy.for_gym(env), which takes what a Gymnasium environment returns."

BLUEPRINT = "blueprint"
"""The part of a checkpoint that describes the agent."""
_SPACES = ("obs_space", "act_space", "stored_space")
_FUNCTION = "function"
"""Stands for the settings of an agent of which only the user's function is known."""


@dataclass(frozen=True)
class Blueprint:
    """What a checkpoint holds in addition to numbers, so that the agent can be made from it alone:
    the configuration and the spaces. It needs neither the run's directory nor the environment."""

    config: RunConfig
    obs_space: Spaces
    act_space: Spaces
    stored_space: Spaces

    @classmethod
    def of(cls, agent: Agent, config: RunConfig) -> Blueprint:
        """That of an agent of a run. What the agent itself is counts: a function of the user's may
        have made another one than the configuration says."""
        described = _described(agent, config)
        return cls(described, agent.obs_space, agent.act_space, agent.stored_space)

    def save(self) -> dict[str, str]:
        spaces = {name: spaces_to_json(getattr(self, name)) for name in _SPACES}
        return {"config": self.config.to_json(), **spaces}

    @classmethod
    def load(cls, state: Mapping[str, str]) -> Blueprint:
        """The blueprint that `save` wrote. This imports no code that it names.

        Raises:
            ConfigError: It is damaged, or of another version.
        """
        try:
            config = RunConfig.from_json(state["config"])
            return cls(config, *(spaces_from_json(state[name]) for name in _SPACES))
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(
                "The checkpoint's description of its agent is damaged "
                f"({type(error).__name__}: {error}): use another checkpoint."
            ) from None

    @property
    def made_by_function(self) -> bool:
        """Whether nothing but the user's own function can make the agent."""
        settings = self.config.agent_config
        return isinstance(settings, ForeignSettings) and settings.name == _FUNCTION

    def build(self, agent: AgentType[Any]) -> Any:
        """What acts as an agent of this type, on any machine."""
        settings = agent.anywhere(self.config.settings_of(agent))
        return agent.make_player(self.obs_space, self.act_space, settings, seed=self.config.seed)


def _described(agent: Agent, config: RunConfig) -> RunConfig:
    """The configuration with what the agent really is."""
    kind, mine = type(agent), getattr(agent, "config", None)
    ours = kind.__module__.startswith("dreamfleet.")
    names = [name for name in BUILT_IN if ours and isinstance(mine, find_agent(name).config)]
    if names:
        return replace(config, agent=names[0], agent_config=mine)
    if config.agent not in BUILT_IN:  # whose agents need not keep their settings
        known = isinstance(mine, config.agent_type.config)
        return replace(config, agent_config=mine) if known else config
    settings = ForeignSettings(_FUNCTION, {})
    return replace(config, agent=f"{kind.__module__}:{kind.__qualname__}", agent_config=settings)


def read_blueprint(logdir: Path) -> Blueprint | None:
    """What the newest checkpoint of a run says about its agent; None if there is none."""
    snapshot = Checkpoint(logdir / "ckpt" / "agent").load(parts=[BLUEPRINT])
    return Blueprint.load(snapshot.parts[BLUEPRINT]) if snapshot else None


@dataclass(frozen=True)
class PolicyState:
    """The carries of the episodes that are played, a row for each; never changed in place, so a
    state may be kept and used again."""

    carry: Any
    fresh: NDArray[np.bool_]
    """Rows whose episode has not started."""

    def __len__(self) -> int:
        return len(self.fresh)

    def restart(self, done: Any) -> PolicyState:
        """Reset the rows where `done` is true: their next observation starts an episode."""
        return replace(self, fresh=self.fresh | np.asarray(done, bool).reshape(-1))


class Policy:
    """Acts as a trained agent: it samples from the policy, as in training, or takes the mode.

    Args:
        agent: Anything that acts: an agent, or the part of it that does.
        obs_space: Spaces of observations; the four flags may be missing.
        act_space: Spaces of actions.
        step: Environment steps it was trained for.
        blueprint: What the checkpoint says about the run.
        greedy: Take the mode of the policy instead of samples.
    """

    def __init__(
        self,
        agent: Player,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        *,
        step: int = 0,
        blueprint: Blueprint | None = None,
        greedy: bool = False,
    ) -> None:
        self.agent = agent
        self.obs_space = {k: s for k, s in without_logs(obs_space).items() if k not in FLAGS}
        self.act_space = without_reset(act_space)
        self.step = step
        self.blueprint = blueprint
        self.greedy = greedy

    @property
    def mode(self) -> Mode:
        """How the agent is asked to act."""
        return "greedy" if self.greedy else "eval"

    @property
    def protocol(self) -> str:
        """How actions are chosen, in words."""
        if self.greedy:
            return "greedy actions, the mode of the policy"
        return "actions sampled from the policy, as in training"

    @classmethod
    def load(
        cls,
        path: Path | str,
        which: Which = "latest",
        *,
        agent: Player | AgentType[Any] | str | None = None,
        greedy: bool = False,
        trust: Trust = False,
    ) -> Policy:
        """The policy of a run, or of one of its checkpoints.

        Args:
            path: A run's directory, a directory of checkpoints, or one checkpoint.
            which: Of several checkpoints the newest complete one, or the one with the best
                evaluation score.
            agent: None builds the agent that the checkpoint describes, if all of it is part of this
                package. Code of your own is never imported because a file names it: name the agent
                here, or pass its type, or an agent that takes the parameters.
            greedy: Take the mode of the policy instead of samples.
            trust: True imports all code of others that the checkpoint names, agent and networks;
                `["my_nets:Encoder"]` only what is named here.

        Raises:
            ConfigError: There is no checkpoint.
            CheckpointError: It is damaged, or does not describe its agent.
        """
        snapshot = find_checkpoint(Path(path), which=which)
        blueprint = Blueprint.load(snapshot.parts[BLUEPRINT])
        if agent is None:
            agent = blueprint.config.agent
            if blueprint.made_by_function:
                raise ConfigError(
                    f"{path} was trained with {agent}, which a function of yours made: pass such "
                    "an agent as agent=..., and the parameters are loaded into it."
                )
            admit(path, code_in([("agent", agent)]), trust=trust, may_state=["agent"])
        if isinstance(agent, str):
            agent = find_agent(agent)
        if isinstance(agent, AgentType):
            named = settings(blueprint.config.settings_of(agent), f"{agent.name}.")
            code = code_in((each.path, each.value) for each in named if Mark.CODE in each.marks)
            admit(path, code, trust=trust, may_state=())
            agent = blueprint.build(agent)
        made: Any = agent
        made.load(snapshot.parts["agent"])
        spaces = made.obs_space, made.act_space
        return cls(made, *spaces, step=snapshot.step, blueprint=blueprint, greedy=greedy)

    def reset(self, count: int = 1) -> PolicyState:
        """The state before the first observation of so many episodes."""
        return PolicyState(self.agent.init_policy(count), np.ones(count, bool))

    def __call__(
        self, obs: Mapping[str, Any], state: PolicyState | None = None
    ) -> tuple[Arrays, PolicyState]:
        """An action for one observation, or actions for a batch of them.

        Observations are as the environment of `make_env` gives them: images are uint8 (height,
        width, channels) of the trained size, whatever the environment's own layout is, and
        discrete values start at 0. Continuous actions lie within -1 and 1, whatever the
        environment's own bounds are. `for_gym` takes and gives what the environment itself does.

        Args:
            obs: A value for each key of `obs_space`; with a leading axis it is a batch, and so are
                the actions then. `is_first` may be given; otherwise episodes start where the state
                is fresh. Other keys are ignored.
            state: What the last call returned; None before the first observation.
        """
        arrays, single = self._batch(obs)
        count = len(next(iter(arrays.values())))
        state = self.reset(count) if state is None else state
        if len(state) != count:
            raise ConfigError(
                f"There are {count} observations and a state for {len(state)}: keep one state for "
                "each batch, and start with policy.reset(count)."
            )
        first = np.asarray(obs.get("is_first", False), bool).reshape(-1) | state.fresh
        zeros = {flag: np.zeros(count, bool) for flag in ("is_last", "is_terminal")}
        full = {**arrays, **zeros, "reward": np.zeros(count, np.float32), "is_first": first}
        carry, actions, _ = self.agent.policy(state.carry, full, self.mode)
        bounded = {key: self._bounded(key, value) for key, value in actions.items()}
        if single:
            bounded = {key: value[0] for key, value in bounded.items()}
        return bounded, PolicyState(carry, np.zeros(count, bool))

    if not TYPE_CHECKING:  # which would take every name for one of its own

        def __getattr__(self, name: str) -> Any:
            if name in ("act", "get_action", "predict"):
                raise AttributeError(
                    f"A Policy has no method {name!r}: call the policy itself, action, state = "
                    f"policy(observation, state), {_RAW}"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def for_gym(self, env: Any) -> Any:
        """The policy for one Gymnasium environment: observations and actions as that has them.

        Images are brought to the layout and size of training, with the options `image_layout` and
        `action_bounds` that the policy was trained with.

        Returns a `dreamfleet.envs.gym.GymPlayer`: call it with an observation, and call its
        `reset` when an episode starts.
        """
        from dreamfleet.envs.gym import GymPlayer

        trained = self.blueprint.config.env_options if self.blueprint else {}
        shared = ("image_layout", "action_bounds")
        options = {name: trained[name] for name in shared if name in trained}
        return GymPlayer(self, self.obs_space, env, **options)

    def export(
        self,
        out: Path | str,
        *,
        format: Format = "onnx",  # noqa: A002 - the word that users look for
        latent: Literal["mode", "sample"] = "sample",
        actions: Literal["mode", "sample"] | None = None,
        env: Task | str | None = None,
        trust: bool = False,
    ) -> dict[str, Any]:
        """Write the policy into a folder, as a graph that needs neither this package nor JAX.

        The graph is compared with the policy before it is written. Continuous actions come out in
        the environment's own units, so the environment is made once if there are some.

        Args:
            out: The folder.
            format: `onnx`, or `stablehlo` for XLA and `jax.export`.
            latent: Sample the latent state, as in training, or take its mode.
            actions: Sample actions or take their mode; None for what the policy itself does.
            env: The environment, if it is not the one that the checkpoint names.
            trust: Import an environment of your own that the checkpoint names.

        Returns:
            What `policy.json` in the folder holds: names, shapes, bounds, versions, checksums,
            and the comparison.

        Raises:
            ConfigError: The agent, or its environment, does not allow it.
            MissingExtraError: The packages that write ONNX are not installed.
            ExportError: The graph cannot be written, or does not compute what the policy does.
        """
        from dreamfleet.envs.registry import make_env
        from dreamfleet.export import export

        make_graph = getattr(self.agent, "policy_graph", None)
        if make_graph is None:
            raise ConfigError(
                f"Only DreamerV3's policies can be exported, not those of "
                f"{type(self.agent).__name__}: write your agent's own export."
            )
        config = self.blueprint.config if self.blueprint else None
        options = dict(config.env_options) if config else {}
        repeat, bounds = options.get("repeat"), {}
        chosen = actions or ("mode" if self.greedy else "sample")
        about: dict[str, Any] = {"sampling": {"latent": latent, "actions": chosen}}
        if config:
            about |= {"task": config.task, "trained_steps": self.step}
        if env is not None or not all(space.discrete for space in self.act_space.values()):
            if config is None and env is None:
                raise ConfigError("The policy does not name its task: pass env=...")
            made: Any = make_env(maker_of_task(config or RunConfig(), env, trust=trust), **options)
            try:
                rate, bounds = _control_rate(made), made.native_bounds
            finally:
                made.close()
            about["control_rate_hz"] = rate / (repeat or 1) if rate else None
        about["action_repeat"] = repeat
        graph = make_graph(bounds, latent=latent, actions=chosen)
        return export(graph, self.obs_space, Path(out), format=format, about=about)

    def _batch(self, obs: Mapping[str, Any]) -> tuple[Arrays, bool]:
        arrays: Arrays = {}
        sizes = set()  # None stands for a single observation
        for key, space in self.obs_space.items():
            if key not in obs:
                raise ConfigError(
                    f"The observation has no {key!r}: the policy was trained with "
                    f"{', '.join(self.obs_space)}."
                )
            given = np.asarray(obs[key])
            single = given.shape == space.shape
            # Cast silently, a float image from 0 to 1 would be black.
            is_cut = space.discrete and given.dtype.kind == "f"
            if is_cut or (not single and given.shape[1:] != space.shape):
                raise ConfigError(
                    f"{key!r} is {given.dtype}{given.shape}: the policy was trained with "
                    f"{space.dtype}{space.shape}; pass that, with a leading axis for several "
                    f"observations, {_RAW}"
                )
            value = given.astype(space.dtype, copy=False)
            sizes.add(None if single else len(value))
            arrays[key] = value[None] if single else value
        if len(sizes) > 1:
            raise ConfigError("The keys hold different numbers of observations: give all the same.")
        return arrays, sizes == {None}

    def _bounded(self, key: str, value: NDArray[Any]) -> NDArray[Any]:
        space, array = self.act_space[key], np.asarray(value)
        if space.discrete:
            return array
        return np.asarray(np.clip(array, space.low, space.high), space.dtype)


def _control_rate(env: Any) -> float | None:
    """Actions a second that a simulation of dm_control or MuJoCo says it takes; None elsewhere."""
    while env is not None:
        for name in ("control_timestep", "dt"):
            seconds = getattr(env, name, None)
            seconds = seconds() if callable(seconds) else seconds
            if isinstance(seconds, int | float) and seconds > 0:
                return 1 / float(seconds)
        inner = getattr(env, "__dict__", {})
        env = inner.get("env", inner.get("_env"))
    return None


def find_checkpoint(
    path: Path, parts: Collection[str] = ("agent", BLUEPRINT), which: Which = "latest"
) -> Snapshot:
    """The checkpoint that a run's directory, a directory of checkpoints, or a checkpoint stands
    for, with these of its parts."""
    if (path / "manifest.json").is_file():
        return read_checkpoint(path, parts)
    for folder in (path / "ckpt" / "agent", path):
        snapshot = Checkpoint(folder).load(which, parts=parts)
        if snapshot is not None:
            return snapshot
    if which == "best":
        raise ConfigError(
            f"{path} holds no checkpoint with an evaluation score: train with eval_every or "
            "eval_envs, or take the latest one."
        )
    raise ConfigError(f"{path} holds no checkpoint: name a run's directory, or a checkpoint.")


def run_of(path: Path) -> Path:
    """The run's directory that a path to one of its checkpoints, as above, lies in; the path itself
    if that is no part of a run, such as a checkpoint that was copied."""
    if (path / "ckpt" / "agent").is_dir():
        return path
    absolute = path.absolute()
    folder = absolute.parent if (path / "manifest.json").is_file() else absolute
    return folder.parents[1] if folder.parts[-2:] == ("ckpt", "agent") else path


def maker_of_task(config: RunConfig, env: Task | None, *, trust: Trust) -> Task:
    """What makes the environment that a checkpoint was trained on, or another one that the user
    names.

    Raises:
        ConfigError: It is not part of this package, and the user has neither named nor trusted it.
    """
    from dreamfleet.envs.registry import maker_of  # a policy that is only loaded needs none

    if env is None:
        admit("The checkpoint", code_in([("task", config.task)]), trust=trust, may_state=["task"])
        env = config.task
    return maker_of(env) if isinstance(env, str) else env
