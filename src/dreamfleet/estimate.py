"""What a run will cost on this machine, estimated before it is started, and settings that suit it.

An update is counted in multiply-adds: those of its matrix products, and some for every number that
a layer puts out, because norms and activations take time too. How many of them a core makes a
second follows from a short matrix product, which is measured. The two factors were fitted to
measured training steps on CPUs, of which the model says 0.7 to 1.2 times the time:

    24 numbers, size 1m, 16 x 64, imagining from all steps           450 ms on two cores
    64 x 64 images, size 1m, 16 x 64, imagining from all steps     2,278 ms on two cores
    4 numbers, size cpu-tiny, 16 x 32, imagining from the last 8      71 ms on one core
    32 x 32 images, size cpu-tiny, 16 x 16, imagining from the last 8 190 ms on one core

Expect an estimate to be right within a factor of two on a machine that does nothing else.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dreamfleet.agents.dreamer.config import SIZES, DreamerConfig, ModelConfig, size_preset
from dreamfleet.agents.dreamer.features import Features, action_features, observed
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.formatting import clock
from dreamfleet.memory import memory_limit
from dreamfleet.presets import PRESETS
from dreamfleet.spaces import Space, without_logs, without_reset

Spaces = Mapping[str, Space]

_OUTPUT = 100.0
"""Multiply-adds that a number put out by a layer costs, in addition to its product."""
_EFFICIENCY = 0.7
"""Share of the speed of a large matrix product that an update reaches."""
_BACKWARD = 3.0
"""A layer that is trained costs this many times what it costs to compute its output."""
_MOST_CORES, _CORE_COST = 4, 5e9
"""Cores that an update uses at most, and multiply-adds that keep one of them busy: CartPole takes
as long on two cores as on one."""
_SIDE = 1024
_AGENT_BYTES, _SERVER_BYTES = 1.2e9, 0.15e9
"""The agent's process with JAX, replay or logger."""
PROCESS_BYTES = 0.04e9
"""A process of environments, before those."""
_PARAMETER_BYTES, _OPTIMIZER_BYTES = 4, 8
"""Of a weight: itself, and two moments."""
_UPDATING_BYTES = 20
"""Of a weight: its gradient, and all of the state a second time. On a processor a step makes a new
state from the old one; on an accelerator there are copies for the actor and for a checkpoint."""
_SAVING_BYTES = 12
"""Of a weight, while a checkpoint is written: the state of when it began."""
_PLAYING_BYTES = 8
"""Of a weight in the evaluator, which does not train: the one that plays, and the one that is read
from a checkpoint."""
_KEPT_BYTES = 6
"""Of every number that is kept for the gradient: four, and half of them once more."""
_SURE = 0.5
"""Share of the estimated activations that a compiled step exceeds in any case."""
_STAGES = 16
"""What both sides of an image have to be a multiple of, for networks of four stages."""
_LONG = 3 * 86400.0
_FEW_UPDATES, _ENOUGH_UPDATES = 1.0, 2.0
_QUICK = 1000.0
_MOST_RATIO = 512.0


@dataclass(frozen=True)
class Machine:
    """What is there to compute with."""

    core_speed: float
    """Multiply-adds a second of a large matrix product on one core."""
    cores: int
    memory: float
    """Bytes."""


class Layer(NamedTuple):
    """A layer: `inputs` times `outputs` weights, used `times` often for a step."""

    inputs: int
    outputs: int
    times: int = 1


Layers = list[Layer]


def cost(layers: Iterable[Layer]) -> float:
    """Multiply-adds of one forward pass for one step."""
    return sum(n.times * n.outputs * (n.inputs + _OUTPUT) for n in layers)


def weights(layers: Iterable[Layer]) -> int:
    """Parameters, without the few of convolutions."""
    return sum(n.inputs * n.outputs for n in layers if n.times == 1)


@dataclass(frozen=True)
class Parts:
    """The layers of all networks, by when they are computed."""

    world: Layers
    """Encoder, posterior, decoder: for each replayed step."""
    core: Layers
    """One step of the dynamics, with the prior."""
    predictions: Layers
    """Reward and continuation."""
    actor: Layers
    critic: Layers


