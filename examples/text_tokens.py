"""An encoder of one's own: Dreamer reads instructions, given as token ids.

    dreamfleet train --task examples.text_tokens:make --logdir runs/text --steps 20000 \
        --dreamer.model.encoder examples.text_tokens:TextEncoder

Each token becomes a learned vector. The vectors of the words and of their places are summed, and a
small network reads the mean of the sentence. The default decoder predicts the tokens.
`docs/agents.md` explains what an encoder has to offer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import gymnasium
import jax.numpy as jnp
import numpy as np
from jax import Array

from dreamfleet import Space
from dreamfleet.agents import ModelConfig, SpaceError
from dreamfleet.agents.dreamer.layers import MLP, init_kernel

WORDS = ("<pad>", "go", "do", "not", "left", "right")


class TextEncoder(eqx.Module):
    """Tokens of the key `text`: a row of word ids, filled up with 0."""

    words: Array
    places: Array
    mlp: MLP
    width: int = eqx.field(static=True)

    @classmethod
    def check(cls, spaces: Mapping[str, Space], model: ModelConfig) -> None:
        text = spaces.get("text")
        if set(spaces) != {"text"} or text is None or not text.discrete or len(text.shape) != 1:
            raise SpaceError(f"TextEncoder takes 'text', a row of word ids, not {spaces}.")

    @classmethod
    def init(
        cls, rng: np.random.Generator, model: ModelConfig, spaces: Mapping[str, Space]
    ) -> TextEncoder:
        (length,), words = spaces["text"].shape, int(np.max(spaces["text"].high)) + 1
        vectors = (init_kernel(rng, (count, model.units), 1) for count in (words, length))
        return cls(*vectors, MLP.init(rng, model.units, model.units, 2), model.units)

    def __call__(self, obs: Mapping[str, Array]) -> Array:
        text = obs["text"]  # [B, T, L]
        vectors = jnp.tanh(self.words[text] + self.places)  # [B, T, L, units]
        known = (text > 0)[..., None].astype(vectors.dtype)
        return self.mlp((vectors * known).sum(-2) / jnp.maximum(1, known.sum(-2)))


class Instructions(gymnasium.Env[dict[str, Any], Any]):
    """Do what the sentence says: `go left`, or `do not go left`."""

    observation_space = gymnasium.spaces.Dict(
        {"text": gymnasium.spaces.MultiDiscrete([len(WORDS)] * 4)}
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], Any]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, Any]:
        self._steps += 1
        reward = float(int(action) == self._wanted)
        return self._observe(), reward, False, self._steps >= 20, {}

    def _observe(self) -> dict[str, Any]:
        side, negated = self.np_random.integers(2, size=2)
        sentence = ["do", "not", "go"] if negated else ["go"]
        sentence.append(("left", "right")[side])
        self._wanted = int(side) ^ int(negated)
        ids = [WORDS.index(word) for word in sentence]
        return {"text": np.array(ids + [0] * (4 - len(ids)))}


def make() -> Instructions:
    """What `--task examples.text_tokens:make` names."""
    return Instructions()
