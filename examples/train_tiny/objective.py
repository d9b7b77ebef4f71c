"""Ouro's training objective: the loss expected over exits, less the entropy of exits.

Zhu et al. 2025, "Scaling Latent Reasoning via Looped Language Models" (arXiv 2510.25741),
first stage: sum_d p_d CE_d - beta H(p), where p is the exit distribution of the gate.

One thing is added, for several-hop questions alone. There, a shallow loop can be given its
own target: the node that it should have reached. Its loss is then taken with equal weight of
all loops, while the gate still sees how wrong an exit there would be.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from sparse_loop_jax.models import OuroConfig, OuroParams
from sparse_loop_jax.models.forward import exit_probabilities
from sparse_loop_jax.models.layers import exit_gate_logits, lm_logits

from .network import Attention, cast, loop_states


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What one step trains on."""

    ids: jax.Array  # int32 [B, T]
    targets: jax.Array  # int32 [D, B, T]: what each loop should say next
    weights: jax.Array  # float32 [B, T], of each position in the loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Constants of the objective, and how it is computed."""

    entropy: float = 0.1  # beta
    dtype: str = "bfloat16"
    attention: Attention = "chunked"
    remat: bool = True
    rows: int = 8192  # positions whose logits of all loops exist at a time


def loss_and_metrics(
    params: OuroParams, config: OuroConfig, objective: Objective, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted mean loss of a batch, in nats.

    Returns:
      The loss, and metrics: `cross_entropy [D]` of the last loop's targets, unweighted mean;
      `exits [D]`, the mean exit distribution; `weighted [D]`, weighted mean cross-entropy of
      the targets of each loop.
    """
    count = batch.ids.size
    rows = min(objective.rows, count)
    if count % rows:
        raise ValueError(f"{count} tokens a batch are no multiple of rows={rows}")
    states = loop_states(
        params,
        config,
        batch.ids,
        dtype=objective.dtype,
        attention=objective.attention,
        remat=objective.remat,
    )
    depth, hidden = config.total_ut_steps, config.hidden_size

    def chunks(x, width):  # [D or 1, B, T, ...] -> [chunks, D or 1, rows, ...]
        x = x.reshape(x.shape[0], count // rows, rows, *width)
        return jnp.moveaxis(x, 1, 0)

    total = functools.partial(chunk_sums, params, objective)
    parts = (
        chunks(states, (hidden,)),
        chunks(batch.targets, ()),
        chunks(batch.weights[None], ()),
    )
    zero = jnp.zeros((), jnp.float32)
    sums = {name: jnp.zeros((depth,), jnp.float32) for name in ("plain", "weighted", "exits")}
    (loss, sums), _ = jax.lax.scan(jax.checkpoint(total), (zero, sums), parts)
    weight = jnp.maximum(jnp.sum(batch.weights), 1e-6)
    metrics = {
        "cross_entropy": sums["plain"] / count,
        "exits": sums["exits"] / count,
        "weighted": sums["weighted"] / weight,
    }
    return loss / weight, metrics


def chunk_sums(params: OuroParams, objective: Objective, carry, part):
    """Adds the sums over one chunk of positions; see `loss_and_metrics`.

    Args:
      part: states `[D, rows, hidden]`, targets `[D, rows]`, weights `[1, rows]`.
    """
    states, targets, weights = part
    rounded = cast(params, objective.dtype)  # here, so that gradients are summed in float32
    logits = lm_logits(rounded, states)  # [D, rows, vocab]
    own = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    last = jnp.broadcast_to(targets[-1:], targets.shape)
    final = optax.softmax_cross_entropy_with_integer_labels(logits, last)
    exits = exit_probabilities(exit_gate_logits(rounded, states))
    staged = jnp.any(targets != last, axis=0, keepdims=True)
    share = jnp.where(staged, 1.0 / targets.shape[0], jax.lax.stop_gradient(exits))
    # Same value and gradients as exits * final where nothing is staged.
    expected = share * own + (exits - jax.lax.stop_gradient(exits)) * jax.lax.stop_gradient(
        final
    )
    entropy = -exits * jnp.log(jnp.maximum(exits, 1e-9))
    loss, sums = carry
    loss = loss + jnp.sum(weights * (expected - objective.entropy * entropy))
    added = {"plain": final, "weighted": weights * own, "exits": exits}
    return (loss, {name: sums[name] + added[name].sum(axis=1) for name in sums}), None
