"""The op; its contract is the docstring of `xla.project_qkv_xla`."""

from sparse_loop_jax.kernels.registry import Op

project_qkv = Op("project_qkv")
