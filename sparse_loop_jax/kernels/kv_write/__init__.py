"""Writing new rows of K and V into their pages."""

from sparse_loop_jax.kernels.kv_write import pallas as pallas, xla as xla
from sparse_loop_jax.kernels.kv_write.op import write_kv

__all__ = ["write_kv"]
