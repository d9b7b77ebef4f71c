"""`sparse-loop bench speculative`: whole rounds, against plain steps and the byte model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.model import StepBytes, step_bytes
from sparse_loop_jax.bench.report import Row
from sparse_loop_jax.bench.rounds import check_sparse, time_rounds
from sparse_loop_jax.decoding import DecodeSpec, SpeculativeConfig
from sparse_loop_jax.models import OuroConfig
from sparse_loop_jax.models.ouro import random_params
from sparse_loop_jax.sparse import SparseDecodeConfig


def bench_speculative(
    config: OuroConfig,
    cases: list[tuple[int, int]],
    *,
    dtype: str = "bfloat16",
    retentions: list[float] = [],  # noqa: B006 - not mutated
    draft_loops: tuple[int, ...] = (2, 1),
    num_speculative_tokens: int = 3,
    steps: int = 16,
    repeats: int = 5,
    implementation: str | None = None,
) -> list[Row]:
    """Times rounds with full acceptance forced, dense and sparse, beside plain steps.

    "vs plain" is tokens a second over plain dense steps; "vs better" is over the better of
    plain sparse steps and dense speculation with the same draft loops, for what does both.

    Raises:
      RuntimeError: a sparse run did not capture and consume every row in every layer.
    """
    params = random_params(config, jax.random.key(0), dtype)
    peak = measure.bandwidth()
    itemsize = jnp.dtype(dtype).itemsize
    rows = []
    for batch, context in cases:
        speeds: dict[tuple[int, float], float] = {}
        for retention in [1.0, *retentions]:
            for drafting in (0, *draft_loops):
                sparse = SparseDecodeConfig(key_retention=retention)
                speculative = None
                if drafting:
                    speculative = SpeculativeConfig(num_speculative_tokens, drafting)
                spec = DecodeSpec(
                    config,
                    implementation=implementation,
                    sparse=None if sparse.is_dense else sparse.compiled_part,
                    speculative=speculative,
                )
                timed = time_rounds(
                    params,
                    spec,
                    batch,
                    context,
                    dtype,
                    retention,
                    rounds=steps,
                    repeats=repeats,
                    accept_everything=bool(drafting),
                )
                check_sparse(spec, batch, timed.counters)
                seconds = timed.timing.median
                speed = speeds[drafting, retention] = batch * spec.rows / seconds
                mean_context = context + steps * spec.rows // 2
                floor = round_bytes(config, spec, batch, mean_context, itemsize, retention)
                better = float("nan")
                if drafting and retention < 1:
                    better = speed / max(speeds[0, retention], speeds[drafting, 1.0])
                rows.append(
                    {
                        "batch": batch,
                        "context": context,
                        "draft loops": drafting,
                        "retention": retention,
                        "ms/round": seconds * 1e3,
                        "tokens/s": speed,
                        "GB": floor.total / 1e9,
                        "of roofline": floor.total / peak / seconds,
                        "vs plain": speed / speeds[0, 1.0],
                        "vs better": better,
                        **timed.columns(),
                    }
                )
    return rows


def round_bytes(
    config: OuroConfig,
    spec: DecodeSpec,
    batch: int,
    context: int,
    itemsize: int,
    retention: float,
) -> StepBytes:
    """The fewest bytes of a round of n rows: each (row, loop) of the draft reads its weights
    and K/V; the verification reads those of the deeper loops once for all rows.

    Rows of one request share the pages of dense loops and, at best, the kept keys of
    sparse ones.
    """
    if spec.speculative is None:
        return step_bytes(config, batch, context, itemsize, retention)
    loops, rows = config.total_ut_steps, spec.rows
    drafting = spec.speculative.draft_loops
    one_loop = step_bytes(config, batch, context, itemsize)
    head = config.vocab_size * config.hidden_size * itemsize
    layers = (one_loop.weights - head) / loops
    plane = one_loop.kv / loops
    share = [1.0 if depth < 2 else retention for depth in range(loops)]
    passes = rows * drafting + loops - drafting
    kv = rows * sum(share[:drafting]) + sum(share[drafting:])
    return StepBytes(int(layers * passes + head * rows), int(plane * kv))
