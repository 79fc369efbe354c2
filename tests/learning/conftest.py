"""These agents are tiny: they compile longer than they run."""

import jax

jax.config.update("jax_disable_most_optimizations", True)
