"""The arithmetic of one layer, shared by every way of running the model.

Nothing here knows about caches: attention is a callback that gets the rotated queries and
keys and the values of the rows at hand.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.models.params import LayerParams, OuroParams

# (q [..., heads, head_dim], k, v [..., kv_heads, head_dim]) -> [..., heads, head_dim]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`weight * x / rms(x)`: the root in float32, the gain in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return _align(weight, x) * (x32 * scale).astype(x.dtype)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` for a weight `[out, in]`, in the dtype of `x`."""
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def rope_angles(positions: jax.Array, config: OuroConfig, dtype) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[..., head_dim]` of integer positions `[...]`.

    Frequencies and angles are float32 whatever the model's dtype; only the result is
    rounded. Half-split layout: both halves carry the same angles.
    """
    half = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    inv_freq = 1.0 / (jnp.float32(config.rope_theta) ** half)
    angles = positions[..., None].astype(jnp.float32)
    angles = angles * _align(inv_freq, angles)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `x [..., heads, head_dim]` by angles `[..., head_dim]` (half-split).

    The angles may lack leading axes of `x`, which then share them.
    """
    cos, sin = (_align(angle[..., None, :], x) for angle in (cos, sin))
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([-second, first], axis=-1)
    return x * cos + rotated * sin


def _align(values: jax.Array, like: jax.Array) -> jax.Array:
    """`values` with leading axes of 1 up to the rank of `like`."""
    return jnp.expand_dims(values, tuple(range(like.ndim - values.ndim)))


def decoder_layer(
    p: LayerParams, config: OuroConfig, x: jax.Array, cos, sin, attend: Attend
) -> jax.Array:
    """One layer on rows `x [..., hidden]`, norms before and after both branches."""
    heads, kv_heads, dim = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    eps = config.rms_norm_eps
    lead = x.shape[:-1]

    qkv = linear(rms_norm(x, p.input_norm, eps), p.qkv).reshape(*lead, -1, dim)
    q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=-2)
    mixed = attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
    x = x + rms_norm(linear(mixed.reshape(*lead, heads * dim), p.out), p.input_norm_2, eps)

    gate, up = jnp.split(linear(rms_norm(x, p.post_attention_norm, eps), p.gate_up), 2, axis=-1)
    mlp = linear(jax.nn.silu(gate) * up, p.down)
    return x + rms_norm(mlp, p.post_attention_norm_2, eps)


def exit_gate_logits(params: OuroParams, hidden: jax.Array) -> jax.Array:
    """Exit-gate logit of each row, float32 `[...]`, from a loop's normed state."""
    gate = linear(hidden, params.exit_gate)[..., 0] + params.exit_gate_bias[0]
    return gate.astype(jnp.float32)


def lm_logits(params: OuroParams, hidden: jax.Array) -> jax.Array:
    """Logits `[..., vocab]` in float32 of a loop's normed state."""
    head = params.lm_head
    return jax.lax.dot_general(
        hidden,
        head,
        (((hidden.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
