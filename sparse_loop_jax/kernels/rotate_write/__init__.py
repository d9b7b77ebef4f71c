"""The rotation of queries and keys and the K/V write, after a product of many rows."""

from sparse_loop_jax.kernels.rotate_write import pallas as pallas, xla as xla
from sparse_loop_jax.kernels.rotate_write.op import rotate_write

__all__ = ["rotate_write"]
