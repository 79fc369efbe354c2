"""Starting, watching and ending the processes of a fleet."""

from dreamfleet.fleet.errors import FleetError
from dreamfleet.fleet.local import combined, parallel_envs
from dreamfleet.fleet.process import Process
from dreamfleet.fleet.supervisor import Supervisor

__all__ = ["FleetError", "Process", "Supervisor", "combined", "parallel_envs"]
