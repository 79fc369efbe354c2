"""What an encoder, a decoder and the dynamics must offer, and how settings choose them.

`model.encoder`, `model.decoder` and `model.dynamics` are `default`, or `package.module:Class` for
a class of your own. Such a class is an `equinox.Module` whose array fields are its parameters
(floats; everything else is `equinox.field(static=True)`). All arrays of a sequence begin with the
axes (batch, time). Importable without JAX.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.agents.dreamer.features import (
    Spaces,
    check_decodable,
    check_encodable,
    decoded,
    observed,
)
from dreamfleet.errors import ConfigError
from dreamfleet.imports import load_object

if TYPE_CHECKING:
    from jaxtyping import Array

    from dreamfleet.agents.dreamer.rssm import Observed, State


@runtime_checkable
class Encoder(Protocol):
    """Observations to tokens, which the dynamics read."""

    width: int
    """Numbers in the tokens of a step."""

    @classmethod
    def check(cls, spaces: Spaces, model: ModelConfig) -> None:
        """Raise a SpaceError for observation keys that it does not take."""

    @classmethod
    def init(cls, rng: np.random.Generator, model: ModelConfig, spaces: Spaces) -> Any:
        """A fresh encoder; `spaces` are the observation's keys without reward and flags."""

    def __call__(self, obs: Mapping[str, Array]) -> Array:
        """Tokens of shape (batch, time, width)."""


@runtime_checkable
class Decoder(Protocol):
    """Latent states to predicted observations. It need not predict every key.

    A method `values(predictions)`, which gives predicted numbers as the environment has them, is
    optional: a dream shows them.
    """

    @classmethod
    def check(cls, spaces: Spaces, model: ModelConfig) -> None:
        """Raise a SpaceError for observation keys that it does not take."""

    @classmethod
    def init(cls, rng: np.random.Generator, model: ModelConfig, spaces: Spaces) -> Any:
        """A fresh decoder; `spaces` are the observation's keys without reward, flags and
        `action_mask`, which has a head of its own."""

    def __call__(self, state: State) -> dict[str, Array]:
        """A prediction for each key that it predicts."""

    def losses(
        self, predictions: Mapping[str, Array], obs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The loss of each predicted key at each step, of shape (batch, time)."""

    def images(self, predictions: Mapping[str, Array]) -> dict[str, Array]:
        """Predicted images between 0 and 1, which reports show as videos."""


@runtime_checkable
class Dynamics(Protocol):
    """The recurrent network between the latent states of two steps.

    A state is `State(deter, stoch)`: `model.deter` numbers, and `model.stoch` one-hots of
    `model.classes` classes, flattened. Random draws come from outside, as one uniform number for
    each one-hot.
    """

    classes: int

    @classmethod
    def init(cls, rng: np.random.Generator, model: ModelConfig, actions: int, tokens: int) -> Any:
        """Fresh dynamics for action vectors and tokens of these widths."""

    def observe(
        self, carry: State, tokens: Array, action: Array, is_first: Array, uniform: Array
    ) -> Observed:
        """Posterior states of a sequence, from the actions before each step; `carry` and the
        first action are zeros wherever `is_first` is set."""

    def enter(self, state: State) -> Any:
        """What imagination passes from step to step; its field `state` is the state."""

    def imagine_step(self, latent: Any, action: Array, uniform: Array) -> Any:
        """The next of these, without an observation; rows instead of (batch, time)."""

    def kl_losses(self, posterior: Array, prior: Array, free_nats: float) -> tuple[Array, Array]:
        """Losses that move the prior towards the posterior, and the posterior towards the prior,
        each of shape (batch, time)."""


_PACKAGE = "dreamfleet.agents.dreamer"
_DEFAULTS = {
    "encoder": f"{_PACKAGE}.encoders:DefaultEncoder",
    "decoder": f"{_PACKAGE}.decoders:DefaultDecoder",
    "dynamics": f"{_PACKAGE}.rssm:RSSM",
}
_MEMBERS = {
    "encoder": ("check", "init", "width", "__call__"),
    "decoder": ("check", "init", "__call__", "losses", "images"),
    "dynamics": ("init", "observe", "enter", "imagine_step", "kl_losses", "classes"),
}


def find_network(kind: str, model: ModelConfig) -> Any:
    """The class of the `encoder`, the `decoder` or the `dynamics` that the settings choose.

    Raises:
        ConfigError: There is no such class, or it lacks something that the protocol asks for.
    """
    name = {"encoder": model.encoder, "decoder": model.decoder, "dynamics": model.dynamics}[kind]
    found = load_object(_DEFAULTS[kind] if name == "default" else name)
    lacks = "is not a class"
    if isinstance(found, type):
        # Fields without a default are no attributes of the class.
        fields = {field for base in found.__mro__ for field in inspect.get_annotations(base)}
        known = {*dir(found), *fields}
        lacks = ", ".join(member for member in _MEMBERS[kind] if member not in known)
        lacks = f"lacks {lacks}" if lacks else ""
    if lacks:
        raise ConfigError(
            f"model.{kind}={name} {lacks}: name a class that offers what "
            f"dreamfleet.agents.dreamer.interfaces.{kind.capitalize()} asks for."
        )
    return found


def check_networks(obs_space: Spaces, model: ModelConfig) -> None:
    """Ask the chosen encoder and decoder whether they take these observations.

    Raises:
        SpaceError: They do not; the message names the key, and the fix.
    """
    # The default ones are asked without loading JAX.
    for kind, name, check, spaces in (
        ("encoder", model.encoder, check_encodable, observed(obs_space)),
        ("decoder", model.decoder, check_decodable, decoded(obs_space)),
    ):
        (check if name == "default" else find_network(kind, model).check)(spaces, model)
