"""The weights of an Ouro model as a plain pytree, in the layout that decoding wants.

Every matrix is `[out, in]`, as published, so that a row is contiguous along the reduction
and a checkpoint tensor is a view of a block of rows: `qkv` is the query, key and value
projections one above the other, `gate_up` the gate and up projections. Each layer has its
own arrays: a stacked array that a loop slices would be copied at every layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_loop_jax.models.config import OuroConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """One layer of the shared stack. Shapes: see `param_shapes`."""

    input_norm: jax.Array  # [hidden]
    qkv: jax.Array  # [(heads + 2 kv_heads) * head_dim, hidden]
    out: jax.Array  # [hidden, heads * head_dim]
    input_norm_2: jax.Array  # [hidden], on the attention branch's output
    post_attention_norm: jax.Array  # [hidden], before the MLP
    gate_up: jax.Array  # [2 * intermediate, hidden]
    down: jax.Array  # [hidden, intermediate]
    post_attention_norm_2: jax.Array  # [hidden], on the MLP branch's output


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OuroParams:
    """All weights. `head` is None when the embedding table is the LM head."""

    embed: jax.Array  # [vocab, hidden]
    layers: tuple[LayerParams, ...]
    norm: jax.Array  # [hidden], applied after every loop
    exit_gate: jax.Array  # [1, hidden]
    exit_gate_bias: jax.Array  # [1]
    head: jax.Array | None  # [vocab, hidden]

    @property
    def lm_head(self) -> jax.Array:
        """The table that logits are read with, [vocab, hidden]."""
        return self.embed if self.head is None else self.head


def layer_shapes(config: OuroConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each field of a `LayerParams`."""
    hidden, inter = config.hidden_size, config.intermediate_size
    return {
        "input_norm": (hidden,),
        "qkv": (config.qkv_size, hidden),
        "out": (hidden, config.num_attention_heads * config.head_dim),
        "input_norm_2": (hidden,),
        "post_attention_norm": (hidden,),
        "gate_up": (2 * inter, hidden),
        "down": (hidden, inter),
        "post_attention_norm_2": (hidden,),
    }


def param_shapes(config: OuroConfig, dtype) -> OuroParams:
    """An `OuroParams` of `jax.ShapeDtypeStruct`, for tracing without weights."""

    def leaf(shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def layer():
        return LayerParams(**{name: leaf(s) for name, s in layer_shapes(config).items()})

    hidden, vocab = config.hidden_size, config.vocab_size
    return OuroParams(
        embed=leaf((vocab, hidden)),
        layers=tuple(layer() for _ in range(config.num_hidden_layers)),
        norm=leaf((hidden,)),
        exit_gate=leaf((1, hidden)),
        exit_gate_bias=leaf((1,)),
        head=None if config.tie_word_embeddings else leaf((vocab, hidden)),
    )