def parts_of(model: ModelConfig, obs_space: Spaces, act_space: Spaces) -> Parts:
    """The layers of the default networks. An own encoder, decoder or dynamics counts as the default
    one."""
    features = Features.of(observed(obs_space))
    actions = action_features(act_space)
    deter, hidden, units = model.deter, model.hidden, model.units
    stoch = model.stoch * model.classes
    state, part = deter + stoch, deter // model.blocks
    choices = sum(each.width * (1 if each.discrete else 2) for each in actions)

    def mlp(inputs: int, width: int, layers: int) -> Layers:
        return [Layer(inputs, width), *[Layer(width, width)] * (layers - 1)]

    world, tokens = [], 0
    if features.vectors:
        width = features.vector_width
        world += [*mlp(width, units, model.encoder_layers)]
        world += [*mlp(state, units, model.decoder_layers), Layer(units, width)]
        tokens += units
    if features.images:
        rows, columns = features.smallest_image(model)
        widths = [features.image_channels, *(model.depth * mult for mult in model.mults)]
        pixels = features.images[0].height * features.images[0].width
        # On a CPU: products of patches, of cells of 2x2 pixels.
        reach = (model.kernel // 2 + 1) // 2
        cells = (2 * reach + 1) ** 2
        for stage, (few, many) in enumerate(itertools.pairwise(widths)):
            there = pixels // 4 ** (stage + 1)
            world += [Layer(4 * cells * few, 4 * many, there), Layer(cells * many, 4 * few, there)]
        start = rows * columns * widths[-1]
        world += [Layer(deter // model.decoder_blocks, start)]
        world += [Layer(stoch, 2 * units), Layer(2 * units, start)]
        tokens += start
    world += [*mlp(deter + tokens, hidden, model.posterior_layers), Layer(hidden, stoch)]
    core = [
        Layer(deter, hidden),
        Layer(stoch, hidden),
        Layer(sum(a.width for a in actions), hidden),
    ]
    core += [Layer(part + 3 * hidden, deter), *[Layer(part, deter)] * (model.dynamics_layers - 1)]
    core += [Layer(part, 3 * deter), *mlp(deter, hidden, model.prior_layers), Layer(hidden, stoch)]
    predictions = [*mlp(state, units, model.reward_layers), Layer(units, model.bins)]
    predictions += [*mlp(state, units, model.continue_layers), Layer(units, 1)]
    actor = [*mlp(state, units, model.actor_layers), Layer(units, choices)]
    critic = [*mlp(state, units, model.critic_layers), Layer(units, model.bins)]
    return Parts(world, core, predictions, actor, critic)


def update_cost(config: RunConfig, parts: Parts) -> float:
    """Multiply-adds of an update."""
    settings: DreamerConfig = config.agent_config
    loss = settings.loss
    steps = config.batch_size * config.batch_length
    starts = config.batch_size * (loss.imag_last or config.batch_length)
    imagined = starts * loss.imag_length
    trained = [*parts.world, *parts.core, *parts.predictions, *parts.critic]
    return (
        _BACKWARD * steps * cost(trained)
        + imagined * cost([*parts.core, *parts.actor])
        + (imagined + starts) * cost(parts.predictions)
        + (imagined + starts) * _BACKWARD * cost(parts.actor)
        # The critic is trained, and its exponential moving average computed.
        + (imagined + starts) * (_BACKWARD + 1) * cost(parts.critic)
    )


def column_bytes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> dict[str, int]:
    """Bytes of each key of a step in the replay."""
    agent = config.agent_type
    stored = agent.stored_space(obs_space, act_space, config.settings_of(agent))
    columns = {**without_logs(obs_space), **without_reset(act_space), **stored}
    return {key: space.dtype.itemsize * math.prod(space.shape) for key, space in columns.items()}


def step_bytes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> int:
    """Bytes of a step in the replay."""
    tick = 8
    return tick + sum(column_bytes(config, obs_space, act_space).values())


def replay_bytes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> float:
    """Bytes of the files of both replays when they are full, or when the run ends."""
    replay, needed = config.replay, 0.0
    step = step_bytes(config, obs_space, act_space)
    # The evaluator's environments store nothing.
    for envs, capacity in (
        (config.envs, replay.capacity),
        (config.actor_envs - config.envs, replay.evaluation_capacity),
    ):
        # Every environment has a file of its own that is not full.
        collected = config.steps * envs / config.envs + envs * replay.chunk
        kept = min(collected, capacity) if config.steps else capacity * bool(envs)
        needed += min(kept * step, replay.max_bytes or math.inf)
    return needed


@dataclass(frozen=True)
class Estimate:
    """What a run is expected to need and to reach."""

    updates: float | None
    """A second; None where it is not known: another agent, or an accelerator."""
    steps: float | None
    """Environment steps a second that the learner keeps up with; None for any number."""
    needs: Mapping[str, float]
    """Bytes of memory of all processes, by what they are for."""
    disk: float
    """Bytes of the replay when it is full. They are mapped from files, so memory need not hold
    them."""

    @property
    def memory(self) -> float:
        """Bytes of all processes."""
        return sum(self.needs.values())

    def seconds(self, config: RunConfig, collected: float = float("inf")) -> float | None:
        """How long the run takes if the environments make `collected` steps a second."""
        rate = min(collected, self.steps or float("inf"))
        return config.steps / rate if config.steps and np.isfinite(rate) else None


def estimate(
    config: RunConfig,
    obs_space: Spaces,
    act_space: Spaces,
    machine: Machine,
    env_bytes: float = 0.0,
) -> Estimate:
    """What a run will need, if nothing else runs on the machine.

    Args:
        config: The run.
        obs_space: Of its environments.
        act_space: Of its environments.
        machine: Where it runs.
        env_bytes: Memory of an environment.
    """
    here = not (config.remote_envs or config.offline)
    processes = -(-config.all_envs // config.envs_per_process) if here else 0
    playing = config.actors - 1 + (1 if config.eval_every else 0)  # processes that only act
    needs = {
        "environments": processes * PROCESS_BYTES + config.all_envs * env_bytes,
        "replay and logger": (1 + config.replay_shards) * _SERVER_BYTES,
    }
    disk = replay_bytes(config, obs_space, act_space)
    if not isinstance(config.agent_config, DreamerConfig):
        return Estimate(None, None, {"agent": _SERVER_BYTES * (1 + playing), **needs}, disk)
    parts = parts_of(config.agent_config.model, obs_space, act_space)
    count = weights(_layers(parts))
    acting = playing * (_AGENT_BYTES + _PLAYING_BYTES * count)
    needs = {
        **agent_needs(config, parts),
        "the agent's process": _AGENT_BYTES,
        **({"further actors and evaluator": acting} if playing else {}),
        **needs,
    }
    if accelerated(config.agent_config):
        return Estimate(None, None, needs, disk)
    needed = update_cost(config, parts)
    cores = min(machine.cores, _MOST_CORES, max(1.0, needed / _CORE_COST))
    updates = _EFFICIENCY * machine.core_speed * cores / needed
    replayed = updates * config.batch_size * config.batch_length
    steps = replayed / config.train_ratio if config.train_ratio > 0 else None
    return Estimate(updates, steps, needs, disk)


def _layers(parts: Parts) -> Layers:
    return [*parts.world, *parts.core, *parts.predictions, *parts.actor, *parts.critic]


def agent_needs(config: RunConfig, parts: Parts) -> dict[str, float]:
    """Bytes of weights, optimizer, their copies, and of what an update keeps for the gradient."""
    every = _layers(parts)
    count, kept = weights(every), sum(layer.outputs * layer.times for layer in every)
    steps = config.host_batch * config.batch_length
    return {
        "parameters": _PARAMETER_BYTES * count,
        "optimizer": _OPTIMIZER_BYTES * count,
        "updates and checkpoints": (_UPDATING_BYTES + _SAVING_BYTES) * count,
        "activations": _KEPT_BYTES * steps * kept,
    }


def accelerated(settings: DreamerConfig) -> bool:
    """Whether JAX may compute on something other than the processor. Asked without loading JAX."""
    chosen = settings.execution.train_platform or os.environ.get("JAX_PLATFORMS", "")
    if chosen:
        return chosen != "cpu"
    return any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))


@cache
def this_machine() -> Machine:
    """This machine. The product is counted in processor time: other programs do not slow it."""
    square = np.ones((_SIDE, _SIDE), np.float32)
    times = []
    for _ in range(4):
        start = time.process_time()
        square @ square
        times.append(time.process_time() - start)
    has = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has else os.cpu_count() or 1
    return Machine(_SIDE**3 / max(min(times), 1e-9), cores, memory_limit())


# --- settings that suit a task -------------------------------------------------------------------


@dataclass(frozen=True)
class Suggestion:
    """Settings for a task, and what they lead to."""

    preset: str
    changes: Mapping[str, Any]
    config: RunConfig
    estimate: Estimate

    def flags(self) -> str:
        """As they are typed."""
        words = ["--preset", self.preset] if self.preset != "default" else []
        for name, value in self.changes.items():
            if name != "task":
                words.append(f"--{name.replace('_', '-')}")
                words += _pairs(value) if isinstance(value, dict) else [f"{value:g}"]
        return shlex.join(words)

    def command(self) -> str:
        """A line to paste."""
        task = f"dreamfleet train --task {shlex.quote(self.config.task)}"
        return f"{task} {self.flags()}".rstrip()


def _pairs(options: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for name, value in options.items()
    ]


def suggest(
    task: str,
    options: Mapping[str, Any],
    obs_space: Spaces,
    act_space: Spaces,
    machine: Machine,
    *,
    steps_per_second: float = float("inf"),
    env_bytes: float = 0.0,
    disk: float = float("inf"),
    single: bool = False,
) -> Suggestion:
    """Settings for a task on this machine.

    Args:
        task: Its name.
        options: Those that the environment was made with.
        obs_space: Of the environment.
        act_space: Of the environment.
        machine: Where it will be trained.
        steps_per_second: That one environment makes.
        env_bytes: Memory of an environment.
        disk: Bytes that are free.
        single: Whether there can be only one environment.
    """
    images = [space for space in observed(obs_space).values() if space.image]
    preset = "pixels" if images else "dmc_cpu" if task.startswith("dmc:") else "default"
    base = PRESETS[preset]
    changes: dict[str, Any] = {"task": task}
    if single:
        changes["envs"] = 1
    elif steps_per_second < _QUICK / base.envs:
        # Stepped one after the other they would keep the agent waiting.
        changes["envs_per_process"] = -(-base.envs // max(1, machine.cores))
    sizes: list[tuple[int, int] | None] = [*_sizes(images, options)] if images else []
    sizes = sizes or [None]
    for size in sizes:
        given = dict(options)
        if size:
            given["size"] = size
        own = {name: value for name, value in given.items() if base.env_options.get(name) != value}
        settings = {**changes, **({"env_options": own} if own else {})}
        config = base.changed({**settings, "env_options": {**base.env_options, **own}})
        seen = {key: _resized(space, size) for key, space in obs_space.items()}
        found = estimate(config, seen, act_space, machine, env_bytes)
        if found.updates is None or found.updates >= _ENOUGH_UPDATES:
            break
    collected = fleet_speed(config, steps_per_second, machine)
    if found.steps and found.steps > 2 * collected:
        # The learner would wait for the environments: it may learn more from every step.
        ratio = config.train_ratio * found.steps / collected
        settings["train_ratio"] = min(_MOST_RATIO, 2.0 ** int(np.log2(ratio)))
    if found.disk > 0.8 * disk:
        fitting = 0.8 * disk / step_bytes(config, seen, act_space)
        digits = 10 ** max(0, len(str(int(fitting))) - 2)
        settings["replay.capacity"] = max(1, int(fitting) // digits * digits)
    config = base.changed({**settings, "env_options": config.env_options})
    return Suggestion(
        preset, settings, config, estimate(config, seen, act_space, machine, env_bytes)
    )


def fleet_speed(config: RunConfig, steps_per_second: float, machine: Machine) -> float:
    """Steps a second of all training environments: those of a process step one after the other,
    and processes share the cores."""
    processes = -(-config.envs // config.envs_per_process)
    return steps_per_second * min(processes, machine.cores)


def _sizes(images: list[Space], options: Mapping[str, Any]) -> Iterable[tuple[int, int]]:
    """Heights and widths to try: the environment's own if the networks take it and the person asked
    for it or it is small, then smaller ones."""
    height, width = images[0].shape[:2]
    same = all(image.shape[:2] == (height, width) for image in images)
    fits = same and not (height % _STAGES or width % _STAGES)
    if fits and ("size" in options or height * width <= 64**2):
        yield height, width
    if "size" not in options:
        yield from (size for size in ((64, 64), (32, 32)) if size[0] * size[1] < height * width)
    if not fits and height * width <= 32**2:
        yield 32, 32


def _resized(space: Space, size: tuple[int, int] | None) -> Space:
    return Space(np.uint8, (*size, space.shape[2])) if size and space.image else space


def size_name(model: ModelConfig) -> str:
    """The name of a size, or its widths."""
    names = (name for name in SIZES if size_preset(name) == model)
    return next(names, f"deter {model.deter}, units {model.units}")


# --- what a run is warned of ---------------------------------------------------------------------


def forecast(
    config: RunConfig,
    obs_space: Spaces,
    act_space: Spaces,
    env_bytes: float = 0.0,
    machine: Machine | None = None,
) -> str:
    """What memory and disk a run will need, in a sentence; estimates, before anything is made."""
    machine = machine or this_machine()
    found = estimate(config, obs_space, act_space, machine, env_bytes)
    words = ", ".join(f"{name} {_bytes(count)}" for name, count in found.needs.items())
    settings = config.agent_config
    there = f" of {_bytes(machine.memory)}"
    if isinstance(settings, DreamerConfig) and accelerated(settings):
        there = ", a part of it on the accelerator"
    return (
        f"Memory, estimated: {words}; about {_bytes(found.memory)}{there}. The replay takes up to "
        f"{_bytes(found.disk)} of disk, of which memory holds what there is room for."
    )


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def warnings(
    config: RunConfig, obs_space: Spaces, act_space: Spaces, machine: Machine | None = None
) -> list[str]:
    """Sentences about a run that will hardly work well on this machine, each with the fix.

    Raises:
        ConfigError: The agent alone is larger than the memory.
    """
    if not isinstance(config.agent_config, DreamerConfig):
        return []
    machine = machine or this_machine()
    found = estimate(config, obs_space, act_space, machine)
    return [
        *memory_warnings(config, obs_space, act_space, machine),
        *_of_speed(config, found, obs_space, act_space, machine),
    ]


def memory_warnings(
    config: RunConfig, obs_space: Spaces, act_space: Spaces, machine: Machine | None = None
) -> list[str]:
    """Those about memory.

    Raises:
        ConfigError: The agent alone is larger than the memory.
    """
    settings = config.agent_config
    if not isinstance(settings, DreamerConfig) or accelerated(settings):
        return []  # an accelerator has memory of its own: the agent looks once it is compiled
    machine = machine or this_machine()
    needs = agent_needs(config, parts_of(settings.model, obs_space, act_space))
    fix = (
        "choose a smaller --dreamer.model, --batch-size or --batch-length, or make the "
        "observations smaller"
    )
    # What every step has at once, whatever it is compiled to: the state, and the one that replaces
    # it. Activations are estimated, so only what they surely exceed counts.
    state, kept = needs["parameters"] + needs["optimizer"], _SURE * needs["activations"]
    least = 2 * state + kept
    exact = not settings.execution.shard_parameters and not config.named_code
    if least > machine.memory and exact:
        raise ConfigError(
            f"The parameters take {_bytes(needs['parameters'])}, the optimizer "
            f"{_bytes(needs['optimizer'])}, an update has both twice, and activations of more than "
            f"{_bytes(kept)}, together {_bytes(least)}, and this machine has "
            f"{_bytes(machine.memory)} of memory: {fix}."
        )
    found = estimate(config, obs_space, act_space, machine)
    if found.memory <= machine.memory:
        return []
    return [
        f"Warning: about {found.memory / 1e9:.1f} GB of memory are expected (an estimate), and "
        f"this machine has {machine.memory / 1e9:.1f} GB: {fix}."
    ]


def _of_speed(
    config: RunConfig, found: Estimate, obs_space: Spaces, act_space: Spaces, machine: Machine
) -> Iterable[str]:
    if found.updates is None:
        return
    seconds, settings = found.seconds(config), config.agent_config
    images = any(space.image for space in observed(obs_space).values())
    for_vectors = images and settings == PRESETS["default"].agent_config
    long = seconds is not None and seconds > _LONG
    if found.updates >= _FEW_UPDATES and not long and not for_vectors:
        return
    what = f"Warning: about {found.updates:.2g} updates/s are expected on this machine"
    if found.steps:
        what += f" ({found.steps:.2g} environment steps/s"
        what += f", {clock(seconds)} for all steps)" if seconds else ")"
    better = suggest(config.task, {}, obs_space, act_space, machine)
    ours, theirs = found.steps or found.updates, better.estimate.steps or 0.0
    if for_vectors:
        what += " with the preset for vectors"
        fix = f"{better.flags()} is for images and makes about {theirs:.2g} steps/s"
    elif theirs > 2 * ours and better.flags():
        fix = f"{better.flags()} makes about {theirs:.2g} steps/s"
    elif config.train_ratio > 0:
        fix = "lower --train-ratio, --steps, the batch or the model"
    else:
        fix = "make the batch or the model smaller"
    yield f"{what}, an estimate: {fix}."
