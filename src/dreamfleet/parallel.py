"""The fleet's functions on one page.

    combined          everything, under the supervisor
    parallel_agent    one agent object, shared by an actor thread and a learner thread
    parallel_actor    the batched inference server
    parallel_learner  the training loop
    parallel_replay   the replay server
    parallel_logger   the metrics server
    parallel_env      one environment, or several that are stepped together
    parallel_envs     all environments of one machine

Each role may run anywhere: all it needs are its factories and a `RunConfig` with addresses.
"""

from dreamfleet.fleet.local import combined, parallel_envs
from dreamfleet.roles.actor import parallel_actor
from dreamfleet.roles.agent import parallel_agent
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.learner import parallel_learner
from dreamfleet.roles.logger import parallel_logger
from dreamfleet.roles.replay import parallel_replay

__all__ = [
    "combined",
    "parallel_actor",
    "parallel_agent",
    "parallel_env",
    "parallel_envs",
    "parallel_learner",
    "parallel_logger",
    "parallel_replay",
]
