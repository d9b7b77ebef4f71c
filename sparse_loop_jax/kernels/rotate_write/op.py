"""The op; its contract is the docstring of `xla.rotate_write_xla`."""

from sparse_loop_jax.kernels.registry import Op

rotate_write = Op("rotate_write")
