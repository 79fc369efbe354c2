"""The recurrent state-space model.

A state is a deterministic vector h and S categorical variables z. One step of the core:

    x        = [dense(h), dense(z), dense(a)]
    y        = silu(norm(block([h_g, x])))            one block a chunk h_g of h
    r, c, u  = block gates of y
    h'       = u' tanh(sigmoid(r) c) + (1 - u') h     with u' = sigmoid(u - 1)

The posterior over z sees h' and the observation's tokens, the prior sees h' alone. What does not
depend on the recurrence (the actions', the tokens' share of the first layers, the priors of an
observed sequence) is computed for all steps at once, outside of the scans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dreamfleet.agents.dreamer import distributions as dist
from dreamfleet.agents.dreamer.config import ModelConfig
from dreamfleet.agents.dreamer.dynamics import Dynamics, Observed, Parts
from dreamfleet.agents.dreamer.features import rssm_entries
from dreamfleet.agents.dreamer.forms import scan
from dreamfleet.agents.dreamer.layers import (
    EPSILON,
    BlockLinear,
    Dense,
    Linear,
    Normed,
    add_bias,
    constant,
    init_kernel,
)
from dreamfleet.spaces import Space


class State(NamedTuple):
    """A latent state; z is flattened to S times C one-hot entries."""

    deter: Float[Array, "*batch deter"]
    stoch: Float[Array, "*batch stoch"]


class Latent(NamedTuple):
    """A state as loops pass it on: its deterministic part is also kept with the blocks first.

    With (blocks, rows, width) every block is one plain product, where (rows, blocks, width) costs
    several times as much on CPUs. Passing on both forms keeps the compiler from merging the
    transposition into the arithmetic of the gates, which would then not be vectorised.
    """

    state: State
    blocks: Float[Array, "blocks rows part"]


class BlockDense(Normed):
    """Block-diagonal layer with a norm over the whole width, then SiLU."""

    kernel: Float[Array, "blocks inputs outputs"]
    bias: Float[Array, " width"]
    scale: Float[Array, " width"]

    @classmethod
    def init(cls, rng: np.random.Generator, inputs: int, outputs: int, blocks: int) -> BlockDense:
        shape = (blocks, inputs, outputs // blocks)
        kernel = init_kernel(rng, shape, blocks * inputs)
        return cls(kernel, constant(0.0, outputs), constant(1.0, outputs))

    def activate(
        self, product: Float[Array, "blocks rows part"]
    ) -> Float[Array, "blocks rows part"]:
        """What follows the blocks' products."""
        shape = (product.shape[0], 1, product.shape[2])
        wide = add_bias(product, self.bias.reshape(shape)).astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), (0, 2), keepdims=True) + EPSILON)
        normed = wide * (inverse * self.scale.reshape(shape))
        return jax.nn.silu(normed.astype(product.dtype))


