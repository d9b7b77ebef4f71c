"""The op; its contract is that of `paged_attention`, the docstring of its reference.

A chunk of a prompt has many rows: products decide its time and not bytes, so there are kernels
for it alone. They round the softmax weights to the dtype of V, and may cut sums otherwise than
decoding does. The reference and the Pallas kernel of `paged_attention` serve chunks as well.
"""

from sparse_loop_jax.kernels.paged_attention.pallas import paged_attention_pallas
from sparse_loop_jax.kernels.paged_attention.xla import paged_attention_xla
from sparse_loop_jax.kernels.registry import Op

prefill_attention = Op("prefill_attention")
prefill_attention.register("xla")(paged_attention_xla)
prefill_attention.register("pallas")(paged_attention_pallas)
