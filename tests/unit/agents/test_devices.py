"""Several devices give the numbers of one, from the same code."""

import socket
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.agents.dreamer.runtime.devices import check_own_name
from dreamfleet.errors import ConfigError

PROGRAM = """
import sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, TESTS)
from agent_worlds import ACTIONS, IMAGE as spaces, config, observations, random_batch
from dataclasses import replace
from dreamfleet.agents import Dreamer
from dreamfleet.agents.dreamer.runtime.devices import Placement
from dreamfleet.agents.dreamer.imagination import IMAGINATION
from collectives import collectives_in_loops
from dreamfleet.errors import ConfigError

from own_parts import BARLOW, OWN_LOSSES

# Losses of every kind: of a step, of a row, and such that rows of the whole batch meet in.
kinds = OWN_LOSSES | BARLOW
base = config
config = lambda **options: replace(base(**options), loss=replace(base().loss, extra=kinds))
batch = random_batch(spaces, ACTIONS, size=8)

def run(devices, **options):
    agent = Dreamer(spaces, ACTIONS, config(**options), devices=devices)
    # Two updates: the second is the first that moves parameters. More would let a rounding error
    # tip a sample of the discrete latent state over, after which two runs rightly differ.
    carry, outs, metrics = agent.train(agent.init_train(8), batch)
    _, _, metrics = agent.train(carry, batch)
    return agent, outs, metrics

one, outs, metrics = run(jax.devices()[:1])
assert {"loss/Forward", "loss/Contrast", "loss/Quiet", "loss/Barlow"} < metrics.keys()

def compare(sharded, copies=1):
    several, outs2, metrics2 = run(
        jax.devices(), shard_parameters=sharded, shard_over=8 // copies if copies > 1 else 0
    )
    assert len(outs2["replay"]["dyn/deter"].sharding.device_set) == 8
    for key in ("dyn/deter", "dyn/stoch"):
        np.testing.assert_allclose(
            outs["replay"][key], outs2["replay"][key], rtol=1e-3, atol=1e-4, err_msg=key
        )
    for name in metrics:
        np.testing.assert_allclose(
            metrics[name], metrics2[name], rtol=2e-3, atol=1e-4, err_msg=name
        )
    left, right = one.save(), several.save()
    assert left.keys() == right.keys()
    leaves = jax.tree.leaves(several._state)
    split = [leaf for leaf in leaves if leaf.addressable_shards[0].data.size < leaf.size]
    assert bool(split) == sharded, len(split)
    assert all(leaf.size // leaf.addressable_shards[0].data.size == 8 // copies for leaf in split)
    needed, alone = several.memory(), one.memory()
    whole = alone["parameters"] + alone["optimizer"]
    each = needed["parameters"] + needed["optimizer"]
    assert each < (0.9 if sharded else 1.01) * whole, (each, whole)  # small tensors are not split
    assert needed["activations"] < 0.5 * alone["activations"]
    inside = collectives_in_loops(several._train_program.newest.as_text())
    assert any(IMAGINATION in name for name in inside) and not any(inside.values()), inside
    several.load(left)
    for key, value in several.save().items():
        np.testing.assert_array_equal(value, left[key])
    several.policy(several.init_policy(2), observations(spaces, 2))
    try:
        several.init_train(6)
    except ConfigError as error:
        assert "multiple of 8" in str(error)
    else:
        raise AssertionError("6 rows cannot split over 8 devices")

compare(sharded=False)
compare(sharded=True, copies=2)  # groups that are fully sharded each; `bench agent` has one group

# What would be found if it were there.
def looped(x):
    return jax.lax.scan(lambda total, _: (total + (x * total).sum(), None), x[0], None, length=3)[0]

rows = jax.device_put(np.ones(8, np.float32), Placement.of(config().execution, None).batch)
text = jax.jit(looped).lower(rows).compile().as_text()
assert sum(collectives_in_loops(text).values()) > 0, text

# Without a choice of devices: as many as a batch splits over.
for count, expected in enumerate((1, 2, 2, 4, 4, 4, 4, 8), 1):
    placement = replace(Placement.of(config().execution, jax.devices()[:count]), chosen=False)
    assert placement.fitting(16).count == expected, count
agent = Dreamer(spaces, ACTIONS, config(shard_parameters=True))
assert agent.init_train(6) == ()
assert len(agent._state.updates.sharding.device_set) == 6
agent._copy_program(agent._state.nets)

# Chosen ones, and one that only acts.
options = {"train_devices": (1, 3), "policy_devices": (7,)}
agent = Dreamer(spaces, ACTIONS, config(**options))
devices = jax.devices()
agent.init_train(4)
assert agent._state.updates.sharding.device_set == {devices[1], devices[3]}
assert jax.tree.leaves(agent._publisher.newest())[0].devices() == {devices[7]}
agent._updates = 1
agent.settle()
assert jax.tree.leaves(agent._publisher.newest())[0].devices() == {devices[7]}
_, _, outs = agent.policy(agent.init_policy(2), observations(spaces, 2))
for wrong, words in (
    ({"train_devices": (8,)}, "use numbers from 0 to 7"),
    ({"train_devices": (1, 1)}, "names a device twice"),
    ({"shard_parameters": True, "shard_over": 3}, "does not divide the 8 devices"),
    ({"policy_devices": (9,)}, "names device 9, but there are 8 of the platform cpu"),
):
    try:
        Dreamer(spaces, ACTIONS, config(**wrong))
    except ConfigError as error:
        assert words in str(error), error
    else:
        raise AssertionError(wrong)
try:
    agent.init_train(5)
except ConfigError as error:
    assert "multiple of 2, or other execution.train_devices" in str(error)
"""


def test_eight_devices_equal_one() -> None:
    """Data-parallel, and with parameters that are split within groups."""
    source = PROGRAM.replace("TESTS", repr(str(Path(__file__).parents[2])))
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


def test_a_program_ends_in_order_while_batches_are_brought_to_the_device() -> None:
    program = """
import itertools, jax, numpy as np
from dreamfleet.agents.dreamer.runtime.devices import prefetch
batch = {str(i): np.zeros(1000, np.float32) for i in range(20)}
batches = prefetch(itertools.repeat(batch), lambda b: jax.tree.map(jax.device_put, b), 10**6)
for _ in range(20):
    next(batches)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.5", nullcontext()),
        ("fe80::1%eth0", nullcontext()),
        ("127.0.1.1", pytest.raises(ConfigError, match=r"node7, resolves to 127\.0\.1\.1")),
        ("::1", pytest.raises(ConfigError, match="map it to its network address")),
        ("", pytest.raises(ConfigError, match="node7, has no address, and hosts connect by name")),
    ],
)
def test_hosts_on_other_machines_need_a_name_that_leads_there(
    address: str, expected: AbstractContextManager[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*_: object) -> list[Any]:
        if not address:
            raise socket.gaierror("unknown")
        return [(None, None, 0, "", (address, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", found)
    with expected:
        check_own_name()
