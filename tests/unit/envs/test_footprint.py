"""An environment process is small and starts quickly."""

import subprocess
import sys

import pytest

# What no environment of these needs: it would cost every one of many processes.
HEAVY = [
    "PIL", "equinox", "jax", "optax", "pygame", "rich", "scipy", "tensorboardX", "wandb",
]  # fmt: skip
PROGRAM = """
import sys
from dreamfleet.envs import make_env, noop
env = make_env("{task}")
env.step(noop(env.act_space))
import psutil
memory = psutil.Process().memory_info().rss
print(memory, ",".join(name for name in {heavy} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("task", "also"),
    [("bundled:dummy", ["gymnasium"]), ("bundled:catch", ["gymnasium"]), ("gym:CartPole-v1", [])],
)
def test_an_environment_process_is_small(task: str, also: list[str]) -> None:
    program = PROGRAM.format(task=task, heavy=HEAVY + also)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    memory, _, heavy = result.stdout.strip().partition(" ")
    assert heavy == ""
    assert int(memory) < 60e6, "80 MB is the limit, and transport comes on top"
