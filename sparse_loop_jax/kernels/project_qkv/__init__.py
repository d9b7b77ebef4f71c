"""The query/key/value projection with its rotation and the K/V write."""

from sparse_loop_jax.kernels.project_qkv import pallas as pallas, xla as xla
from sparse_loop_jax.kernels.project_qkv.op import project_qkv

__all__ = ["project_qkv"]
