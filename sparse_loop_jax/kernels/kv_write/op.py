"""The op; its contract is the docstring of `xla.write_kv_xla`."""

from sparse_loop_jax.kernels.registry import Op

write_kv = Op("write_kv")
