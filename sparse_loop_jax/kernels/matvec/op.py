"""The ops; their contracts are the docstrings of the references in `xla`."""

from sparse_loop_jax.kernels.registry import Op

linear = Op("linear")
gated_linear = Op("gated_linear")
linear_add_norm = Op("linear_add_norm")
