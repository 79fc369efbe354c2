"""Where programs run: devices, shardings, and batches brought there ahead of their use."""

from __future__ import annotations

import atexit
import logging
import math
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dreamfleet.agents.dreamer.config import ExecutionConfig
from dreamfleet.agents.registry import Gather
from dreamfleet.errors import ConfigError

log = logging.getLogger(__name__)

Item = TypeVar("Item")

AXIS, COPIES = "data", "copies"
"""Devices that share the parameters, if these are split, and groups of them with a copy each."""
# Smaller tensors are not worth the communication that splitting them costs.
_SHARD_FROM = 4096


def join_hosts(index: int, count: int, gather: Gather, address: str) -> None:
    """Make the devices of all hosts one set of devices, before anything else is done with JAX.

    JAX does not watch the hosts here: the supervisors notice and report a lost host.
    """
    port = 0
    if index == 0:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
    said = gather({"port": port, "loopback": _loopback()})
    port = said[0]["port"]
    host = f"[{address}]" if ":" in address else address
    here = address in ("localhost", "127.0.0.1", "::1")
    settings: Any = jax.config
    settings.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{host}:{port}",
        count,
        index,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"{host}:{port}" if here else None,
    )
    if len({each["loopback"] for each in said}) > 1 and jax.default_backend() == "cpu":
        check_own_name()
    _keep_programs()


def _keep_programs() -> None:
    """Let every host write to its compilation cache.

    JAX lets only process 0 write, for hosts that share a cache. But programs of hosts differ, so
    the others would compile at every start.
    """
    from jax._src import distributed  # there is no public setting

    jax.devices()  # numbered by the process id
    distributed.global_state.process_id = 0


