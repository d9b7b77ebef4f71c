"""The op; its contract is the docstring of `xla.prefill_attention_xla`."""

from sparse_loop_jax.kernels.registry import Op

prefill_attention = Op("prefill_attention")
