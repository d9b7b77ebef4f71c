"""The op; its contract is the docstring of `xla.paged_attention_xla`."""

from sparse_loop_jax.kernels.registry import Op

paged_attention = Op("paged_attention")
