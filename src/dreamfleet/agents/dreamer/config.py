"""Every hyperparameter of the agent, with the published defaults.

Importable without JAX: the processes that only pass configuration around stay small.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from msgspec import Meta

from dreamfleet.errors import ConfigError
from dreamfleet.settings import (
    AboveZero,
    Code,
    Count,
    CountOrZero,
    Fraction,
    Incidental,
    Local,
    PerHost,
    ZeroOrMore,
    require,
    validate,
)

# Bounds beyond which float32 rounds a difference or a quotient to zero, and makes NaN of it.
Decay = Annotated[float, Meta(ge=0, le=0.999999)]
Deviation = Annotated[float, Meta(ge=1e-6, le=1e6)]
Small = Annotated[float, Meta(ge=1e-9)]
Percentile = Annotated[float, Meta(ge=0, le=100)]


@dataclass(frozen=True)
class ModelConfig:
    """Widths and depths of the networks.

    The defaults of the class are those of 12m.
    """

    deter: Count = 2048
    """Width of the recurrent (deterministic) state."""
    hidden: Count = 256
    """Width of the layers inside the recurrent state-space model."""
    stoch: Count = 32
    """Number of categorical variables of the stochastic state."""
    classes: Count = 16
    """Choices of each categorical variable."""
    blocks: Count = 8
    """Blocks of the block-diagonal recurrent layers; must divide `deter`."""
    units: Count = 256
    """Width of the encoder's, the decoder's and every head's layers."""
    depth: Count = 16
    """Channels of the image networks, before the multipliers."""
    mults: Annotated[tuple[Count, ...], Meta(min_length=1)] = (2, 3, 4, 4)
    """Channel multiplier of each image stage, which halves the resolution. Images that would end
    below 3 pixels a side skip the first ones."""
    kernel: Count = 5
    """Width of the convolution kernels; must be odd."""
    decoder_blocks: Count = 8
    """Blocks of the layer from the recurrent state to the decoder's first image."""
    encoder_layers: Count = 3
    """Layers of the encoder for vectors."""
    decoder_layers: Count = 3
    """Layers of the decoder for vectors."""
    reward_layers: Count = 1
    """Layers of the reward head."""
    continue_layers: Count = 1
    """Layers of the head that predicts whether the episode continues."""
    mask_layers: Count = 1
    """Layers of the head that predicts which actions are allowed, for tasks with `action_mask`."""
    actor_layers: Count = 3
    """Layers of the policy."""
    critic_layers: Count = 3
    """Layers of the value function."""
    dynamics_layers: Count = 1
    """Block layers between the inputs and the gates of the recurrent cell."""
    prior_layers: Count = 2
    """Layers from the recurrent state to the predicted stochastic state."""
    posterior_layers: Count = 1
    """Layers from recurrent state and observation to the stochastic state."""
    unimix: Fraction = 0.01
    """Share of a uniform distribution mixed into the stochastic state's categoricals."""
    bins: Annotated[int, Meta(ge=3)] = 255
    """Bins of the two-hot reward and value distributions."""
    min_std: Deviation = 0.1
    """Smallest standard deviation of a continuous policy."""
    max_std: Deviation = 1.0
    """Largest standard deviation of a continuous policy."""
    encoder: Code[str] = "default"
    """From observations to tokens: `default`, or package.module:Class for your own."""
    decoder: Code[str] = "default"
    """From latent states to observations: `default`, or package.module:Class for your own."""
    dynamics: Code[str] = "default"
    """From one latent state to the next: `default`, or package.module:Class for your own."""

    def __post_init__(self) -> None:
        validate(self)
        require(
            self.deter % self.blocks == 0,
            f"model.deter={self.deter} must be a multiple of model.blocks={self.blocks}.",
        )
        require(self.kernel % 2 == 1, f"model.kernel={self.kernel} must be odd.")
        require(
            self.min_std <= self.max_std,
            f"model.min_std={self.min_std} is above model.max_std={self.max_std}: lower it.",
        )

    @staticmethod
    def named() -> dict[str, ModelConfig]:
        """The sizes, by name."""
        return {name: size_preset(name) for name in SIZES}


