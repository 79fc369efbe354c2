"""A sequence model of one's own: Dreamer with a minGRU instead of its recurrent state-space model.

    dreamfleet train --task bundled:catch --preset pixels --logdir runs/mingru \
        --dreamer.model.dynamics examples.own_dynamics:MinGRU

A minGRU (Feng et al., 2024) is a gated recurrence whose gates do not see the state before:

    m_t = (1 - g_t) m_{t-1} + g_t c_t        with g_t = sigmoid(W x_t), c_t = V x_t

It is linear in m, so that a replayed sequence is one parallel scan over time instead of a loop. The
input x_t comes from the code and the action of the step before. For that the code of a step may
depend on its observation alone: q(z_t | o_t). The prior p(z_t | m_t) sees the memory. The state of
this model is a memory for each layer and a code; the rest of Dreamfleet passes it on unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dreamfleet import Space
from dreamfleet.agents import ModelConfig
from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.dynamics import Dynamics, Observed, Parts
from dreamfleet.agents.dreamer.layers import MLP, Dense, Linear

LAYERS = 2


class Memory(NamedTuple):
    """The state: [N, LAYERS, width] and [N, variables * classes]."""

    memory: Array
    code: Array


class Cell(eqx.Module):
    """One minGRU layer, and the dense layer that follows it."""

    gate: Linear
    candidate: Linear
    out: Dense

    @classmethod
    def init(cls, rng: np.random.Generator, inputs: int, width: int) -> Cell:
        gate, candidate = (Linear.init(rng, inputs, width) for _ in range(2))
        return cls(gate, candidate, Dense.init(rng, width, inputs))

    def coefficients(self, x: Array, keep: Array) -> tuple[Array, Array]:
        """a and b of m_t = a_t m_{t-1} + b_t; where an episode begins, a is zero."""
        gate = jax.nn.sigmoid(self.gate(x) - 1.0)
        return (1.0 - gate) * keep[..., None], gate * jnp.tanh(self.candidate(x))


class MinGRU(Dynamics):
    """A stack of minGRU layers with categorical codes."""

    inputs: Dense
    cells: tuple[Cell, ...]
    prior: MLP
    prior_logits: Linear
    posterior: MLP
    posterior_logits: Linear
    classes: int = eqx.field(static=True)
    unimix: float = eqx.field(static=True)

    @classmethod
    def init(
        cls, rng: np.random.Generator, model: ModelConfig, actions: int, tokens: int
    ) -> MinGRU:
        width, hidden, codes = model.deter // LAYERS, model.hidden, model.stoch * model.classes
        return cls(
            inputs=Dense.init(rng, codes + actions, hidden),
            cells=tuple(Cell.init(rng, hidden, width) for _ in range(LAYERS)),
            prior=MLP.init(rng, LAYERS * width, hidden, model.prior_layers),
            prior_logits=Linear.init(rng, hidden, codes),
            posterior=MLP.init(rng, tokens, hidden, model.posterior_layers),
            posterior_logits=Linear.init(rng, hidden, codes),
            classes=model.classes,
            unimix=model.unimix,
        )

    # --- the state ---

    @property
    def widths(self) -> tuple[int, ...]:
        memory = sum(cell.gate.bias.shape[0] for cell in self.cells)
        return memory, self.prior_logits.bias.shape[0]

    @property
    def draws(self) -> int:
        return self.widths[1] // self.classes

    @classmethod
    def entry_space(cls, model: ModelConfig) -> dict[str, Space]:
        return {
            "dyn/memory": Space(np.float32, (LAYERS, model.deter // LAYERS)),
            "dyn/code": Space(np.float32, (model.stoch * model.classes,)),
        }

    def initial(self, rows: int) -> Memory:
        memory, code = self.widths
        zeros = jnp.zeros((rows, len(self.cells), memory // len(self.cells)), self._dtype)
        return Memory(zeros, jnp.zeros((rows, code), self._dtype))

    def features(self, state: Memory) -> Parts:
        return state.memory.reshape(*state.memory.shape[:-2], -1), state.code

    def entries(self, states: Memory) -> dict[str, Array]:
        memory, code = (part.astype(jnp.float32) for part in states)
        return {"dyn/memory": memory, "dyn/code": code}

    def truncate(self, entries: Mapping[str, Array]) -> Memory:
        return Memory(entries["dyn/memory"][:, -1], entries["dyn/code"][:, -1])

    # --- a sequence, and a step ---

    def observe(
        self, carry: Memory, tokens: Array, action: Array, is_first: Array, uniform: Array
    ) -> Observed:
        posterior = self._logits(self.posterior_logits, self.posterior(tokens))
        code = self._sample(posterior, uniform)  # [B, T, codes], of all steps at once
        before = jnp.concatenate([carry.code[:, None], code[:, :-1]], 1)
        memory = self._remember(carry.memory, before, action, is_first)
        states = Memory(memory, code)
        prior = self._logits(self.prior_logits, self.prior(self.features(states)[0]))
        return Observed(states, posterior, prior)

    def step(self, state: Memory, action: Array, uniform: Array) -> Memory:
        first = jnp.zeros((action.shape[0], 1), bool)
        sequence = (part[:, None] for part in (state.code, action))
        memory = self._remember(state.memory, *sequence, first)[:, 0]
        prior = self._logits(self.prior_logits, self.prior(memory.reshape(memory.shape[0], -1)))
        return Memory(memory, self._sample(prior, uniform))

    def _remember(self, memory: Array, code: Array, action: Array, is_first: Array) -> Array:
        """The memories [B, T, LAYERS, width] that follow codes and actions of the steps before."""
        keep = 1.0 - is_first.astype(self._dtype)  # [B, T]
        x = self.inputs(code * keep[..., None], jnp.clip(action, -1.0, 1.0) * keep[..., None])
        found = []
        for index, cell in enumerate(self.cells):
            a, b = cell.coefficients(x, keep)
            b = b.at[:, 0].add(a[:, 0] * memory[:, index])
            _, each = jax.lax.associative_scan(
                lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1]),
                (a, b),
                axis=1,
            )
            found.append(each)
            x = x + cell.out(each)
        return jnp.stack(found, -2)

    def kl_losses(self, observed: Observed, free_nats: float) -> tuple[Array, Array]:
        logits = (observed.posterior, observed.prior)
        return dist.balanced_kl(*logits, self.unimix, free_nats)

    @property
    def _dtype(self) -> jnp.dtype:
        return self.prior_logits.kernel.dtype

    def _logits(self, layer: Linear, x: Array) -> Array:
        flat = layer(x)
        return flat.reshape(*flat.shape[:-1], -1, self.classes)

    def _sample(self, logits: Array, uniform: Array) -> Array:
        onehots = dist.sample_onehots(logits, uniform, self.unimix)
        return onehots.reshape(*onehots.shape[:-2], -1).astype(self._dtype)
