"""Ops over the paged cache, each with a plain-JAX reference that is itself shipped."""

from sparse_loop_jax.kernels.kv_write import write_kv
from sparse_loop_jax.kernels.paged_attention import paged_attention
from sparse_loop_jax.kernels.prefill_attention import prefill_attention
from sparse_loop_jax.kernels.registry import Op

__all__ = ["Op", "paged_attention", "prefill_attention", "write_kv"]
