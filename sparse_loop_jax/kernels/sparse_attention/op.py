"""The op; its contract is the docstring of `xla.sparse_attention_xla`."""

from sparse_loop_jax.kernels.registry import Op

sparse_attention = Op("sparse_attention")
