"""Shapes of real models, states at a given context, and byte counts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.cache import PagedKVCache, pages_for
from sparse_loop_jax.decoding.adaptive import new_history
from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.state import DecodeState, RequestParams
from sparse_loop_jax.generation.buckets import power_of_two
from sparse_loop_jax.models import OURO_1_4B, OURO_2_6B, OuroConfig
from sparse_loop_jax.sparse import store as reference_store
from sparse_loop_jax.sparse.arithmetic import retained_counts

SHAPES = {
    "ouro-1.4b": OURO_1_4B,
    "ouro-2.6b": OURO_2_6B,
    # For trying the commands where there is no GPU.
    "tiny": OuroConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
    ),
}


def state_at(
    spec: DecodeSpec,
    batch: int,
    context: int,
    dtype,
    *,
    new_tokens: int,
    page_size: int = 16,
    seed: int = 0,
    outstanding_rounds: int = 1,
    retention: float | None = None,
) -> DecodeState:
    """A state whose requests hold `context` tokens of random K/V in permuted pages.

    `retention` decides the store's capacity and k; needed where the spec is sparse.
    """
    config = spec.config
    rng = np.random.default_rng(seed)
    need = pages_for(context + new_tokens + spec.rows, page_size)
    width = power_of_two(need)
    pages = batch * config.total_ut_steps * need
    table = np.full((batch, config.total_ut_steps, width), pages, np.int32)
    table[:, :, :need] = rng.permutation(pages).reshape(batch, config.total_ut_steps, need)
    shape = (pages, config.num_key_value_heads, page_size, config.head_dim)

    @jax.jit
    def pool(key):
        return jax.random.normal(key, shape, dtype)

    keys = [pool(jax.random.key(2 * i + seed)) for i in range(config.num_hidden_layers)]
    values = [pool(jax.random.key(2 * i + 1 + seed)) for i in range(config.num_hidden_layers)]
    store = key_counts = None
    if spec.sparse is not None and retention is not None:
        span = width * page_size
        counts = retained_counts(retention, span)
        store = reference_store.create(
            config,
            slots=outstanding_rounds * batch * spec.rows,
            capacity=power_of_two(int(counts[-1])),
            max_tokens=span,
        )
        key_counts = jnp.asarray(counts)
    ones = jnp.ones((batch,), jnp.int32)
    adaptive = spec.speculative is not None and spec.speculative.adaptive
    return DecodeState(
        cache=PagedKVCache(tuple(keys), tuple(values), jnp.asarray(table)),
        request=RequestParams(
            temperature=jnp.zeros((batch,), jnp.float32),
            top_k=ones * config.vocab_size,
            top_p=jnp.ones((batch,), jnp.float32),
            exit_threshold=jnp.ones((batch,), jnp.float32),
            min_loops=ones,
            max_loops=ones * config.total_ut_steps,
            stop_ids=-ones[:, None],
            key=jax.random.split(jax.random.key(seed), batch),
        ),
        token=jnp.asarray(rng.integers(1, config.vocab_size, batch), jnp.int32),
        position=ones * (context - 1),  # the first step attends to `context` keys
        remaining=ones * (new_tokens + 1),
        stopped=jnp.zeros((batch,), bool),
        store=store,
        key_counts=key_counts,
        history=new_history(batch) if adaptive else None,
        spec=spec,
    )


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """The fewest bytes of one plain decode step, from design: each weight once a loop."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv


def step_bytes(
    config: OuroConfig, batch: int, context: int, itemsize: int, retention: float = 1.0
) -> StepBytes:
    """Weights of the layers once a loop and of the head once; K/V of each loop once.

    With a retention below 1 the loops after the second read that share of their K/V.
    """
    hidden, inter = config.hidden_size, config.intermediate_size
    layer = (
        config.qkv_size + config.num_attention_heads * config.head_dim + 3 * inter
    ) * hidden
    loops = config.total_ut_steps
    weights = loops * config.num_hidden_layers * layer + config.vocab_size * hidden
    planes = min(loops, 2) + max(loops - 2, 0) * retention
    kv = batch * context * config.kv_bytes_per_token(itemsize) * planes / loops
    return StepBytes(weights * itemsize, int(kv))
