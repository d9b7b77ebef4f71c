"""Choosing the keys that a sparse row keeps."""

from sparse_loop_jax.kernels.select_keys import (
    pallas as pallas,
    triton_launch as triton_launch,
    xla as xla,
)
from sparse_loop_jax.kernels.select_keys.op import select_keys

__all__ = ["select_keys"]
