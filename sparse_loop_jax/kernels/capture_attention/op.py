"""The ops; the contract is the docstring of `xla.capture_attention_xla`."""

from __future__ import annotations

from typing import NamedTuple

import jax

from sparse_loop_jax.kernels.registry import Op

capture_attention = Op("capture_attention")
# The same for rows whose reference goes straight into a store; the contract is the docstring
# of `xla.capture_into_xla`.
capture_into = Op("capture_attention")


class CaptureOutput(NamedTuple):
    """What a capture gives for each row."""

    out: jax.Array  # [B, n, heads, head_dim] in the dtype of q: the dense op's own output
    positions: jax.Array  # [B, n, heads, capacity] uint16 or uint32: S, ascending, then zeros
    mass: jax.Array  # [B, n, heads] float32: m, the probability of S under the full softmax
    kept: jax.Array  # [B, n, heads, head_dim] float32: C_ref, the part of S in the output


class StoredCapture(NamedTuple):
    """The output of the rows, and the references of a layer with those of the rows in them."""

    out: jax.Array  # [B, n, heads, head_dim] in the dtype of q: the dense op's own output
    positions: jax.Array  # [slots, heads, capacity] uint16 or uint32: S, ascending, then zeros
    mass: jax.Array  # [slots, heads] float32: m
    base: jax.Array  # [slots, heads, head_dim] float32: O_ref - C_ref
