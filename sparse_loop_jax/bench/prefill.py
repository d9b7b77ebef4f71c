"""`sparse-loop bench prefill`: prompts through all loops."""

from __future__ import annotations

import jax

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.model import step_bytes
from sparse_loop_jax.bench.report import Row, note
from sparse_loop_jax.generation import start
from sparse_loop_jax.generation.compilation import count_compilations
from sparse_loop_jax.generation.memory import peak_bytes
from sparse_loop_jax.models import Ouro, OuroConfig


def bench_prefill(
    config: OuroConfig,
    cases: list[tuple[int, int]],
    *,
    dtype: str = "bfloat16",
    repeats: int = 3,
    implementation: str | None = None,
) -> list[Row]:
    """Times the prefill of (batch, tokens) prompts, from an idle to an idle device."""
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
        rows.append(
            {
                "batch": batch,
                "tokens": tokens,
                "seconds": timing.median,
                "tokens/s": batch * tokens / timing.median,
                "TFLOP/s": _prefill_flops(config, batch, tokens) / timing.median / 1e12,
                "spread": timing.spread,
                "compile s": compiled.seconds,
                "programs": compiled.programs,
                "peak GB": None if (peak := peak_bytes()) is None else peak / 1e9,
            }
        )
    return rows


def _prefill_flops(config: OuroConfig, batch: int, tokens: int) -> float:
    """Products of the layers in every loop, and causal attention."""
    layer = step_bytes(config, 1, 0, 1).weights - config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.total_ut_steps
    attention *= 2 * config.num_attention_heads * config.head_dim * tokens  # half of 4 * d * T
    return batch * tokens * (2.0 * layer + attention)
