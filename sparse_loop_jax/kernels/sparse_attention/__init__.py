"""Attention to selected keys, as a correction of a dense reference."""

from sparse_loop_jax.kernels.sparse_attention import (
    pallas as pallas,
    triton_launch as triton_launch,
    xla as xla,
)
from sparse_loop_jax.kernels.sparse_attention.op import sparse_attention

__all__ = ["sparse_attention"]
