"""The op; its contract is the docstring of `xla.select_keys_xla`."""

from sparse_loop_jax.kernels.registry import Op

select_keys = Op("select_keys")
