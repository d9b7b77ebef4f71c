"""`sparse-loop bench attention`: dense, select, capture and consume, each against the bytes.

One layer in one loop, random data, permuted pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from sparse_loop_jax.bench import attention_ops as ops, measure
from sparse_loop_jax.bench.attention_ops import Options, Result
from sparse_loop_jax.bench.chain import sets_for
from sparse_loop_jax.bench.report import Row, note
from sparse_loop_jax.kernels.workloads import AttentionWorkload, paged_inputs


def bench_attention(
    workloads: list[AttentionWorkload],
    *,
    retentions: list[float] = [],  # noqa: B006 - not mutated
    options: Options,
    peer: Mapping[tuple[int, int], float] | None = None,
    progress: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """A row per workload and op; the sparse ops once for each retention.

    The bytes of a row are the fewest that its op can read: K and V once per request for dense
    and capture, the scores for select, and for consume the kept K and V of every row and head
    with their positions, as if rows and heads shared nothing.

    Args:
      workloads: those of one batch and context with fewer rows first.
      peer: seconds of another system's dense attention of one row, by (batch, context).
      progress: gets all rows so far after each workload.

    Raises:
      RuntimeError: a result is not that of the reference, or a sparse one is the dense one.
        It comes at the end; such an op has no time in its row.
    """
    peak = measure.bandwidth()
    one_row: dict[tuple, float] = {}
    rows: list[Row] = []
    failures: list[str] = []

    def attempt(measured: Callable[..., Result], *args) -> Result:
        try:
            return measured(*args, options)
        except RuntimeError as error:
            failures.append(str(error))
            return Result("failed", 0)

    for workload in workloads:
        case = (workload.batch, workload.context)
        note(f"attention: {workload.batch}x{workload.context}, {workload.rows} rows")
        sparse = [dataclasses.replace(workload, retention=r) for r in retentions]
        fewest = min((w.kept_bytes for w in sparse), default=workload.dense_bytes)
        inputs = paged_inputs(workload, sets=sets_for(min(fewest, workload.dense_bytes)))
        dense = attempt(ops.dense, workload, inputs)
        timed = [("dense", workload, dense)]
        for w in sparse:
            timed += [
                ("select", w, attempt(ops.select, w)),
                ("capture", w, attempt(ops.capture, w, inputs)),
                ("consume", w, attempt(ops.consume, w, inputs)),
            ]
        for op, w, result in timed:
            seconds = result.timing and result.timing.median
            first = one_row.setdefault((op, *case, w.retention), seconds) if seconds else None
            against = peer.get(case) if peer and op == "dense" and w.rows == 1 else None
            rows.append(
                {
                    "op": op,
                    "batch": w.batch,
                    "context": w.context,
                    "rows": w.rows,
                    "retention": w.retention,
                    "us": seconds and seconds * 1e6,
                    "MB": result.nbytes / 1e6,
                    "of bandwidth": seconds and result.nbytes / peak / seconds,
                    "vs dense": _ratio(seconds, dense.timing and dense.timing.median),
                    "vs fewest rows": _ratio(seconds, first),
                    "vs torch": _ratio(against, seconds),
                    "error": result.error,
                    "sparse rows": result.sparse_rows,
                    "served by": result.served,
                    "spread": result.timing and result.timing.spread,
                }
            )
        del inputs
        progress(rows)
    if failures:
        raise RuntimeError("; ".join(failures))
    return rows


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None