@dataclass(frozen=True)
class LossConfig:
    """What is optimised, and how the terms are weighed."""

    representation: Literal["reconstruction", "barlow"] = "reconstruction"
    """What shapes the latent state: reconstructed observations, or Barlow Twins (as in R2-Dreamer).
    With barlow the decoder is trained without a gradient into the model."""
    reconstruction_scale: ZeroOrMore = 1.0
    """Weight of each decoded key's loss; 0 leaves the decoder out."""
    barlow_scale: ZeroOrMore = 0.05
    """Weight of the loss of `representation=barlow`."""
    float_scale: ZeroOrMore = 1.0
    """Additional weight of decoded floats: errors of small numbers are small when squared."""
    float_variance: bool = False
    """Weigh decoded floats by 1 / (2 variance of their errors in the batch), at most by
    `float_scale`: precise predictions weigh more, noise less."""
    reward_scale: ZeroOrMore = 1.0
    """Weight of the reward prediction."""
    continue_scale: ZeroOrMore = 1.0
    """Weight of the continuation prediction."""
    mask_scale: ZeroOrMore = 1.0
    """Weight of the prediction of `action_mask`, for tasks that have one."""
    dynamics_scale: ZeroOrMore = 1.0
    """Weight of moving the prior towards the posterior."""
    representation_scale: ZeroOrMore = 0.1
    """Weight of moving the posterior towards the prior."""
    policy_scale: ZeroOrMore = 1.0
    """Weight of the policy loss in imagination."""
    value_scale: ZeroOrMore = 1.0
    """Weight of the value loss in imagination."""
    replay_value_scale: ZeroOrMore = 0.3
    """Weight of the value loss on replayed states; 0 leaves it out."""
    extra: Code[dict[str, ZeroOrMore]] = field(default_factory=dict)
    """Losses of your own and their weights, as package.module:Class."""
    free_nats: ZeroOrMore = 1.0
    """KL below this many nats is not penalised."""
    reward_grad: bool = True
    """Whether the reward loss shapes the representation."""
    replay_value_grad: bool = True
    """Whether the replay value loss shapes the representation."""
    horizon: Annotated[float, Meta(gt=1)] = 333.0
    """Effective planning horizon: the discount is 1 - 1/horizon."""
    continue_discount: bool = True
    """Learn the discount into the continuation head instead of multiplying it in."""
    return_lambda: Fraction = 0.95
    """Mixing of one-step and long returns."""
    entropy_scale: ZeroOrMore = 3e-4
    """Weight of the policy's entropy."""
    imag_length: Count = 15
    """Imagined steps from each start."""
    imag_last: CountOrZero = 0
    """Start imagination from this many last states of each sequence; 0 takes all."""
    slow_regularizer: ZeroOrMore = 1.0
    """Weight of keeping the critic close to its exponential moving average (EMA)."""
    slow_rate: Fraction = 0.02
    """Share of the critic's parameters mixed into its EMA after each update."""
    slow_target: bool = False
    """Bootstrap returns from the EMA of the critic instead of the critic itself."""
    return_rate: Fraction = 0.01
    """Rate at which the return normaliser follows the data."""
    return_limit: Small = 1.0
    """Returns that spread less than this are not scaled up."""
    return_low: Percentile = 5.0
    """Lower percentile of the return normaliser."""
    return_high: Percentile = 95.0
    """Upper percentile of the return normaliser."""

    def __post_init__(self) -> None:
        validate(self)
        require(
            self.representation != "reconstruction" or self.reconstruction_scale > 0,
            "loss.reconstruction_scale=0 leaves nothing that shapes the representation: raise it, "
            "or set loss.representation=barlow.",
        )
        require(
            self.replay_value_scale == 0 or self.imag_last != 1,
            "loss.imag_last=1 leaves no pair of steps for the replay value loss: "
            "set it to 2 or more, or loss.replay_value_scale to 0.",
        )
        require(
            self.return_low < self.return_high,
            f"loss.return_low={self.return_low} is not below "
            f"loss.return_high={self.return_high}: lower it.",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer for all networks: gradient clipping, RMS scaling, then momentum."""

    learning_rate: AboveZero = 4e-5
    """Step size after the warm-up."""
    clip: ZeroOrMore = 0.3
    """Largest gradient norm of a tensor relative to the norm of its parameters; 0 for any."""
    clip_floor: Small = 1e-3
    """Parameter norm below which the clipping threshold stops shrinking."""
    eps: Annotated[float, Meta(ge=1e-30)] = 1e-20
    """Added to the root mean square in the denominator."""
    beta1: Decay = 0.9
    """Decay of the momentum."""
    beta2: Decay = 0.999
    """Decay of the squared gradients."""
    weight_decay: ZeroOrMore = 0.0
    """Decay of kernels towards zero, in units of the learning rate."""
    warmup: CountOrZero = 1000
    """Updates over which the learning rate rises linearly from zero."""
    decay: Annotated[int, Meta(ge=-1)] = 0
    """Update at which the learning rate has fallen linearly to `final_rate`; -1 for the last update
    of a run with `steps`, 0 for never, as in the paper."""
    final_rate: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Share of the learning rate that is left after the decay."""

    def __post_init__(self) -> None:
        validate(self)
        require(
            self.clip == 0 or self.clip >= 1e-6,
            f"optimizer.clip={self.clip} would round every gradient to zero: use 0 for no "
            "clipping, or 1e-6 and more.",
        )


@dataclass(frozen=True)
class ExecutionConfig:
    """Where and how the computation runs. The first three change what is computed, the others do
    not."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of activations; parameters and losses always stay float32."""
    replay_context: Count = 1
    """Steps before each training sequence whose stored state it continues from."""
    send_priority: bool = False
    """Send the world model's loss of each trained step to the replay as its priority, for
    prioritised sampling."""
    train_platform: Incidental[PerHost[str]] = ""
    """Devices that train: cpu, gpu or tpu; empty takes JAX's default."""
    train_devices: Incidental[tuple[CountOrZero, ...]] = ()
    """Numbers of the training devices of their platform, from 0; empty takes all, or as many as
    split the batch evenly."""
    policy_platform: Incidental[PerHost[str]] = ""
    """Device that acts: cpu, gpu or tpu; empty takes one of the training platform."""
    policy_devices: Incidental[PerHost[tuple[CountOrZero, ...]]] = ()
    """Number of the acting device of its platform; empty takes the first training device, or the
    first of `policy_platform`."""
    shard_parameters: Incidental[bool] = False
    """Split parameters and optimizer state over the training devices (fully sharded) instead of
    copying them (data parallel)."""
    shard_over: Incidental[CountOrZero] = 0
    """Devices among which `shard_parameters` splits one copy; 0 for all. With 4 of eight devices
    there are two copies."""
    publish_every: Count = 1
    """Updates after which the learner publishes parameters for the actor."""
    report_rows: Incidental[CountOrZero] = 6
    """Sequences shown in a report's videos."""
    report_gradient_norms: Incidental[bool] = False
    """Whether reports measure the gradient norm of each loss (one backward pass each)."""
    prefetch: Incidental[Count] = 1
    """Batches placed on the training devices ahead of time."""
    cache_dir: Incidental[PerHost[Local[str]]] = "~/.cache/dreamfleet/jax"
    """Folder of compiled programs, kept between runs; empty switches it off."""
    dump_dir: Incidental[PerHost[Local[str]]] = ""
    """Folder for the offending batch when NaN or infinity appears; empty takes the
    working directory."""

    def __post_init__(self) -> None:
        validate(self)
        require(
            len(set(self.train_devices)) == len(self.train_devices),
            f"execution.train_devices={self.train_devices} names a device twice: name each once.",
        )
        require(
            not self.shard_over or self.shard_parameters,
            f"execution.shard_over={self.shard_over} needs execution.shard_parameters: set both.",
        )
        require(
            len(self.policy_devices) <= 1,
            f"execution.policy_devices={self.policy_devices} names several devices, and only one "
            "acts: name one.",
        )


@dataclass(frozen=True)
class DreamerConfig:
    """The whole agent."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Networks."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Losses."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer."""
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    """Devices, precision and reports."""


# deter, hidden, classes, depth, units of the published sizes.
_PUBLISHED = {
    "1m": (512, 64, 4, 4, 64),
    "12m": (2048, 256, 16, 16, 256),
    "25m": (3072, 384, 24, 24, 384),
    "50m": (4096, 512, 32, 32, 512),
    "100m": (6144, 768, 48, 48, 768),
    "200m": (8192, 1024, 64, 64, 1024),
    "400m": (12288, 1536, 96, 96, 1536),
}
_SMALL = {
    "debug": ModelConfig(
        deter=16, hidden=8, stoch=4, classes=4, blocks=4, units=16, depth=2, decoder_blocks=4,
        bins=15, mults=(2, 4), encoder_layers=1, decoder_layers=1, actor_layers=1, critic_layers=1,
    ),
    "cpu-tiny": ModelConfig(
        deter=128, hidden=64, stoch=8, classes=8, blocks=8, units=64, depth=4, decoder_blocks=8
    ),
    "cpu-small": ModelConfig(
        deter=256, hidden=64, stoch=16, classes=8, blocks=8, units=64, depth=4, decoder_blocks=8
    ),
}  # fmt: skip
PUBLISHED_SIZES = tuple(_PUBLISHED)
SIZES = (*_SMALL, *PUBLISHED_SIZES)


def size_preset(name: str) -> ModelConfig:
    """The networks of a named size: the published 1m to 400m, or a small one for CPUs."""
    if name in _SMALL:
        return _SMALL[name]
    if name not in _PUBLISHED:
        raise ConfigError(f"There is no size {name!r}. Choose one of {', '.join(SIZES)}.")
    deter, hidden, classes, depth, units = _PUBLISHED[name]
    return replace(
        ModelConfig(), deter=deter, hidden=hidden, classes=classes, depth=depth, units=units
    )
