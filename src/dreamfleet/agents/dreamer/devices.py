"""Where programs run: devices, shardings, and batches brought there ahead of their use."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dreamfleet.agents.dreamer.config import ExecutionConfig
from dreamfleet.errors import ConfigError

Item = TypeVar("Item")

AXIS = "data"
# Smaller tensors are not worth the communication that splitting them costs.
_SHARD_FROM = 4096


@dataclass(frozen=True)
class Placement:
    """The training devices as a mesh, and the acting device."""

    mesh: Mesh
    policy_device: jax.Device
    shard_parameters: bool

    @classmethod
    def of(cls, config: ExecutionConfig, devices: Sequence[jax.Device] | None) -> Placement:
        train = list(devices) if devices else _devices(config.train_platform)
        policy = _devices(config.policy_platform)[0] if config.policy_platform else train[0]
        if policy.process_index != jax.process_index():
            policy = jax.local_devices(backend=policy.platform)[0]
        return cls(Mesh(np.array(train), (AXIS,)), policy, config.shard_parameters)

    @property
    def count(self) -> int:
        return int(self.mesh.size)

    @property
    def platform(self) -> str:
        """Of the training devices."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def batch(self) -> NamedSharding:
        """Rows split over the devices."""
        return NamedSharding(self.mesh, _spec(AXIS))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, _spec())

    def parameters(self, tree: Any) -> Any:
        """A sharding for each leaf: a copy a device, or split along its widest fitting axis."""

        def leaf(value: Any) -> NamedSharding:
            shape = np.shape(value)
            fitting = [axis for axis, size in enumerate(shape) if size % self.count == 0]
            if not self.shard_parameters or not fitting or np.prod(shape) < _SHARD_FROM:
                return self.replicated
            axis = max(fitting, key=lambda axis: shape[axis])
            return NamedSharding(self.mesh, _spec(*[None] * axis, AXIS))

        return jax.tree.map(leaf, tree)

    def check_rows(self, rows: int) -> None:
        local = self.count // jax.process_count()
        if rows % local:
            raise ConfigError(
                f"A batch of {rows} sequences does not split over {local} devices: choose a "
                f"batch_size that is a multiple of {local}."
            )

    def put_batch(self, batch: Any) -> Any:
        """The batch on the training devices, its rows split over them."""
        if jax.process_count() == 1:
            return jax.device_put(batch, self.batch)
        place: Any = jax.make_array_from_process_local_data
        return jax.tree.map(lambda x: place(self.batch, x), batch)


def _spec(*axes: str | None) -> jax.sharding.PartitionSpec:
    untyped: Any = jax.sharding.PartitionSpec
    spec: jax.sharding.PartitionSpec = untyped(*axes)
    return spec


def _devices(platform: str) -> list[jax.Device]:
    try:
        return list(jax.devices(platform or None))
    except RuntimeError as error:
        raise ConfigError(
            f"There is no {platform!r} device here ({error}): use cpu, or install the JAX extra "
            "for it."
        ) from None


@dataclass(frozen=True)
class _Failure:
    error: BaseException


_END = object()
_inside_jax = threading.Lock()


@atexit.register
def _leave_jax() -> None:
    """Wait until no thread is inside of JAX, and let none in again: one that needs Python after its
    end would abort the process."""
    _inside_jax.acquire()
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


def prefetch(items: Iterable[Any], prepare: Callable[[Any], Item], depth: int) -> Iterator[Item]:
    """prepare(item) for every item, up to `depth` ahead; errors surface where they would have.

    Closing the iterator (or dropping it) ends the thread.
    """
    ready: queue.Queue[Any] = queue.Queue()
    room = threading.Semaphore(depth)
    closed = threading.Event()

    def work() -> None:
        try:
            iterator = iter(items)
            while True:
                room.acquire()
                if closed.is_set():
                    return
                item = next(iterator)
                with _inside_jax:
                    ready.put(prepare(item))
        except StopIteration:
            ready.put(_END)
        except BaseException as error:
            ready.put(_Failure(error))

    threading.Thread(target=work, name="prefetch", daemon=True).start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            room.release()
            yield item
    finally:
        closed.set()
        room.release()
