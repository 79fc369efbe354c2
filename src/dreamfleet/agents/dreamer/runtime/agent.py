"""DreamerV3 behind the agent protocol."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Carry, Flat
from dreamfleet.agents.dreamer.acting import ActingNetworks
from dreamfleet.agents.dreamer.config import DreamerConfig
from dreamfleet.agents.dreamer.interfaces import stored_space
from dreamfleet.agents.dreamer.runtime import nonfinite
from dreamfleet.agents.dreamer.runtime.devices import Placement, prefetch
from dreamfleet.agents.dreamer.runtime.dreaming import DreamerWorldModel
from dreamfleet.agents.dreamer.runtime.footprint import check_fit, check_state, footprint, has_room
from dreamfleet.agents.dreamer.runtime.player import ActingAgent
from dreamfleet.agents.dreamer.runtime.programs import COMPILE_QUICKLY, Program
from dreamfleet.agents.dreamer.runtime.publishing import Snapshot
from dreamfleet.agents.dreamer.runtime.report import compose_video, report_step
from dreamfleet.agents.dreamer.runtime.saving import (
    current_names,
    named_leaves,
    own_share,
    replace_leaves,
    select_matching,
    to_flat,
)
from dreamfleet.agents.dreamer.train import TrainState, init_state, state_shapes, train_step
from dreamfleet.agents.errors import NonFiniteError
from dreamfleet.spaces import Space, without_logs

log = logging.getLogger(__name__)

_AHEAD = 3  # steps that may be under way before the oldest is checked


class _Step(NamedTuple):
    """A step whose health was not looked at yet."""

    healthy: Any
    """Whether all was well, as an array that may still be worked out."""
    batch: Mapping[str, Any]


class Dreamer(ActingAgent):
    """World model, actor and critic, trained on replayed sequences.

    One actor thread may call `policy` while one learner thread calls everything else. `train`
    returns results that are still being computed; reading them waits. NaN and infinity are noticed
    up to three steps later.
    """

    def __init__(
        self,
        obs_space: Mapping[str, Space],
        act_space: Mapping[str, Space],
        config: DreamerConfig | None = None,
        *,
        seed: int = 0,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        config = config or DreamerConfig()
        super().__init__(
            obs_space, act_space, config, Placement.of(config.execution, devices), seed
        )
        self.stored_space = stored_space(config.model)
        self.context = config.execution.replay_context
        spaces = (self.obs_space, self.act_space)
        sharded = config.execution.shard_parameters
        check_state(state_shapes(config, *spaces), self._placement.mesh, sharded=sharded)
        state = init_state(config, *spaces, seed)
        self._shardings = self._placement.parameters(state)
        self._state: TrainState = self._placement.put(state, self._shardings)
        if host := jax.process_index():  # hosts act with random numbers of their own
            self._action_seed = np.random.default_rng([seed, 1, host]).integers(
                2**32, size=2, dtype=np.uint32
            )
        self._unchecked: deque[_Step] = deque()
        self._failure: NonFiniteError | None = None
        self._build_programs()
        self._act_with(self._snapshot())

    def _build_programs(self) -> None:
        config, place = self.config, self._placement
        state, batch, whole = self._shardings, place.batch, place.replicated
        on_cpu = place.platform == "cpu"
        # On a CPU the old state stays whole while the new one is made, so that a checkpoint can be
        # written from it without a copy that training would wait for. The memory of accelerators
        # is scarce, and they copy a state in no time.
        self._donates = not on_cpu
        self._train_program = Program(
            "train",
            functools.partial(_train_step, config=config),
            donate_first=self._donates,
            out_shardings=(state, whole, batch, whole),
            mesh=place.mesh,
        )
        self._report_program = Program(
            "report",
            functools.partial(report_step, config=config),
            out_shardings=(whole, whole),
            mesh=place.mesh,
            compiler_options=COMPILE_QUICKLY if on_cpu else None,
        )
        self._keep_program = Program(
            "keep", lambda state: jax.tree.map(jnp.copy, jax.tree.leaves(state)),
            out_shardings=jax.tree.leaves(state),
        )  # fmt: skip
        dtype = config.execution.compute_dtype
        self._copy_program = Program(
            "publish",
            lambda nets: jax.tree.map(jnp.copy, ActingNetworks.of(nets, dtype)),
            out_shardings=whole,
        )

    # --- learning --------------------------------------------------------------------------------

    def init_train(self, n: int) -> Carry:
        self._fit(n)
        return ()  # every sequence starts from the states that are stored with it

    init_report = init_train

    def _fit(self, rows: int) -> None:
        """Train on as many devices as batches of so many rows split over."""
        placement = self._placement.fitting(rows)
        if placement is not self._placement:
            self._placement = placement
            self._shardings = placement.parameters(self._state)
            self._state = jax.device_put(self._state, self._shardings)
            self._build_programs()

    def train(self, carry: Carry, batch: Mapping[str, Any]) -> tuple[Carry, Any, Any]:
        self._check_health(unless_newest=_AHEAD)
        batch = self._on_devices(batch)
        self._state, healthy, outs, metrics = self._train_program(self._state, batch)
        self._unchecked.append(_Step(healthy, batch))
        self._updates += 1
        self._publisher.count(self._updates)
        due = self._publisher.published + self.config.execution.publish_every
        # Several hosts publish at the same updates, however busy one of them is.
        if self._updates >= due and (_several() or not self._publisher.busy):
            self._publisher.publish(self._snapshot())
        return carry, self._placement.own_rows(outs), metrics

    def settle(self) -> None:
        """Act with the parameters of the last update from now on; waits for them."""
        if self._publisher.published < self._updates:
            self._publisher.publish(self._snapshot())
        self._publisher.wait()

    def _check_health(self, unless_newest: int = 0) -> None:
        """Stop if a step met NaN or infinity. Waits for all steps but the newest ones, so that the
        devices have work while the host looks; of those, it looks at the ones that are done.

        Nothing is updated after such a step, so the parameters are those from before it.
        """
        if self._failure is not None:
            raise self._failure
        steps = self._unchecked
        # Several hosts look at the same updates, so that all of them stop at the same one.
        while steps and (
            len(steps) > unless_newest or (not _several() and steps[0].healthy.is_ready())
        ):
            step = steps.popleft()
            if not bool(step.healthy):
                self._failure = self._explain(step)
                raise self._failure

    def _explain(self, step: _Step) -> NonFiniteError:
        """What was wrong with a step, with its batch written to a file."""
        config, batch = self.config, self._placement.own_rows(step.batch)
        bad = "a loss or a gradient"  # of some host
        if not _several():
            bad = nonfinite.first_bad_tensor(self._state, batch, config)
        folder = Path(config.execution.dump_dir or ".").expanduser()
        dump = nonfinite.write_dump(folder, batch, bad, int(self._state.updates))
        return NonFiniteError(
            f"Training stopped after {int(self._state.updates)} updates: {bad} holds NaN or "
            f"infinity. The parameters before this update are kept; the batch is in {dump}."
        )

    @contextmanager
    def trace(self, folder: Path) -> Iterator[None]:
        """Write a profile of all that is computed meanwhile, also of steps that are under way."""
        profiler: Any = jax.profiler
        wait: Any = jax.block_until_ready
        options = profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow the steps down; py-spy sees Python
        wait(self._state)
        profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
        try:
            yield
            wait(self._state)
        finally:
            profiler.stop_trace()

    def report(self, carry: Carry, batch: Mapping[str, Any]) -> tuple[Carry, dict[str, Any]]:
        batch = self._on_devices(batch)
        metrics, frames = self._report_program(self._state, batch)
        result: dict[str, Any] = {k: float(v) for k, v in jax.device_get(metrics).items()}
        # Frames are those of the first rows, which host 0 has.
        for name, predicted in jax.device_get(frames).items() if not jax.process_index() else ():
            truth = np.asarray(self._placement.own_rows(batch[name]))
            prediction = predicted[: len(truth)]
            truth = truth[: len(prediction), -prediction.shape[1] :]
            result[f"openloop/{name}"] = compose_video(truth, prediction)
        return carry, result

    def stream(self, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Iterator[Mapping[str, Any]]:
        return prefetch(batches, self._on_devices, self.config.execution.prefetch)

    def _on_devices(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        first = next(iter(batch.values()))
        if isinstance(first, jax.Array):
            return dict(batch)
        placed: dict[str, Any] = self._placement.put_batch(without_logs(batch))
        return placed

    def _snapshot(self) -> Snapshot:
        dtype, nets = self.config.execution.compute_dtype, self._state.nets
        as_it_is = not self._donates and self._placement.count == 1 and dtype == "float32"
        # A copy where the next step overwrites the state.
        acting = ActingNetworks.of(nets, dtype) if as_it_is else self._copy_program(nets)
        return Snapshot(acting, self._updates, time.monotonic())

    def world_model(self) -> DreamerWorldModel:
        """What it has learned so far, for a dream."""
        return DreamerWorldModel(self._state.nets, self.config, self._placement.policy_device)

    # --- compiling ahead of time -----------------------------------------------------------------

    def compile(
        self,
        *,
        batch_size: int,
        batch_length: int,
        report_length: int | None = None,
        policy_batches: Sequence[int] = (),
    ) -> None:
        """Compile everything before data collection starts."""
        start = time.perf_counter()
        lengths = [(self._train_program, batch_length)]
        if report_length:
            lengths.append((self._report_program, report_length))
        self.init_train(batch_size)

        def build(program: Program, length: int) -> None:
            batch = self._placement.put_batch(self.example_batch(batch_size, length))
            program.compile(self._state, batch)

        # Compiling is sequential in parts, so that two programs side by side finish sooner.
        with ThreadPoolExecutor(len(lengths)) as pool:
            for done in [pool.submit(build, *each) for each in lengths]:
                done.result()
        check_fit(self.memory(), self._placement.platform)
        if self._donates:
            self._keep_program.compile(self._state)
        self.compile_policy(policy_batches)
        give_memory_back()
        log.info("Compiled the agent in %.1f s", time.perf_counter() - start)

    def memory(self) -> dict[str, float]:
        """What training needs on each device, in bytes; see `footprint`."""
        return footprint(self._state, self._train_program.newest, self._placement.mesh)

    def example_batch(self, batch_size: int, batch_length: int) -> dict[str, NDArray[Any]]:
        """A batch of zeros with the keys, shapes and dtypes that `train` expects."""
        steps = (batch_size, batch_length + self.context)
        spaces = {**self.obs_space, **self.act_space, **self.stored_space}
        return {
            **{key: np.zeros((*steps, *s.shape), s.dtype) for key, s in spaces.items()},
            "stepid": np.zeros((*steps, 20), np.uint8),
        }

    # --- saving ----------------------------------------------------------------------------------

    def save(self) -> Flat:
        """Parameters, optimizer, normalisers, random keys and counters; with several hosts, the
        part of them that is this one's."""
        self._check_health()
        if not _several():
            return {**to_flat(self._state), **self._counters()}
        mine: Flat = dict(own_share(self._state, jax.process_index(), jax.process_count()))
        return {**mine, **({} if jax.process_index() else self._counters())}

    def save_later(self) -> Callable[[], Flat]:
        """What returns the state of now, called by another thread, while training goes on.

        It does not wait for steps under way. On an accelerator the state is copied there if
        there is room for it; otherwise, and with several hosts, this is `save`.
        """
        self._check_health(unless_newest=_AHEAD)
        state, counters = self._state, self._counters()
        if _several() or (self._donates and not has_room(state, self._placement.mesh)):
            saved = self.save()
            return lambda: saved
        if self._donates:
            copies = self._keep_program(state)
            state = jax.tree.unflatten(jax.tree.structure(state), copies)

        def flat() -> Flat:
            # A step that met NaN has changed nothing but this: it is the state from before.
            return {**to_flat(state), **counters, "healthy": np.ones((), bool)}

        return flat

    def _counters(self) -> Flat:
        return {
            "counters/updates": self._updates,
            "counters/actions": self._actions,
            "counters/action_seed": self._action_seed.copy(),
        }

    def load(self, state: Mapping[str, Any], regex: str | None = None) -> None:
        there = {**named_leaves(self._state), **self._counters()}
        chosen = select_matching(there, current_names(state), regex)
        self._updates = int(chosen.pop("counters/updates", np.asarray(self._updates)))
        self._actions = int(chosen.pop("counters/actions", np.asarray(self._actions)))
        action_seed = chosen.pop("counters/action_seed", self._action_seed)
        if not jax.process_index():  # the others have their own
            self._action_seed = action_seed
        self._state = self._placement.put(replace_leaves(self._state, chosen), self._shardings)
        self._unchecked.clear()
        self._failure = None
        self._act_with(self._snapshot())


def _several() -> bool:
    """Whether several hosts learn together."""
    return int(jax.process_count()) > 1


def _train_step(state: TrainState, *args: Any, config: DreamerConfig) -> tuple[Any, ...]:
    """A training step, and whether all is well: the next step overwrites the state before it is
    looked at."""
    new, *rest = train_step(state, *args, config=config)
    return (new, jnp.copy(new.healthy), *rest)


def give_memory_back() -> None:
    """Give back what compiling took, a gigabyte or two: the C library keeps it otherwise."""
    gc.collect()
    with suppress(OSError, AttributeError):  # one without this call
        ctypes.CDLL(None).malloc_trim(0)
