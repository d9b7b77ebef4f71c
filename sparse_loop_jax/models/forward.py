"""The whole model over whole sequences, without a cache, and the published readouts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.kernels.matvec.xla import linear_xla
from sparse_loop_jax.kernels.project_qkv.xla import rotate, split_qkv
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.models.ids import id_array, within_vocabulary
from sparse_loop_jax.models.layers import (
    exit_gate_logits,
    lm_logits,
    rope_angles,
    run_layers,
)
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.models.params import OuroParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """What each of the D loops gave for each of the T positions."""

    hidden: jax.Array  # [D, B, T, hidden], final norm applied: the next loop's input
    logits: jax.Array  # [D, B, T, vocab] float32
    gate_logits: jax.Array  # [D, B, T] float32, before the sigmoid

    @property
    def exit_probabilities(self) -> jax.Array:
        """Probability of leaving after each loop, [D, B, T]; sums to 1 over loops."""
        return exit_probabilities(self.gate_logits)

    def loop_logits(self, loop: int = -1) -> jax.Array:
        """Readout of one fixed loop (the last by default), [B, T, vocab]."""
        loops = self.logits.shape[0]
        if not -loops <= loop < loops:
            raise ValueError(f"loop must be in [{-loops}, {loops}), got {loop}")
        return self.logits[loop]

    def exit_loops(self, threshold: float) -> jax.Array:
        """First loop whose summed exit probability reaches `threshold`, int32 [B, T]."""
        return exit_loops(self.gate_logits, threshold)

    def exit_logits(self, threshold: float) -> jax.Array:
        """Readout of the loop that `exit_loops` chooses, [B, T, vocab]."""
        index = self.exit_loops(threshold)[None, :, :, None]
        return jnp.take_along_axis(self.logits, index, axis=0)[0]

    def weighted_logits(self) -> jax.Array:
        """Logits averaged over the exit distribution, [B, T, vocab]."""
        return jnp.sum(self.exit_probabilities[..., None] * self.logits, axis=0)


def exit_probabilities(gate_logits: jax.Array) -> jax.Array:
    """p_r = sigmoid(g_r) prod_{j<r} (1 - sigmoid(g_j)); the last loop takes the rest.

    Shapes: `[D, ...] -> [D, ...]`, float32 (published code: the model's dtype).
    """
    hazard = jax.nn.sigmoid(gate_logits.astype(jnp.float32))
    survival = jnp.cumprod(1.0 - hazard, axis=0)
    before = jnp.concatenate([jnp.ones_like(survival[:1]), survival[:-1]], axis=0)
    return jnp.concatenate([(hazard * before)[:-1], before[-1:]], axis=0)


def exit_loops(gate_logits: jax.Array, threshold: float) -> jax.Array:
    """The published exit rule: int32 `[D, ...] -> [...]`, the last loop if none reaches it.

    A threshold of 1 is never reached, also where a gate's float32 probability is 1.
    """
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold must be in [0, 1], got {threshold}")
    reached = jnp.cumsum(exit_probabilities(gate_logits), axis=0) >= threshold
    reached &= threshold < 1.0
    last = gate_logits.shape[0] - 1
    return jnp.where(reached.any(axis=0), jnp.argmax(reached, axis=0), last).astype(jnp.int32)


def forward(model: Ouro, ids) -> ForwardOutput:
    """Runs every loop over `ids` (int [B, T] or [T]) with full causal attention.

    No cache and no padding: every row has T tokens. Memory grows with T squared; for long
    prompts use `sparse_loop_jax.generate`.

    Raises:
      ValueError: `ids` is empty, ragged, not integer, too long, or outside the vocabulary;
        nothing has been compiled then.
    """
    ids = id_array(ids, "ids")
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids must be integers, got {ids.dtype}")
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.size == 0:
        raise ValueError(
            f"ids must have shape [batch, tokens] and not be empty, got {ids.shape}"
        )
    if ids.shape[1] > model.config.max_position_embeddings:
        raise ValueError(
            f"{ids.shape[1]} tokens are more than the context of "
            f"{model.config.max_position_embeddings}"
        )
    ids = within_vocabulary(ids, model.config.vocab_size, "ids")
    return forward_params(model.params, model.config, jnp.asarray(ids))


@functools.partial(jax.jit, static_argnames=("config",))
def forward_params(params: OuroParams, config: OuroConfig, ids: jax.Array) -> ForwardOutput:
    """`forward` on a plain pytree of weights; pure, jitted, differentiable."""
    length = ids.shape[1]
    x = params.embed[ids]
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    cos, sin = rope_angles(positions, config, x.dtype)
    causal = jnp.tril(jnp.ones((1, 1, 1, length, length), bool))

    def mix(_, p):
        def attend(normed):
            q, k, v = split_qkv(
                linear_xla(normed, p.qkv), config.num_key_value_heads, config.head_dim
            )
            out = _causal_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, causal)
            return out.reshape(*normed.shape[:-1], -1)

        return attend

    def loop(x, _):
        # The reference products: this is what gradients are taken of.
        x = run_layers(params, config, x, mix, implementation="xla")
        return x, (x, lm_logits(params, x), exit_gate_logits(params, x))

    _, outputs = jax.lax.scan(loop, x, length=config.total_ut_steps)
    return ForwardOutput(*outputs)


def _causal_attention(q, k, v, mask):
    """Attention of [B, T, heads, d] queries over their own sequence, softmax in float32."""
    batch, length, heads, dim = q.shape
    group = heads // k.shape[2]
    q = q.reshape(batch, length, k.shape[2], group, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v)
    return out.reshape(batch, length, heads, dim)
