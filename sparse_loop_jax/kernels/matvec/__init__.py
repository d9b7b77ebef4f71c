"""Products of a few rows with a weight matrix, and what is fused onto them."""

from sparse_loop_jax.kernels.matvec import pallas as pallas, xla as xla
from sparse_loop_jax.kernels.matvec.op import gated_linear, linear, linear_add_norm

__all__ = ["gated_linear", "linear", "linear_add_norm"]
