"""`sparse-loop bench tune`: measures kernel configurations and writes a device's file.

For each workload a small grid around the computed configuration is compiled, in threads, and
timed. The computed one is kept unless another is faster by more than `MARGIN`: a difference
that small may be noise, and a changed cut changes bits.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.chain import Chain, sets_for
from sparse_loop_jax.kernels import tuning
from sparse_loop_jax.kernels.paged_attention import pallas as paged
from sparse_loop_jax.kernels.select_keys import pallas as select
from sparse_loop_jax.kernels.sparse_attention import pallas as sparse
from sparse_loop_jax.kernels.workloads import (
    AttentionWorkload,
    paged_inputs,
    spread_positions,
)

MARGIN = 0.02
FINALISTS = 3
VERIFIED_ROWS = 4  # a cut of paged attention serves decoding and verification
SECONDS = 0.015  # of one timing
REPEATS = 3
RETENTION = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One entry to be measured.

    Attributes:
      op, key: what it is for; the key is bucketed.
      computed: what the op would do by itself.
      grid: other configurations.
      chains: number of rows -> configuration -> calls to time. The first decides who is a
        finalist, all of them together decide.
    """

    op: str
    workload: str
    key: tuning.Key
    computed: Any
    grid: list[Any]
    chains: dict[int, Callable[[Any], Chain]]


def tune(
    cases: Iterator[Callable[[], Case]],
    *,
    seconds: float,
    note: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[dict]]:
    """Measures cases until `seconds` have passed; none is begun after that.

    Args:
      cases: functions that make a case with its inputs, the most wanted first.
      note: gets a line per case.

    Returns:
      Entries by op, for `write`.
    """
    end = clock() + seconds
    entries: dict[str, list[dict]] = {op: [] for op in tuning.OPS}
    left_out = 0
    for make in cases:
        if clock() >= end:
            left_out += 1
            continue
        case = make()
        entry = measure_case(case)
        if entry is None:
            note(f"{case.op} {case.workload}: nothing could be run")
            continue
        entries[case.op].append(entry)
        note(
            f"{case.op} {case.workload}: {entry['us']} us, computed {entry['computed us']} us, "
            f"{entry['config']}"
        )
    if left_out:
        note(f"{left_out} cases were left out: {seconds:g} s have passed")
    return entries


def measure_case(case: Case) -> dict | None:
    """The entry of a case with all times; None where no configuration could be run.

    "us" are those of the chosen configuration for each number of rows. What was tried is
    listed by the time of the first of them; what failed to compile is there with its error.
    """
    configs = [case.computed, *(c for c in case.grid if c != case.computed)]
    (first, chain), *others = case.chains.items()
    times, errors = _measure(chain, configs)
    if not times:
        return None
    finalists = sorted(times, key=lambda i: times[i])[:FINALISTS]
    if 0 in times and 0 not in finalists:
        finalists.append(0)
    by_rows = {first: times}
    for rows, chain in others:
        found, failed = _measure(chain, [configs[i] for i in finalists])
        by_rows[rows] = {finalists[i]: t for i, t in found.items()}
        errors |= {finalists[i]: f"{rows} rows: {e}" for i, e in failed.items()}
    able = [i for i in finalists if all(i in times for times in by_rows.values())]
    if not able:
        return None

    def cost(index: int) -> float:
        """Times relative to those of the fastest finalist, summed over the rows."""
        return sum(t[index] / min(t[i] for i in able) for t in by_rows.values())

    best = min(able, key=cost)
    if 0 in able and cost(0) <= cost(best) * (1 + MARGIN):
        best = 0

    def us(index: int) -> dict[str, float]:
        return {str(r): round(t[index] * 1e6, 2) for r, t in by_rows.items() if index in t}

    def fields(index: int) -> dict[str, int]:
        return {name: getattr(configs[index], name) for name in tuning.OPS[case.op].fields}

    tried = [{"us": us(i), **fields(i)} for i in sorted(times, key=lambda i: times[i])]
    tried += [{"error": error, **fields(i)} for i, error in sorted(errors.items())]
    return {
        "key": tuning.describe(case.op, case.key),
        "config": fields(best),
        "us": us(best),
        "computed us": us(0),
        "workload": case.workload,
        "tried": tried,
    }


