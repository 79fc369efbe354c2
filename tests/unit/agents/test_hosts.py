"""Several processes that learn together give the numbers of one, and save one checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from agent_worlds import ACTIONS, VECTOR, config, random_batch

from dreamfleet.agents import Dreamer
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.roles.hosts import Meeting
from dreamfleet.transport import Server

PROGRAM = """
import sys
from pathlib import Path
tests, folder, address, index, count = sys.argv[1:6]
folder, index, count = Path(folder), int(index), int(count)
sys.path.insert(0, tests)
from dreamfleet.agents.dreamer import DREAMER
from dreamfleet.roles.hosts import Hosts
from dreamfleet.transport import Client
hosts = Hosts(count, index, "127.0.0.1", Client(address, "hosts"))
DREAMER.join_hosts(index, count, hosts.meeting("agent"), hosts.address)
import jax
import numpy as np
from agent_worlds import ACTIONS, VECTOR, config, observations, random_batch
from dreamfleet.agents import Dreamer
from dreamfleet.checkpoint import Checkpoint, read_checkpoint

assert jax.process_count() == count
rows = 4 // count
batch = random_batch(VECTOR, ACTIONS, size=4)
batch = {key: value[index * rows : (index + 1) * rows] for key, value in batch.items()}
agent = Dreamer(VECTOR, ACTIONS, config(shard_parameters=True), seed=3)
if index:  # it finds what the first one has compiled
    hosts.gather("compiled", {})
agent.compile(batch_size=rows, batch_length=6)
if not index:
    hosts.gather("compiled", {})
hosts.gather("ready", {})  # connections between the processes are made within 30 s, or not at all
carry = agent.init_train(rows)
for _ in range(2):
    carry, outs, metrics = agent.train(carry, batch)
found = {f"metrics/{key}": np.asarray(value) for key, value in metrics.items()}
found |= {f"outs/{key}": np.asarray(value) for key, value in outs["replay"].items()}
agent.settle()
_, actions, _ = agent.policy(agent.init_policy(2), observations(VECTOR, 2))
found |= {f"actions/{key}": value for key, value in actions.items()}
np.savez(folder / f"found-{index}.npz", **found)

def save(name):
    gather = hosts.meeting("checkpoint")
    Checkpoint(folder / name).save({"agent": agent.save()}, step=1, host=index, gather=gather)

save("trained")
# What one process has saved, several load.
one = Checkpoint(folder / "one").load()
agent.load(one.parts["agent"])
save("loaded")
"""


def run(folder: Path, count: int) -> None:
    """Let so many processes learn together; they leave what they find in a folder."""
    meeting = Meeting(count)
    server = Server("tcp://127.0.0.1:{auto}", "hosts")
    server.bind("gather", meeting.gather, workers=2 * count, repeatable=True)
    with server:
        tests = str(Path(__file__).parents[2])
        started = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    PROGRAM,
                    tests,
                    folder,
                    server.address,
                    str(index),
                    str(count),
                ],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
            for index in range(count)
        ]
        ended = [(process.communicate()[1], process.returncode) for process in started]
        meeting.close()
    assert [code for _, code in ended] == [0] * count, "\n\n".join(text for text, _ in ended)


def test_processes_equal_one(tmp_path: Path) -> None:
    # The second update is the first that moves parameters; more would let a rounding error tip a
    # sample of the discrete latent state over, after which two runs rightly differ.
    agent = Dreamer(VECTOR, ACTIONS, config(), seed=3)
    carry, batch = agent.init_train(4), random_batch(VECTOR, ACTIONS, size=4)
    for _ in range(2):
        carry, outs, metrics = agent.train(carry, batch)
    Checkpoint(tmp_path / "one").save({"agent": agent.save()}, step=1)
    run(tmp_path, 2)
    several = [np.load(tmp_path / f"found-{host}.npz") for host in range(2)]
    for key, value in metrics.items():
        for each in several:
            np.testing.assert_allclose(
                each[f"metrics/{key}"], value, rtol=2e-3, atol=1e-4, err_msg=key
            )
    for key, value in outs["replay"].items():  # each host gets its rows
        joined = np.concatenate([each[f"outs/{key}"] for each in several])
        np.testing.assert_allclose(joined, value, rtol=1e-3, atol=1e-4, err_msg=key)
    # Each acts with random numbers of its own.
    assert any((several[0][key] != several[1][key]).any() for key in several[0] if "actions" in key)
    one, trained, loaded = (
        Checkpoint(tmp_path / name).load() for name in ("one", "trained", "loaded")
    )
    assert one is not None
    assert trained is not None
    assert loaded is not None
    expected = one.parts["agent"]
    assert trained.parts["agent"].keys() == loaded.parts["agent"].keys() == expected.keys()
    for key, value in expected.items():
        found = trained.parts["agent"][key] if key != "counters/actions" else value
        np.testing.assert_allclose(found, value, rtol=1e-2, atol=1e-4, err_msg=key)
        np.testing.assert_array_equal(loaded.parts["agent"][key], value, err_msg=key)
    sizes = [path.stat().st_size for path in trained.path.glob("agent*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)
