"""Products of a few rows with a weight matrix in plain JAX: the references."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.matvec.op import gated_linear, linear, linear_add_norm


@linear.register("xla")
def linear_xla(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T`.

    Args:
      x: `[..., K]`.
      weight: `[N, K]`, of the dtype of x.

    Returns:
      `[..., N]` in the dtype of x, sums in float32.
    """
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


@gated_linear.register("xla")
def gated_linear_xla(x: jax.Array, gate_up: jax.Array) -> jax.Array:
    """SwiGLU's first half: `silu(x @ gate.T) * (x @ up.T)`.

    Args:
      x: `[..., K]`.
      gate_up: `[2 N, K]`, the gate's rows above those of up.

    Returns:
      `[..., N]` in the dtype of x; both products are rounded to it before they are used.
    """
    gate, up = jnp.split(linear_xla(x, gate_up), 2, axis=-1)
    return jax.nn.silu(gate) * up


@linear_add_norm.register("xla")
def linear_add_norm_xla(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array,
    gain: jax.Array,
    next_gain: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """The end of a branch between norms, and the norm that starts the next one.

    Args:
      x: `[..., K]`, what the branch computed.
      weight: `[N, K]`, its last projection.
      residual: `[..., N]`, the residual stream.
      gain: `[N]` of the norm on the branch's output.
      next_gain: `[N]` of the norm that reads the new residual stream.
      eps: added to the mean squares.

    Returns:
      The residual stream `residual + rms_norm(x @ weight.T, gain)` and
      `rms_norm` of it with `next_gain`, both `[..., N]` in the dtype of x.
    """
    residual = residual + rms_norm(linear_xla(x, weight), gain, eps)
    return residual, rms_norm(residual, next_gain, eps)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """`gain * x / rms(x)` over the last axis: the root in float32, the gain in x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return gain.reshape((1,) * (x.ndim - 1) + gain.shape) * (x32 * scale).astype(x.dtype)
