"""The arithmetic of one layer, shared by every way of running the model.

Nothing here knows about caches: mixing rows, the one thing that differs between a whole
sequence and decoding, is a callback.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.matvec import gated_linear, linear_add_norm
from sparse_loop_jax.kernels.matvec.xla import linear_xla, rms_norm as rms_norm
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.models.params import LayerParams, OuroParams

# Normed rows [..., hidden] -> attention output [..., heads * head_dim].
Mix = Callable[[jax.Array], jax.Array]


def rope_angles(positions: jax.Array, config: OuroConfig, dtype) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[..., head_dim]` of integer positions `[...]`.

    Frequencies and angles are float32 whatever the model's dtype; only the result is
    rounded. Half-split layout: both halves carry the same angles.
    """
    half = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    inv_freq = 1.0 / (jnp.float32(config.rope_theta) ** half)
    angles = positions[..., None].astype(jnp.float32)
    angles = angles * inv_freq.reshape((1,) * positions.ndim + inv_freq.shape)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def run_layers(
    params: OuroParams,
    config: OuroConfig,
    x: jax.Array,
    mix: Callable[[int, LayerParams], Mix],
    implementation: str | None = None,
) -> jax.Array:
    """One loop: all layers over rows `x [..., hidden]`, and the final norm.

    Args:
      mix: (layer index, its weights) -> the attention of that layer, projection of queries,
        keys and values included, output projection not.
      implementation: of the products.

    Returns:
      The normed state `[..., hidden]`: the next loop's input, and what the LM head and the
      exit gate read.
    """
    eps = config.rms_norm_eps
    # Each branch ends with the norm that the next one starts with, so that a layer is a
    # few kernels that read each weight once.
    gains = [p.input_norm for p in params.layers[1:]] + [params.norm]
    normed = rms_norm(x, params.layers[0].input_norm, eps)
    for layer, (p, next_gain) in enumerate(zip(params.layers, gains, strict=True)):
        x, normed = linear_add_norm(
            mix(layer, p)(normed),
            p.out,
            x,
            p.input_norm_2,
            p.post_attention_norm,
            eps=eps,
            implementation=implementation,
        )
        x, normed = linear_add_norm(
            gated_linear(normed, p.gate_up, implementation=implementation),
            p.down,
            x,
            p.post_attention_norm_2,
            next_gain,
            eps=eps,
            implementation=implementation,
        )
    return normed


def exit_gate_logits(params: OuroParams, hidden: jax.Array) -> jax.Array:
    """Exit-gate logit of each row, float32 `[...]`, from a loop's normed state."""
    gate = linear_xla(hidden, params.exit_gate)[..., 0] + params.exit_gate_bias[0]
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
