"""The library's model as training wants it: hidden states of every loop, little memory.

`sparse_loop_jax.forward` keeps the logits of all loops and attention weights of T x T; here
the layers are the same functions, attention is fused or chunked, and logits are left to the
objective.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels.matvec.xla import linear_xla
from sparse_loop_jax.kernels.project_qkv.xla import rotate, split_qkv
from sparse_loop_jax.models import OuroConfig, OuroParams
from sparse_loop_jax.models.layers import rope_angles, run_layers
from sparse_loop_jax.models.ouro import random_params

Attention = Literal["cudnn", "chunked"]


def default_attention(dtype: str) -> Attention:
    """cuDNN's fused attention on a GPU for the dtypes it has, the chunked one elsewhere."""
    fused = jax.default_backend() == "gpu" and dtype in ("bfloat16", "float16")
    return "cudnn" if fused else "chunked"


def loop_states(
    params: OuroParams,
    config: OuroConfig,
    ids: jax.Array,
    *,
    dtype=jnp.bfloat16,
    attention: Attention = "chunked",
    remat: bool = True,
) -> jax.Array:
    """Normed states after each loop of full causal attention over each row.

    Args:
      params: float32 masters.
      ids: int32 `[B, T]`.
      dtype: of the arithmetic. Weights are rounded inside each loop, so that their gradients
        are summed over loops in float32.
      attention: "cudnn" (bfloat16 on a GPU) or "chunked".
      remat: keep only what enters each loop, and compute the rest again for the gradient.

    Returns:
      `[D, B, T, hidden]` of `dtype`: what the LM head and the exit gate read.
    """
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    cos, sin = rope_angles(positions, config, dtype)
    attend = cudnn_attention if attention == "cudnn" else chunked_attention

    def loop(x, _):
        weights = cast(params, dtype)

        def mix(_, p):
            def mixed(normed):
                qkv = linear_xla(normed, p.qkv)
                q, k, v = split_qkv(qkv, config.num_key_value_heads, config.head_dim)
                out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
                return out.reshape(*normed.shape[:-1], -1)

            return mixed

        x = run_layers(weights, config, x, mix, implementation="xla")
        return x, x

    x = params.embed[ids].astype(dtype)  # gathered first: its gradient is summed in float32
    _, states = jax.lax.scan(
        jax.checkpoint(loop) if remat else loop, x, length=config.total_ut_steps
    )
    return states


def cast(params: OuroParams, dtype) -> OuroParams:
    """All weights rounded to `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention `[B, T, heads, head_dim]` by cuDNN; bfloat16 or float16, GPUs only."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def chunked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, chunk: int = 512
) -> jax.Array:
    """Causal attention in plain JAX, a block of queries at a time.

    Memory is `chunk * T` weights a head, in the gradient as well. Softmax in float32.

    Args:
      q: `[B, T, heads, head_dim]`.
      k, v: `[B, T, kv_heads, head_dim]`.
      chunk: queries of a block; T is a multiple of it, or not above it.

    Returns:
      As q.

    Raises:
      ValueError: T is neither.
    """
    batch, length, heads, dim = q.shape
    size = min(chunk, length)
    if length % size:
        raise ValueError(f"a length of {length} is no multiple of the chunk of {chunk}")
    group = heads // k.shape[2]
    blocks = q.reshape(batch, length // size, size, k.shape[2], group, dim)
    columns = jnp.arange(length)[None, :]

    @jax.checkpoint
    def block(_, item):
        start, queries = item  # [B, size, kv_heads, group, dim]
        scores = jnp.einsum("btkgd,bskd->bkgts", queries, k, preferred_element_type=jnp.float32)
        seen = columns <= start + jnp.arange(size)[:, None]
        scores = jnp.where(seen[None, None, None], scores * dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return None, jnp.einsum("bkgts,bskd->btkgd", weights, v)

    starts = jnp.arange(0, length, size)
    _, out = jax.lax.scan(block, None, (starts, jnp.moveaxis(blocks, 1, 0)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, length, heads, dim)


@functools.partial(jax.jit, static_argnames=("config",))
def initial_params(config: OuroConfig, key: jax.Array) -> OuroParams:
    """Random float32 weights.

    Tables: standard deviation 0.5 (embedding) and 0.5 / sqrt(hidden) (head). Matrices:
    1 / sqrt(inputs). Norm gains 1, those on the outputs of branches 0.3, so that a layer
    starts near the identity; the gate starts at 0, each exit then halving what is left.
    """
    params = random_params(config, key)

    def scaled(path, leaf):
        name = path[-1].name
        if name in ("input_norm_2", "post_attention_norm_2"):
            return leaf * 0.3
        if name == "exit_gate":
            return jnp.zeros_like(leaf)
        if leaf.ndim < 2:
            return leaf
        std = 0.5 if name == "embed" else leaf.shape[1] ** -0.5
        return leaf * ((0.5 * std if name == "head" else std) / config.initializer_range)

    return jax.tree_util.tree_map_with_path(scaled, params)