def _measure(chain: Callable[[Any], Chain], configs: list[Any]):
    """Seconds by index of a configuration, and what failed, by index."""
    times, errors = {}, {}

    def lower(config):
        return chain(config).lower(SECONDS)

    lowered = {}
    for index, config in enumerate(configs):
        try:
            lowered[index] = lower(config)
        except Exception as error:  # a grid may ask for what a compiler refuses
            errors[index] = _first_line(error)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiling = {i: pool.submit(low.compile) for i, low in lowered.items()}
        for index, future in compiling.items():
            if (error := future.exception()) is not None:
                errors[index] = _first_line(error)
                continue
            try:
                calls = chain(configs[index])
                timing = calls.time(future.result(), seconds=SECONDS, repeats=REPEATS)
            except jax.errors.JaxRuntimeError as error:
                errors[index] = _first_line(error)
            else:
                times[index] = timing.median
    return times, errors


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


# Cases ---------------------------------------------------------------------------------


def cases(workloads: list[AttentionWorkload]) -> Iterator[Callable[[], Case]]:
    """What is worth measuring for workloads, the most wanted first."""
    wide = functools.partial(select_case, width=2)
    for make in (paged_case, sparse_case, wide, select_case):
        for workload in workloads:
            yield functools.partial(make, workload)
    for workload in workloads:
        yield functools.partial(sparse_case, dataclasses.replace(workload, rows=VERIFIED_ROWS))


