"""Seeds, where Accelerate has them."""

from drivetrain.data.random import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
