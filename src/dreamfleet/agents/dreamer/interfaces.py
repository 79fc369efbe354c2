"""What an encoder, a decoder and a loss of one's own must offer, and how settings choose them.

`model.encoder`, `model.decoder` and `model.dynamics` are `default`, or `package.module:Class` for a
class of your own; `loss.extra` names losses. Such a class is an `equinox.Module` whose array fields
are its parameters (floats; everything else is `equinox.field(static=True)`). All arrays of a
sequence begin with the axes (batch, time). Sequence models derive from `dynamics.Dynamics`.
Importable without JAX.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from dreamfleet.agents.dreamer.config import DreamerConfig, ModelConfig
from dreamfleet.agents.dreamer.features import (
    Spaces,
    check_decodable,
    check_encodable,
    decoded,
    observed,
    rssm_entries,
)
from dreamfleet.errors import ConfigError
from dreamfleet.settings import load_object
from dreamfleet.spaces import Space

if TYPE_CHECKING:
    from jaxtyping import Array

    from dreamfleet.agents.dreamer.dynamics import Parts
    from dreamfleet.agents.dreamer.world_model import Seen


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
    """The features of states to predicted observations. It need not predict every key.

    A method `values(predictions)`, which gives predicted numbers as the environment has them, is
    optional: a dream shows them.
    """

    @classmethod
    def check(cls, spaces: Spaces, model: ModelConfig) -> None:
        """Raise a SpaceError for observation keys that it cannot predict."""

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        model: ModelConfig,
        spaces: Spaces,
        widths: tuple[int, ...],
    ) -> Any:
        """A fresh decoder for features of these widths; `spaces` are the observation's keys without
        reward, flags and `action_mask`, which has a head of its own."""

    def __call__(self, features: Parts) -> dict[str, Array]:
        """A prediction for each key that it predicts."""

    def losses(
        self, predictions: Mapping[str, Array], obs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The loss of each predicted key at each step, of shape (batch, time)."""

    def images(self, predictions: Mapping[str, Array]) -> dict[str, Array]:
        """Predicted images between 0 and 1, which reports show as videos."""


@runtime_checkable
class ExtraLoss(Protocol):
    """A loss beside those of the paper, with parameters of its own if it has fields."""

    couples_rows: bool
    """Whether rows of the batch meet in it, as in contrastive losses. Such a loss sees the batch of
    all devices; the others are computed by each device for its own rows."""

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        model: ModelConfig,
        widths: tuple[int, ...],
        tokens: int,
        actions: int,
    ) -> Any:
        """Fresh parameters, for features, tokens and action vectors of these widths."""

    def __call__(self, seen: Seen) -> Array:
        """The loss; its mean is minimised. It begins with the rows of the batch, or, if it couples
        them, has any shape."""


_PACKAGE = "dreamfleet.agents.dreamer"
_DEFAULTS = {
    "encoder": f"{_PACKAGE}.encoder:DefaultEncoder",
    "decoder": f"{_PACKAGE}.decoder:DefaultDecoder",
    "dynamics": f"{_PACKAGE}.rssm:RSSM",
}
_MEMBERS = {
    "encoder": ("check", "init", "width", "__call__"),
    "decoder": ("check", "init", "__call__", "losses", "images"),
    "dynamics": (
        *("widths", "draws", "init", "entry_space", "initial", "observe", "step", "features"),
        *("kl_losses", "entries", "truncate", "starts", "imagine"),
    ),
    "loss": ("couples_rows", "init", "__call__"),
}
_STATED_IN = {
    "encoder": "interfaces.Encoder",
    "decoder": "interfaces.Decoder",
    "dynamics": "dynamics.Dynamics",
    "loss": "interfaces.ExtraLoss",
}


def find_network(kind: str, model: ModelConfig) -> Any:
    """The class of the `encoder`, the `decoder` or the `dynamics` that the settings choose.

    Raises:
        ConfigError: There is no such class, or it lacks something that it has to offer.
    """
    name = {"encoder": model.encoder, "decoder": model.decoder, "dynamics": model.dynamics}[kind]
    if name == "default":
        return load_object(_DEFAULTS[kind])
    return _find(kind, f"model.{kind}={name}", name)


def extra_losses(config: DreamerConfig) -> dict[str, Any]:
    """The classes of losses with parameters of their own, by name.

    Raises:
        ConfigError: One is no loss, or has the name of another one.
    """
    found: dict[str, Any] = {}
    if config.loss.representation == "barlow":
        found["barlow"] = load_object(f"{_PACKAGE}.world_model:Barlow")
    for name in config.loss.extra:
        own = loss_name(name)
        # Losses of the paper have a setting for their weight.
        if own in found or hasattr(config.loss, f"{own}_scale"):
            raise ConfigError(
                f"loss.extra={name}: two losses are called {own!r}: give the class another name."
            )
        found[own] = _find("loss", f"loss.extra={name}", name)
    return found


def loss_name(name: str) -> str:
    """What a loss of `loss.extra` is called in metrics: what follows the colon."""
    return name.partition(":")[2]


def _find(kind: str, setting: str, name: str) -> Any:
    found = load_object(name)
    lacks = "is not a class"
    if isinstance(found, type):
        # Fields without a default are no attributes of the class.
        fields = {field for base in found.__mro__ for field in inspect.get_annotations(base)}
        known = {*dir(found), *fields}
        lacks = ", ".join(member for member in _MEMBERS[kind] if member not in known)
        lacks = f"lacks {lacks}" if lacks else ""
    if lacks:
        raise ConfigError(
            f"{setting} {lacks}: name a class that implements {_PACKAGE}.{_STATED_IN[kind]}."
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


def stored_space(model: ModelConfig) -> dict[str, Space]:
    """What the replay stores of the latent state of each step."""
    if model.dynamics == "default":  # answered without loading JAX
        return rssm_entries(model)
    entries: dict[str, Space] = find_network("dynamics", model).entry_space(model)
    return entries