def paged_case(workload: AttentionWorkload) -> Case:
    """Dense attention: one row of each request, and a verification with the same cut."""
    w = dataclasses.replace(workload, rows=1)
    inputs = paged_inputs(w, sets=sets_for(w.dense_bytes))
    pool = inputs.k_pool.shape

    def chain(rows: int, config) -> Chain:
        shape = (w.batch, rows, w.heads, w.head_dim)
        block_rows = paged.choose_config(shape, pool, w.pages, w.dtype).block_rows
        config = dataclasses.replace(config, block_rows=block_rows)
        last = jnp.arange(1 - rows, 1, dtype=jnp.int32)
        lengths = jnp.broadcast_to(w.context + last, (w.batch, rows))

        def step(q, shared, table):
            k, v, lengths = shared
            return paged.paged_attention_pallas(q, k, v, table, lengths, config=config)

        q = jnp.broadcast_to(inputs.q, shape)
        shared = inputs.k_pool, inputs.v_pool, lengths
        return Chain(step, q, shared, inputs.tables, w.dense_bytes)

    shape = (w.batch, 1, w.heads, w.head_dim)
    computed = paged.choose_config(shape, pool, w.pages, w.dtype)
    splits = _around(computed.splits, 0.25, 0.5, 1, 2, 4, most=max(w.span // 64, 1))
    tiles = [(64, 2, 3), (64, 4, 3), (32, 1, 3), (64, 2, 4), (128, 4, 3), (128, 4, 2)]
    # Far cuts with the usual tiles, near ones with all.
    grid = [
        dataclasses.replace(
            computed, splits=s, block_keys=keys, num_warps=warps, num_stages=stages
        )
        for s, (i, (keys, warps, stages)) in itertools.product(splits, enumerate(tiles))
        if i < 2 or computed.splits <= 2 * s <= 4 * computed.splits
    ]
    key = tuning.bucketed(
        "paged_attention",
        batch=w.batch,
        kv_heads=w.kv_heads,
        group=w.heads // w.kv_heads,
        head_dim=w.head_dim,
        length=w.span,
        dtype=w.dtype,
    )
    rows = [n for n in (1, VERIFIED_ROWS) if n * w.heads // w.kv_heads <= paged.FEW_QUERIES]
    chains = {n: functools.partial(chain, n) for n in rows}
    return Case("paged_attention", w.name, key, computed, grid, chains)


def sparse_case(workload: AttentionWorkload) -> Case:
    """Consume of a tenth of the keys, by number of rows."""
    w = dataclasses.replace(workload, retention=RETENTION)
    inputs = paged_inputs(w, sets=sets_for(w.kept_bytes // w.rows))
    counts = jnp.full((w.batch, w.rows), w.kept, jnp.int32)
    mass = jnp.full((w.batch, w.rows, w.heads), 0.3, jnp.float32)
    base = jnp.full(inputs.q.shape, 0.01, jnp.float32)
    positions = [spread_positions(w, seed=i) for i in range(len(inputs.tables))]

    def chain(config) -> Chain:
        def step(q, shared, item):
            k, v, counts, mass, base = shared
            table, positions = item
            args = (q, k, v, table, positions, counts, mass, base)
            return sparse.sparse_attention_pallas(*args, config=config)

        shared = inputs.k_pool, inputs.v_pool, counts, mass, base
        items = list(zip(inputs.tables, positions, strict=True))
        return Chain(step, inputs.q, shared, items, w.kept_bytes)

    computed = sparse.choose_config(w.batch * w.rows * w.heads, w.capacity)
    splits = _around(computed.splits, 0.25, 0.5, 1, 2, 4, most=max(w.capacity // 16, 1))
    tiles = [(32, 1, 3), (32, 1, 4), (64, 2, 3), (16, 1, 4), (64, 1, 3)]
    grid = [
        dataclasses.replace(
            computed, splits=s, block_keys=keys, num_warps=warps, num_stages=stages
        )
        for s, (keys, warps, stages) in itertools.product(splits, tiles)
    ]
    key = tuning.bucketed(
        "sparse_attention",
        batch=w.batch,
        rows=w.rows,
        heads=w.heads,
        head_dim=w.head_dim,
        length=w.capacity,
        dtype=w.dtype,
    )
    return Case("sparse_attention", w.name, key, computed, grid, {w.rows: chain})


def select_case(workload: AttentionWorkload, width: int = 1) -> Case:
    """Selection of a tenth of the scores of one row of each request.

    Args:
      width: of the scores, in contexts; a page table is wider than the context in it.
    """
    w = dataclasses.replace(workload, rows=1, retention=RETENTION)
    span = width * w.span
    shape = (w.batch * w.heads, span)
    sets = sets_for(w.scores_bytes)
    scores = [jax.random.normal(jax.random.key(i), shape) for i in range(sets)]
    lengths = jnp.full(shape[:1], w.context, jnp.int32)
    index = jnp.uint16 if span <= 1 << 16 else jnp.uint32

    def chain(config) -> Chain:
        def step(counts, lengths, scores):
            out = select.select_keys_pallas(
                scores, lengths, counts, capacity=w.capacity, index_dtype=index, config=config
            )
            return jnp.minimum(counts, counts + out[:, 0].astype(jnp.int32))

        counts = jnp.full(shape[:1], w.kept, jnp.int32)
        return Chain(step, counts, lengths, scores, w.scores_bytes)

    computed = select.choose_config(span)
    warps = _around(computed.num_warps, 0.25, 0.5, 1, 2, most=32)
    grid = [select.choose_config(span, num_warps=n) for n in warps]
    key = tuning.bucketed("select_keys", rows=shape[0], length=span)
    name = f"{w.name} in {span}"
    return Case("select_keys", name, key, computed, grid, {1: chain})


def _around(value: int, *factors: float, most: int) -> list[int]:
    """Multiples of a value between 1 and `most`, without repetition."""
    return sorted({min(max(int(value * factor), 1), most) for factor in factors})


# The file ------------------------------------------------------------------------------


def file_text(entries: dict[str, list[dict]], command: str) -> str:
    """The text of a device's file: a line per key, configuration and time."""
    data = {
        "device": jax.devices()[0].device_kind,
        "made": {
            "date": time.strftime("%Y-%m-%d"),
            "command": command,
            **measure.setup_info(),
        },
        "ops": {op: listed for op, listed in entries.items() if listed},
    }
    text = json.dumps(data, indent=1)
    innermost = re.compile(r"\{[^{}]*\}")
    flat = innermost.sub(lambda m: " ".join(m[0].split()).replace("{ ", "{"), text)
    return flat.replace(" }", "}") + "\n"
