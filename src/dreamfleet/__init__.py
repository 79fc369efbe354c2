"""Dreamfleet trains DreamerV3 with a fleet of processes.

    from dreamfleet import evaluate, train
    train(env="gym:Acrobot-v1", logdir="runs/acrobot")
    print(evaluate("runs/acrobot").mean)

Most names are looked up on first use, so that processes which need few of them stay small.
"""

import typing
from importlib import import_module

from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.spaces import Space

if typing.TYPE_CHECKING:
    from dreamfleet.config import RunConfig
    from dreamfleet.dream import Dream
    from dreamfleet.envs import make_env
    from dreamfleet.evaluation import Evaluation, evaluate
    from dreamfleet.policy import Policy
    from dreamfleet.presets import preset
    from dreamfleet.training import StopTraining, configure, resume, train

    __version__: str

__all__ = [
    "ConfigError",
    "Dream",
    "DreamfleetError",
    "Evaluation",
    "Policy",
    "RunConfig",
    "Space",
    "StopTraining",
    "__version__",
    "configure",
    "evaluate",
    "make_env",
    "preset",
    "resume",
    "train",
]

_LATER = {
    "Dream": "dream",
    "Evaluation": "evaluation",
    "Policy": "policy",
    "RunConfig": "config",
    "StopTraining": "training",
    "configure": "training",
    "evaluate": "evaluation",
    "make_env": "envs",
    "preset": "presets",
    "resume": "training",
    "train": "training",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = import_module("importlib.metadata").version("dreamfleet")
    elif name in _LATER:
        value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
