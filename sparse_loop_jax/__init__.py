"""Fast inference for looped language models in JAX."""

from sparse_loop_jax.models import Ouro, OuroConfig, forward

__all__ = ["Ouro", "OuroConfig", "forward"]
