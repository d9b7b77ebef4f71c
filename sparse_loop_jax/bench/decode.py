"""`sparse-loop bench decode`: the whole decode step, against the bytes it must move."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.model import step_bytes
from sparse_loop_jax.bench.report import Row
from sparse_loop_jax.bench.rounds import check_sparse, time_rounds
from sparse_loop_jax.decoding import DecodeSpec
from sparse_loop_jax.models import OuroConfig
from sparse_loop_jax.models.ouro import random_params
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
    params = random_params(config, jax.random.key(0), dtype)
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
            timed = time_rounds(
                params, spec, batch, context, dtype, retention, rounds=steps, repeats=repeats
            )
            check_sparse(spec, batch, timed.counters)
            floor = step_bytes(
                config, batch, context + steps // 2, jnp.dtype(dtype).itemsize, retention
            )
            seconds = timed.timing.median
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
                    **timed.columns(),
                }
            )
    return rows