def _loopback() -> str:
    """The same for all processes that reach each other at 127.0.0.1."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:  # another system than Linux
        return socket.gethostname()


def check_own_name() -> None:
    """Refuse a host name that other hosts cannot reach: the CPU's collectives (Gloo) use it.

    Raises:
        ConfigError: The name has no address, or a loopback address.
    """
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        raise ConfigError(
            f"This machine's name, {name}, has no address, and hosts connect by name: add its "
            "network address to /etc/hosts."
        ) from None
    if ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"This machine's name, {name}, resolves to {address}, which no other host can reach, "
            "and hosts connect by name: map it to its network address in /etc/hosts."
        )


@dataclass(frozen=True)
class Placement:
    """The training devices as a mesh, and the acting device."""

    mesh: Mesh
    policy_device: jax.Device
    shard_parameters: bool
    chosen: bool
    """Whether the training devices were named, and not taken because they are there."""

    @classmethod
    def of(cls, config: ExecutionConfig, devices: Sequence[jax.Device] | None) -> Placement:
        there = list(devices) if devices else _devices(config.train_platform)
        train = _of_every_host(there, config.train_devices) or there
        others = _devices(config.policy_platform) if config.policy_platform else there
        others = [each for each in others if each.process_index == jax.process_index()]
        named = _numbered(others, config.policy_devices, "policy_devices")
        mine = [each for each in train if each.process_index == jax.process_index()]
        policy = (named or (others if config.policy_platform else mine))[0]
        chosen = bool(devices or config.train_devices)
        mesh = _mesh(train, config.shard_over)
        return cls(mesh, policy, config.shard_parameters, chosen)

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
        return NamedSharding(self.mesh, _spec((COPIES, AXIS)))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, _spec())

    def parameters(self, tree: Any) -> Any:
        """A sharding for each leaf: a copy a device, or split along its widest fitting axis."""

        parts = self.mesh.shape[AXIS]

        def leaf(value: Any) -> NamedSharding:
            shape = np.shape(value)
            fitting = [axis for axis, size in enumerate(shape) if size % parts == 0]
            if not self.shard_parameters or not fitting or np.prod(shape) < _SHARD_FROM:
                return self.replicated
            axis = max(fitting, key=lambda axis: shape[axis])
            return NamedSharding(self.mesh, _spec(*[None] * axis, AXIS))

        return jax.tree.map(leaf, tree)

    def fitting(self, rows: int) -> Placement:
        """These devices, or, unless they were chosen, as many as batches of so many rows split
        over evenly.

        Raises:
            ConfigError: The devices were chosen, and a batch does not split over them.
        """
        local = self.count // jax.process_count()
        if rows % local == 0:
            return self
        if self.chosen or jax.process_count() > 1:
            raise ConfigError(
                f"A batch of {rows} sequences does not split over {local} devices: choose a "
                f"batch_size that is a multiple of {local}, or other execution.train_devices."
            )
        fewer = max(count for count in range(1, local) if rows % count == 0)
        log.warning(
            "Training on %d of %d devices, because a batch of %d sequences does not split over all "
            "of them: a batch_size that is a multiple of %d would use them.",
            *(fewer, local, rows, local),
        )
        devices = list(self.mesh.devices.flat)[:fewer]
        return replace(self, mesh=_mesh(devices, math.gcd(fewer, self.mesh.shape[AXIS])))

    def put(self, tree: Any, shardings: Any) -> Any:
        """Values that every host has, on the training devices."""
        if jax.process_count() == 1:
            return jax.device_put(tree, shardings)

        def put(value: Any, sharding: NamedSharding) -> jax.Array:
            if isinstance(value, jax.Array) and not value.is_fully_addressable:
                return value  # it is there already
            host = np.asarray(value)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(put, tree, shardings)

    def put_batch(self, batch: Any) -> Any:
        """The rows of this host on its training devices, as a part of the batch of all hosts."""
        if jax.process_count() == 1:
            return jax.device_put(batch, self.batch)
        place: Any = jax.make_array_from_process_local_data
        return jax.tree.map(lambda x: place(self.batch, x), batch)

    def own_rows(self, tree: Any) -> Any:
        """The rows of this host, of arrays whose rows are split over all; waits for nothing."""
        if jax.process_count() == 1:
            return tree
        local = Mesh(np.array(self.mesh.local_devices), (AXIS,))
        sharding = NamedSharding(local, _spec(AXIS))

        def rows(array: jax.Array) -> jax.Array:
            parts = [shard.data for shard in array.addressable_shards]
            shape = (sum(len(part) for part in parts), *array.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, parts)

        return jax.tree.map(rows, tree)


def _mesh(devices: Sequence[jax.Device], together: int) -> Mesh:
    """The devices in groups of so many, which share the parameters if these are split; 0 for one
    group."""
    count = together or len(devices)
    if len(devices) % count:
        raise ConfigError(
            f"execution.shard_over={count} does not divide the {len(devices)} devices that train: "
            "choose a number that does, or other execution.train_devices."
        )
    return Mesh(np.array(devices).reshape(-1, count), (COPIES, AXIS))


def _spec(*axes: str | tuple[str, ...] | None) -> jax.sharding.PartitionSpec:
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


def _of_every_host(devices: Sequence[jax.Device], numbers: Sequence[int]) -> list[jax.Device]:
    """The devices with these numbers on their host, of all hosts."""
    hosts = sorted({device.process_index for device in devices})
    return [
        device
        for host in hosts
        for device in _numbered(
            [each for each in devices if each.process_index == host], numbers, "train_devices"
        )
    ]


def _numbered(
    devices: Sequence[jax.Device], numbers: Sequence[int], setting: str
) -> list[jax.Device]:
    """The devices with these numbers."""
    for number in numbers:
        if number >= len(devices):
            raise ConfigError(
                f"execution.{setting} names device {number}, but there are {len(devices)} of the "
                f"platform {devices[0].platform}: use numbers from 0 to {len(devices) - 1}."
            )
    return [devices[number] for number in numbers]


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
    untyped: Any = jax
    alive = [array for array in untyped.live_arrays() if not array.is_deleted()]
    untyped.block_until_ready(alive)


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