class RSSM(Dynamics):
    """The sequence model of DreamerV3."""

    deter_in: Dense
    stoch_in: Dense
    action_in: Dense
    hidden: tuple[BlockDense, ...]
    gates: BlockLinear
    prior: tuple[Dense, ...]
    prior_logits: Linear
    posterior: tuple[Dense, ...]
    posterior_logits: Linear
    classes: int = eqx.field(static=True)
    unimix: float = eqx.field(static=True)

    @classmethod
    def init(cls, rng: np.random.Generator, config: ModelConfig, actions: int, tokens: int) -> RSSM:
        deter, hidden, blocks = config.deter, config.hidden, config.blocks
        stoch = config.stoch * config.classes
        per_block = [deter // blocks + 3 * hidden]
        per_block += [deter // blocks] * (config.dynamics_layers - 1)
        prior = [deter] + [hidden] * (config.prior_layers - 1)
        posterior = [deter + tokens] + [hidden] * (config.posterior_layers - 1)
        return cls(
            deter_in=Dense.init(rng, deter, hidden),
            stoch_in=Dense.init(rng, stoch, hidden),
            action_in=Dense.init(rng, actions, hidden),
            hidden=tuple(BlockDense.init(rng, n, deter, blocks) for n in per_block),
            gates=BlockLinear.init(rng, deter, 3 * deter, blocks),
            prior=tuple(Dense.init(rng, n, hidden) for n in prior),
            prior_logits=Linear.init(rng, hidden, stoch),
            posterior=tuple(Dense.init(rng, n, hidden) for n in posterior),
            posterior_logits=Linear.init(rng, hidden, stoch),
            classes=config.classes,
            unimix=config.unimix,
        )

    @property
    def dtype(self) -> jnp.dtype:
        return self.gates.kernel.dtype

    @property
    def widths(self) -> tuple[int, ...]:
        return self.deter_in.kernel.shape[0], self.stoch_in.kernel.shape[0]

    @property
    def draws(self) -> int:
        return self.widths[1] // self.classes

    # --- its state -------------------------------------------------------------------------------

    @classmethod
    def entry_space(cls, model: ModelConfig) -> dict[str, Space]:
        return rssm_entries(model)

    def initial(self, rows: int) -> State:
        deter, stoch = (jnp.zeros((rows, width), self.dtype) for width in self.widths)
        return State(deter, stoch)

    def features(self, state: State) -> Parts:
        return state.deter, state.stoch

    def entries(self, states: State) -> dict[str, Float[Array, "..."]]:
        deter, stoch = (part.astype(jnp.float32) for part in states)
        return {"dyn/deter": deter, "dyn/stoch": self._shape(stoch)}

    def truncate(self, entries: Mapping[str, Float[Array, "..."]]) -> State:
        deter, stoch = (entries[f"dyn/{name}"][:, -1] for name in ("deter", "stoch"))
        return State(deter, stoch.reshape(stoch.shape[0], -1))

    # --- one step --------------------------------------------------------------------------------

    def embed_action(self, action: Float[Array, "*batch width"]) -> Float[Array, "*batch hidden"]:
        """The action's share of the core's input; large actions are scaled back to one."""
        limit = jax.lax.stop_gradient(jnp.maximum(1.0, jnp.abs(action)))
        return self.action_in(action / limit)

    def enter(self, state: State) -> Latent:
        """The state in the form in which the core passes it from step to step."""
        return Latent(state, _blocks_first(state.deter, self.hidden[0].kernel.shape[0]))

    def core(self, latent: Latent, action: Float[Array, "rows hidden"]) -> Latent:
        """The next deterministic state with the old stochastic one.

        `action` is embedded already.
        """
        deter, stoch = latent.state
        first = self.hidden[0]
        blocks, inputs, width = first.kernel.shape
        own = self.widths[0] // blocks
        shared = jnp.concatenate([self.deter_in(deter), self.stoch_in(stoch), action], -1)
        # Every block sees the same shared inputs: one dense product instead of many thin ones.
        kernel = first.kernel[:, own:].transpose(1, 0, 2).reshape(inputs - own, -1)
        mixed = _blocks_first(shared @ kernel, blocks) + latent.blocks @ first.kernel[:, :own]
        mixed = first.activate(mixed)
        for layer in self.hidden[1:]:
            mixed = layer.activate(mixed @ layer.kernel)
        gates = add_bias(mixed @ self.gates.kernel, self.gates.bias.reshape(blocks, 1, -1))
        reset, candidate, update = (gates[..., i * width : (i + 1) * width] for i in range(3))
        candidate = jnp.tanh(jax.nn.sigmoid(reset) * candidate)
        update = jax.nn.sigmoid(update - 1.0)
        following = update * candidate + (1.0 - update) * latent.blocks
        return Latent(State(following.transpose(1, 0, 2).reshape(deter.shape), stoch), following)

    def prior_of(
        self, deter: Float[Array, "*batch deter"]
    ) -> Float[Array, "*batch variables classes"]:
        x = deter
        for layer in self.prior:
            x = layer(x)
        return self._shape(self.prior_logits(x))

    def token_share(self, tokens: Float[Array, "*batch tokens"]) -> Float[Array, "*batch hidden"]:
        """The tokens' part of the posterior's first product."""
        return tokens @ self.posterior[0].kernel[self.widths[0] :]

    def posterior_of(
        self, deter: Float[Array, "*batch deter"], token_share: Float[Array, "*batch hidden"]
    ) -> Float[Array, "*batch variables classes"]:
        first = self.posterior[0]
        x = first.activate(deter @ first.kernel[: self.widths[0]] + token_share)
        for layer in self.posterior[1:]:
            x = layer(x)
        return self._shape(self.posterior_logits(x))

    def sample(
        self,
        logits: Float[Array, "*batch variables classes"],
        uniform: Float[Array, "*batch variables"],
    ) -> Float[Array, "*batch stoch"]:
        """One-hot samples with the straight-through gradient."""
        return self._flat(dist.sample_onehots(logits, uniform, self.unimix))

    # --- sequences -------------------------------------------------------------------------------

    def observe(
        self,
        carry: State,
        tokens: Float[Array, "batch time tokens"],
        action: Float[Array, "batch time width"],
        is_first: Bool[Array, "batch time"],
        uniform: Float[Array, "batch time variables"] | None = None,
        teacher: Float[Array, "batch time stoch"] | None = None,
    ) -> Observed:
        """Posterior states of a sequence, starting from zeros wherever `is_first` is set.

        `action` holds the previous actions' vectors. Samples come from `uniform` numbers, or are
        given as one-hots by `teacher`.
        """
        keep = 1.0 - is_first.astype(self.dtype)
        embedded = self.embed_action(action * keep[..., None])
        assert (uniform is None) != (teacher is None)
        draws = teacher if uniform is None else uniform

        def step(
            model: RSSM, latent: Latent, inputs: tuple[Array, ...]
        ) -> tuple[Latent, tuple[Array, ...]]:
            embedded, share, keep, draw = inputs
            state = State(*(part * keep[:, None] for part in latent.state))
            latent = model.core(Latent(state, latent.blocks * keep[None, :, None]), embedded)
            deter = latent.state.deter
            logits = model.posterior_of(deter, share)
            if uniform is None:
                probs = dist.unimix_probs(logits, model.unimix)
                stoch = model._flat(dist.straight_through(model._shape(draw), probs))
            else:
                stoch = model.sample(logits, draw)
            return latent._replace(state=State(deter, stoch)), (deter, stoch, logits)

        inputs = (embedded, self.token_share(tokens), keep, draws)
        inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
        _, outputs = scan(step, self, self.enter(carry), inputs)
        deter, stoch, logits = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
        return Observed(State(deter, stoch), logits, self.prior_of(deter))

    def step(
        self, state: State, action: Float[Array, "rows width"], uniform: Float[Array, "rows draws"]
    ) -> State:
        return self._imagine_step(self.enter(state), action, uniform).state

    def _imagine_step(
        self,
        latent: Latent,
        action: Float[Array, "rows width"],
        uniform: Float[Array, "rows draws"],
    ) -> Latent:
        """The next latent state under an action vector, drawn from the prior."""
        following = self.core(latent, self.embed_action(action))
        deter = following.state.deter
        return following._replace(state=State(deter, self.sample(self.prior_of(deter), uniform)))

    def imagine(
        self,
        start: State,
        act: Callable[[Parts, Any], tuple[Float[Array, "rows width"], Any]],
        noise: Any,
        uniform: Float[Array, "steps rows draws"],
    ) -> tuple[Parts, Parts, Any]:
        # The default's loop, over states whose blocks are kept.
        def step(latent: Latent, draws: tuple[Any, Array]) -> tuple[Latent, tuple[State, Any]]:
            action, beside = act(self.features(latent.state), draws[0])
            return self._imagine_step(latent, action, draws[1]), (latent.state, beside)

        last, (states, beside) = jax.lax.scan(step, self.enter(start), (noise, uniform))
        return self.features(states), self.features(last.state), beside

    # --- losses ----------------------------------------------------------------------------------

    def kl_losses(
        self, observed: Observed, free_nats: float
    ) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
        logits = (observed.posterior, observed.prior)
        return dist.balanced_kl(*logits, self.unimix, free_nats)

    def metrics(self, observed: Observed) -> dict[str, Float[Array, ""]]:
        """Mean entropies of the prior and the posterior over the stochastic state."""
        return {
            name: dist.entropy_of_probs(dist.unimix_probs(logits, self.unimix)).sum(-1).mean()
            for name, logits in (
                ("prior_entropy", observed.prior),
                ("posterior_entropy", observed.posterior),
            )
        }

    def _flat(
        self, onehots: Float[Array, "*batch variables classes"]
    ) -> Float[Array, "*batch stoch"]:
        return onehots.reshape(*onehots.shape[:-2], -1).astype(self.dtype)

    def _shape(
        self, flat: Float[Array, "*batch stoch"]
    ) -> Float[Array, "*batch variables classes"]:
        return flat.reshape(*flat.shape[:-1], -1, self.classes)


def _blocks_first(x: Float[Array, "rows width"], blocks: int) -> Float[Array, "blocks rows part"]:
    return x.reshape(x.shape[0], blocks, -1).transpose(1, 0, 2)
