"""Dense attention over a paged K/V cache."""

from sparse_loop_jax.kernels.paged_attention import pallas as pallas, xla as xla
from sparse_loop_jax.kernels.paged_attention.op import paged_attention

__all__ = ["paged_attention"]
