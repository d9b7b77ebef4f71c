"""Dense attention of a chunk of a prompt over a paged K/V cache."""

from sparse_loop_jax.kernels.prefill_attention import mosaic as mosaic
from sparse_loop_jax.kernels.prefill_attention.op import prefill_attention

__all__ = ["prefill_attention"]
