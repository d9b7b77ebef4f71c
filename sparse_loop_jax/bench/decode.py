"""`sparse-loop bench decode`: the whole decode step, against the bytes it must move."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.model import random_weights, state_at, step_bytes
from sparse_loop_jax.bench.report import Row
from sparse_loop_jax.decoding import DecodeSpec, RoundDriver
from sparse_loop_jax.generation.compilation import count_compilations
from sparse_loop_jax.models import OuroConfig, OuroParams
from sparse_loop_jax.sparse import SparseDecodeConfig


def bench_decode(
    config: OuroConfig,
    cases: list[tuple[int, int]],
    *,
    dtype: str = "bfloat16",
    retentions: list[float] = [],  # noqa: B006 - not mutated
    steps: int = 32,
    repeats: int = 5,
    implementation: str | None = None,
    peer: dict[tuple[int, int], float] | None = None,
) -> list[Row]:
    """Times plain decode steps, dense and for each retention, at (batch, context) cases.

    Steps are submitted one ahead of the last and timed from an idle device to an idle
    device, `steps` at a time. Random weights and K/V, permuted pages.

    Args:
      peer: seconds of another system's dense step at the same cases.

    Raises:
      RuntimeError: a sparse run did not capture and consume in every layer.
    """
    params = random_weights(config, dtype)
    peak = measure.bandwidth()
    rows = []
    for batch, context in cases:
        dense_seconds = None
        for retention in [1.0, *retentions]:
            sparse = SparseDecodeConfig(key_retention=retention)
            spec = DecodeSpec(
                config,
                implementation=implementation,
                sparse=None if sparse.is_dense else sparse.compiled_part,
            )
            row = _one(params, spec, retention, batch, context, dtype, steps, repeats)
            floor = step_bytes(
                config, batch, context + steps // 2, jnp.dtype(dtype).itemsize, retention
            )
            seconds = row.pop("seconds")
            dense_seconds = dense_seconds or seconds
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "retention": retention,
                    "ms/step": seconds * 1e3,
                    "tokens/s": batch / seconds,
                    "GB": floor.total / 1e9,
                    "of roofline": floor.total / peak / seconds,
                    "vs dense": dense_seconds / seconds,
                    "vs torch": (peer or {}).get((batch, context), float("nan")) / seconds,
                    **row,
                }
            )
    return rows


def _one(
    params: OuroParams, spec: DecodeSpec, retention, batch, context, dtype, steps, repeats
) -> Row:
    state = state_at(
        spec,
        batch,
        context,
        jnp.dtype(dtype),
        new_tokens=steps,
        outstanding_rounds=2,
        retention=retention,
    )
    start = jax.device_get((state.position, state.remaining))
    captured = []

    def run():
        # Every repeat begins at the same context.
        nonlocal state
        position, remaining = map(jnp.asarray, start)
        state = dataclasses.replace(state, position=position, remaining=remaining)
        with RoundDriver(params, state) as driver:
            for _ in range(steps):
                driver.submit()
                if not driver.can_submit:
                    captured.append(driver.collect())
            captured.append(driver.collect())
            state = driver.drain()
        return state.token

    with count_compilations() as compiled:
        timing = measure.time_calls(run, repeats=repeats, inner=steps)
    _check_sparse(spec, batch, [round_.counters for round_ in captured])
    return {
        "seconds": timing.median,
        "spread": timing.spread,
        "compile s": compiled.seconds,
        "programs": compiled.programs,
        "peak GB": None if (peak := measure.peak_bytes()) is None else peak / 1e9,
    }


def _check_sparse(spec: DecodeSpec, batch: int, counters: list) -> None:
    """A sparse run that ran dense is no result."""
    if spec.sparse is None:
        return
    modes = spec.sparse.modes(spec.config.total_ut_steps)
    rows = batch * spec.config.num_hidden_layers
    want = tuple(rows * sum(kind in mode for mode in modes) for kind in ("capture", "consume"))
    for counted in counters:
        got = (int(counted.sparse.captured), int(counted.sparse.consumed))
        if got != want:
            raise RuntimeError(f"a step should capture and consume {want} rows, and did {got}")


def bench_prefill(
    config: OuroConfig,
    cases: list[tuple[int, int]],
    *,
    dtype: str = "bfloat16",
    repeats: int = 3,
    implementation: str | None = None,
) -> list[Row]:
    """Times the prefill of (batch, tokens) prompts, from an idle to an idle device."""
    from sparse_loop_jax.generation.start import start
    from sparse_loop_jax.models import Ouro

    model = Ouro(config, params=random_weights(config, dtype))
    rows = []
    for batch, tokens in cases:
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
                "peak GB": None if (peak := measure.peak_bytes()) is None else peak / 1e9,
            }
        )
    return rows


def _prefill_flops(config: OuroConfig, batch: int, tokens: int) -> float:
    """Products of the layers in every loop, and causal attention."""
    layer = step_bytes(config, 1, 0, 1).weights - config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.total_ut_steps
    attention *= 2 * config.num_attention_heads * config.head_dim * tokens  # half of 4 * d * T
    return batch * tokens * (2.0 * layer + attention)
