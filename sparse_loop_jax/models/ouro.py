"""Ouro as a Flax NNX module.

The module owns the weights; the arithmetic lives in pure functions over `OuroParams`.
`model.params` is the split, done once per call of the library and never inside a step.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.models.params import LayerParams, OuroParams, param_shapes

_LAYER_FIELDS = tuple(f.name for f in dataclasses.fields(LayerParams))


class OuroLayer(nnx.Module):
    """Weights of one shared layer; the fields are those of `LayerParams`."""

    def __init__(self, params: LayerParams):
        for name in _LAYER_FIELDS:
            setattr(self, name, nnx.Param(getattr(params, name)))

    @property
    def params(self) -> LayerParams:
        return LayerParams(**{name: getattr(self, name)[...] for name in _LAYER_FIELDS})


class Ouro(nnx.Module):
    """A looped Transformer: one stack of layers, run `total_ut_steps` times over a token.

    Args:
      config: the architecture.
      rngs: for random weights (normal, `initializer_range`; norm gains are 1). A seed, a
        key or `nnx.Rngs`. Leave it out when `params` are given.
      dtype: of random weights.
      params: existing weights, taken as they are.

    Attributes:
      config: the `OuroConfig`.
      tokenizer: a `tokenizers.Tokenizer`, or None; `sparse_loop_jax.load` attaches it.
    """

    def __init__(
        self,
        config: OuroConfig,
        *,
        rngs: nnx.Rngs | jax.Array | SupportsIndex | None = None,
        dtype: Any = jnp.float32,
        params: OuroParams | None = None,
    ):
        if params is None:
            if rngs is None:
                raise ValueError("Ouro needs either params or rngs for random weights")
            if not isinstance(rngs, nnx.Rngs):
                rngs = nnx.Rngs(rngs if isinstance(rngs, jax.Array) else operator.index(rngs))
            params = random_params(config, rngs.params(), dtype)
        self.config = config
        self.tokenizer: Any = None
        self.embed = nnx.Param(params.embed)
        self.layers = nnx.List([OuroLayer(p) for p in params.layers])
        self.norm = nnx.Param(params.norm)
        self.exit_gate = nnx.Param(params.exit_gate)
        self.exit_gate_bias = nnx.Param(params.exit_gate_bias)
        self.head = None if params.head is None else nnx.Param(params.head)

    @property
    def params(self) -> OuroParams:
        """The weights as a plain pytree, what the jitted functions take."""
        return OuroParams(
            embed=self.embed[...],
            layers=tuple(layer.params for layer in self.layers),
            norm=self.norm[...],
            exit_gate=self.exit_gate[...],
            exit_gate_bias=self.exit_gate_bias[...],
            head=None if self.head is None else self.head[...],
        )

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.embed[...].dtype)

    def __repr__(self) -> str:
        config = self.config
        dtype = jnp.dtype(self.embed.get_value().dtype)  # of an abstract array too
        count = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config, dtype)))
        return (
            f"Ouro({config.num_hidden_layers} layers x {config.total_ut_steps} loops, hidden "
            f"{config.hidden_size}, {config.num_attention_heads} heads of {config.head_dim}, "
            f"{config.num_key_value_heads} of K/V, vocabulary {config.vocab_size:,}, context "
            f"{config.max_position_embeddings:,}, {count:,} parameters, {dtype})"
        )

    __str__ = __repr__  # NNX's own is a page of every weight

    def __call__(self, ids: jax.Array):
        """`sparse_loop_jax.forward(self, ids)`; ids that are traced are not checked.

        Raises:
          ValueError: as there.
        """
        from sparse_loop_jax.models.forward import forward, forward_params

        if not isinstance(ids, Tracer):
            return forward(self, ids)
        return forward_params(self.params, self.config, jnp.asarray(ids, jnp.int32))


def random_params(config: OuroConfig, key: jax.Array, dtype: Any = jnp.float32) -> OuroParams:
    """Weights from a normal of `initializer_range`, norm gains of 1, gate bias of 0."""
    shapes = param_shapes(config, dtype)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(key, len(leaves))

    def make(path, leaf, key):
        name = path[-1].name
        if "norm" in name:
            return jnp.ones(leaf.shape, leaf.dtype)
        if name == "exit_gate_bias":
            return jnp.zeros(leaf.shape, leaf.dtype)
        return _normal(key, leaf.shape, leaf.dtype, config.initializer_range)

    values = [make(path, leaf, k) for (path, leaf), k in zip(leaves, keys, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, values)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype, std: float) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(std, dtype)
