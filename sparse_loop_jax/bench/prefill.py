"""`sparse-loop bench prefill`: prompts through all loops."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.model import step_bytes
from sparse_loop_jax.bench.report import Row, note
from sparse_loop_jax.generation import start
from sparse_loop_jax.generation.buckets import CHUNKS
from sparse_loop_jax.generation.compilation import count_compilations
from sparse_loop_jax.generation.memory import peak_bytes
from sparse_loop_jax.kernels.prefill_attention import prefill_attention
from sparse_loop_jax.kernels.workloads import AttentionWorkload, paged_inputs
from sparse_loop_jax.models import Ouro, OuroConfig

TURNS = 32  # of attention in one timing, so that its start does not count


def bench_prefill(
    config: OuroConfig,
    cases: list[tuple[int, int]],
    *,
    dtype: str = "bfloat16",
    repeats: int = 3,
    implementation: str | None = None,
    peer: Mapping[tuple[int, int], float] | None = None,
) -> list[Row]:
    """Times the prefill of (batch, tokens) prompts, from an idle to an idle device.

    And the attention of one layer in one loop of it by itself.

    Args:
      peer: seconds of another system's attention, by (batch, tokens).
    """
    model = Ouro(config, rngs=0, dtype=dtype)
    rows = []
    for batch, tokens in cases:
        note(f"prefill: {batch}x{tokens}")
        ids = jax.random.randint(jax.random.key(1), (batch, tokens), 1, config.vocab_size)
        prompts = jax.device_get(ids).tolist()

        def run(prompts=prompts):
            _, state, _ = start(model, prompts, max_new_tokens=1, implementation=implementation)
            return state.token

        with count_compilations() as compiled:
            timing = measure.time_calls(run, repeats=repeats)
        attention = attention_seconds(
            config, batch, tokens, dtype, repeats=repeats, implementation=implementation
        )
        against = (peer or {}).get((batch, tokens))
        rows.append(
            {
                "batch": batch,
                "tokens": tokens,
                "seconds": timing.median,
                "tokens/s": batch * tokens / timing.median,
                "TFLOP/s": _prefill_flops(config, batch, tokens) / timing.median / 1e12,
                "attention ms": attention * 1e3,
                "attention vs torch": None if against is None else against / attention,
                "spread": timing.spread,
                "compile s": compiled.seconds,
                "programs": compiled.programs,
                "peak GB": None if (peak := peak_bytes()) is None else peak / 1e9,
            }
        )
    return rows


def attention_seconds(
    config: OuroConfig,
    batch: int,
    tokens: int,
    dtype: str,
    *,
    repeats: int,
    implementation: str | None,
) -> float:
    """Median seconds of causal attention over whole prompts, in the chunks of a prefill."""
    chunk = min(tokens, CHUNKS[-1])
    workload = AttentionWorkload(
        batch=batch,
        context=tokens,
        rows=chunk,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    q, k, v, table, _ = paged_inputs(workload).args()
    ends = range(chunk, tokens + chunk, chunk)

    @jax.jit
    def run(q, k, v, table):
        def turn(_, q):
            for end in ends:  # a call's output is the next one's query
                last = jnp.minimum(jnp.arange(end - chunk, end, dtype=jnp.int32) + 1, tokens)
                lengths = jnp.broadcast_to(last, (batch, chunk))
                q = attend(q, k, v, table, lengths)
            return q

        return jax.lax.fori_loop(0, TURNS, turn, q)

    attend = functools.partial(prefill_attention, implementation=implementation)
    return measure.time_calls(lambda: run(q, k, v, table), repeats=repeats).median / TURNS


def _prefill_flops(config: OuroConfig, batch: int, tokens: int) -> float:
    """Products of the layers in every loop, and causal attention."""
    layer = step_bytes(config, 1, 0, 1).weights - config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.total_ut_steps
    attention *= 2 * config.num_attention_heads * config.head_dim * tokens  # half of 4 * d * T
    return batch * tokens * (2.0 * layer + attention)
