"""Programs of tests compile much and compute little: import this to compile them with less effort.

Only programs of the importing process are concerned. Fleets that tests start compile as users do.
"""

import os

import jax

jax.config.update("jax_disable_most_optimizations", True)

# The backend reads its flags once, and ends the process if it does not know one. This one halves
# the time that a training step compiles; newer versions do without it.
if jax.__version_info__ < (0, 11):
    _before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{_before or ''} --xla_cpu_use_fusion_emitters=false"
    jax.devices()
    if _before is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = _before
