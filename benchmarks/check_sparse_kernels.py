"""Checks the kernels of sparse decoding on the device at hand.

    python benchmarks/check_sparse_kernels.py            # a CUDA device; two minutes
    python benchmarks/check_sparse_kernels.py --implementation triton    # with jax-triton
    python benchmarks/check_sparse_kernels.py --small    # anywhere, interpreted: does it run

Without a GPU, `--small --implementation triton` needs TRITON_INTERPRET=1 and Triton.

Prints a line per check and their number, and ends with status 1 if any failed. Most of the time
is compilation, so a few threads share the checks; those that have not begun after `--seconds`
are left out and counted. What this covers that the tests on the CPU cannot: the compiled
kernels, contexts of up to 65,536 keys, pools of more than 2^31 elements, and that capturing
leaves the bits of the dense output and of foreign slots alone.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from check_selections import (
    RETENTIONS,
    TABLES,
    check_selection,
    kept_count,
    sorted_selection,
)
from checking import TOLERANCE, Case, Report, add_options, error, make_case, run_groups

from sparse_loop_jax.kernels.capture_attention import capture_attention, capture_into
from sparse_loop_jax.kernels.capture_attention.xla import selected_probabilities
from sparse_loop_jax.kernels.paged_attention import paged_attention
from sparse_loop_jax.kernels.paged_attention.pallas import scored_attention
from sparse_loop_jax.kernels.sparse_attention import sparse_attention
from sparse_loop_jax.kernels.sparse_attention.xla import gather_keys

# Query heads per kv head, head size, dtype, rows of a request.
CASES = (
    (1, 128, "bfloat16", 4),
    (1, 128, "bfloat16", 1),
    (8, 64, "bfloat16", 1),
    (4, 32, "float32", 4),
    (8, 16, "float32", 1),
)
LENGTHS = (0, 1, 2, 17, 300, 5000, 32768)
# Of a mass, absolutely: scores of bfloat16 keys are exact products, summed in some order.
MASS = 2e-5
# By how much a true score that is not kept may exceed a kept one: rounding of the scores.
SCORE = 1e-4


@functools.partial(jax.jit, static_argnames=("capacity", "implementation"))
def capture(q, k_pool, v_pool, table, lengths, counts, *, capacity: int, implementation: str):
    return capture_attention(
        q,
        k_pool,
        v_pool,
        table,
        lengths,
        counts,
        capacity=capacity,
        dense_implementation="pallas",
        implementation=implementation,
    )


@jax.jit
def capture_reference(q, k, v_pool, table, lengths, counts, positions):
    """What positions are worth, in float32, one request at a time: values, mass, and by how
    much a true score that is not kept exceeds one that is."""

    def one(args):
        q, k, table, lengths, counts, positions = (x[None] for x in args)
        scores = reference_scores(q, k)
        seen = jnp.arange(scores.shape[3]) < lengths[..., None, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        kept = jnp.arange(positions.shape[3]) < counts[..., None, None]
        weights = selected_probabilities(scores, positions, kept)
        values = gather_keys(v_pool, table, positions, kept).astype(jnp.float32)
        values = jnp.einsum("bnhc,bnhcd->bnhd", weights, values, precision="highest")
        chosen = jnp.where(kept, positions.astype(jnp.int32), scores.shape[3])
        index = jnp.ix_(*(jnp.arange(n) for n in chosen.shape[:3]))
        left = scores.at[(*(i[..., None] for i in index), chosen)].set(-jnp.inf, mode="drop")
        lowest = jnp.take_along_axis(scores, chosen, axis=-1, mode="clip")
        lowest = jnp.where(kept, lowest, jnp.inf).min(axis=-1)
        return values[0], weights.sum(axis=-1)[0], jnp.max(left.max(axis=-1) - lowest)

    return jax.lax.map(one, (q, k, table, lengths, counts, positions))


def check_capture(
    report: Report, name: str, case: Case, counts, capacity: int, implementation: str
):
    """The capture, once its parts are found right."""
    q, _, v_pool, table, lengths = case.args
    out = capture(*case.args, counts, capacity=capacity, implementation=implementation)
    dense = paged_attention(*case.args, implementation="pallas")
    same = np.array_equal(out.out, dense) or jax.default_backend() != "gpu"
    report(f"{name}: the dense bits", same)
    host_scores = np.asarray(scored_attention(*case.args).scores)
    host_positions = np.asarray(out.positions)
    host_lengths, host_counts = np.asarray(lengths), np.asarray(counts)
    wrong = 0
    for b, i, h in np.ndindex(host_scores.shape[:3]):
        if h % 5 == 0:
            count = int(host_counts[b, i])
            want = sorted_selection(host_scores[b, i, h, : host_lengths[b, i]], count)
            wrong += not np.array_equal(host_positions[b, i, h, :count], want)
    report(f"{name}: selection", wrong == 0, f"{wrong} rows")

    values, mass, gap = capture_reference(
        q, case.k, v_pool, table, lengths, counts, out.positions
    )
    gap = float(jnp.max(gap))
    report(f"{name}: the largest true scores", gap < SCORE, f"passed over by {gap:.1e}")
    gap = error(out.kept, values)
    report(f"{name}: kept values", gap < TOLERANCE["float32"], f"error {gap:.1e}")
    gap = float(jnp.abs(out.mass - mass).max())
    report(f"{name}: mass", gap < MASS, f"off by {gap:.1e}")
    return out


@jax.jit
def consume_reference(q, k_pool, v_pool, table, positions, counts, mass, base):
    """In float32, one request at a time."""

    def one(args):
        q, table, positions, counts, mass, base = (x[None] for x in args)
        kept = jnp.arange(positions.shape[3]) < counts[..., None, None]
        k, v = (
            gather_keys(pool, table, positions, kept).astype(jnp.float32)
            for pool in (k_pool, v_pool)
        )
        q = q.astype(jnp.float32) * q.shape[-1] ** -0.5
        scores = jnp.einsum("bnhd,bnhcd->bnhc", q, k, precision="highest")
        weights = jax.nn.softmax(jnp.where(kept, scores, -jnp.inf), axis=-1)
        mean = jnp.einsum("bnhc,bnhcd->bnhd", weights, v, precision="highest")
        out = base + mass[..., None] * mean
        return jnp.where(counts[..., None, None] > 0, out, 0)[0]

    return jax.lax.map(one, (q, table, positions, counts, mass, base))


def check_consume(
    report: Report, name: str, case: Case, counts, captured, dtype: str, implementation: str
) -> None:
    q, k_pool, v_pool, table, _ = case.args
    base = captured.out.astype(jnp.float32) - captured.kept
    q = jnp.roll(q, 1, axis=-1)  # the queries of another loop
    kept = jnp.arange(captured.positions.shape[3]) < counts[..., None, None]
    positions = jnp.where(kept, captured.positions, jnp.uint16(65535))  # the rest is anything
    args = (q, k_pool, v_pool, table, positions, counts, captured.mass, base)
    want = consume_reference(*args)

    def run(**changes):
        names = ("q", "k", "v", "table", "positions", "counts", "mass", "base")
        changed = [changes.get(n, a) for n, a in zip(names, args, strict=True)]
        return sparse_attention(*changed, implementation=implementation)

    out = run()
    gap = error(out, want)
    report(f"{name}: consume", gap < TOLERANCE[dtype], f"error {gap:.1e}")
    report(f"{name}: repeats", np.array_equal(run(), out))
    mutations = {
        "mass left out": run(mass=jnp.ones_like(captured.mass)),
        "C_ref not subtracted": run(base=captured.out.astype(jnp.float32)),
        "another row's positions": run(positions=jnp.roll(positions, 1, axis=2)),
        "one key too few": run(counts=jnp.maximum(counts - 1, 0)),
        "zeros": jnp.zeros_like(out),
    }
    missed = [key for key, value in mutations.items() if error(value, want) < TOLERANCE[dtype]]
    report(f"{name}: mutations", not missed, ", ".join(missed))


def reference_scores(q, k):
    """Scaled float32 scores `[B, n, heads, S]`."""
    batch, rows, heads, dim = q.shape
    grouped = q.astype(jnp.float32).reshape(batch, rows, k.shape[2], -1, dim)
    k = k.astype(jnp.float32)
    scores = jnp.einsum("bnkgd,bskd->bnkgs", grouped, k, precision="highest") * dim**-0.5
    return scores.reshape(batch, rows, heads, -1)


@functools.partial(jax.jit, static_argnames="implementation", donate_argnums=2)
def capture_in_slots(args, counts, arrays, slots, *, implementation: str):
    return capture_into(
        *args,
        counts,
        slots,
        *arrays,
        dense_implementation="pallas",
        implementation=implementation,
    )


def check_slots(
    report: Report, name: str, case: Case, counts, captured, implementation: str
) -> None:
    """References written into slots out of order and read there; some rows have none."""
    q, k_pool, v_pool, table, _ = case.args
    batch, rows, heads, capacity = captured.positions.shape
    total = batch * rows + 3
    slots = np.random.default_rng(0).permutation(total)[: batch * rows].reshape(batch, rows)
    slots[::3, -1] = total + np.arange(len(slots[::3]))  # refused
    slots = slots.astype(np.int32)
    written = slots < total
    arrays = (
        jnp.full((total, heads, capacity), 0xDEAD, captured.positions.dtype),
        jnp.full((total, heads), jnp.nan, jnp.float32),
        jnp.full((total, heads, q.shape[-1]), jnp.nan, jnp.float32),
    )
    junk = [np.array(x) for x in arrays]
    stored = capture_in_slots(case.args, counts, arrays, slots, implementation=implementation)
    same = np.array_equal(stored.out, captured.out)
    report(f"{name}: slots, the dense bits", same)
    foreign = np.setdiff1d(np.arange(total), slots)
    touched = [
        not np.array_equal(np.asarray(got)[foreign].view(np.uint8), old[foreign].view(np.uint8))
        for got, old in zip(stored[1:], junk, strict=True)
    ]
    report(f"{name}: slots of no row", not any(touched), f"{touched}")
    want = (captured.positions, captured.mass, captured.out.astype(jnp.float32) - captured.kept)
    gaps = [
        float(np.abs(np.subtract(got[slots[written]], each[written], dtype=np.float64)).max())
        for got, each in zip(*(map(np.asarray, x) for x in (stored[1:], want)), strict=True)
    ]
    passed = gaps[0] == 0 and gaps[1] < MASS and gaps[2] < TOLERANCE["float32"]
    report(f"{name}: slots of rows", passed, f"off by {gaps}")

    kept = jnp.where(written, counts, 0)
    read = functools.partial(
        sparse_attention, q, k_pool, v_pool, table, implementation=implementation
    )
    out = read(stored.positions, kept, stored.mass, stored.base, rows=jnp.asarray(slots))
    gathered = [x[np.minimum(slots, total - 1)] for x in stored[1:]]
    plain = read(gathered[0], kept, *gathered[1:])
    report(f"{name}: consume from slots", np.array_equal(out, plain))
    others = jnp.asarray(np.roll(np.where(written, slots, slots[0, 0]), 1, axis=0))
    moved = read(stored.positions, kept, stored.mass, stored.base, rows=others)
    report(f"{name}: mutation of slots", not np.array_equal(moved, out))


def check_case(report: Report, small: bool, implementation: str, shape) -> None:
    group, dim, dtype, rows = shape
    length = np.array([n for n in LENGTHS if not small or n < 100])[:, None]
    length = np.maximum(length - np.arange(rows)[::-1], 0)
    case = make_case(length, 16, 16 // group, dim, dtype)
    for retention in (0.1, 1.0) if small else RETENTIONS:
        counts = np.vectorize(lambda n, r=retention: kept_count(int(n), r))(length)
        name = f"group {group} dim {dim} {dtype} {rows} rows r {retention or '1/N'}"
        counts = jnp.asarray(counts, jnp.int32)
        args = report, name, case, counts
        captured = check_capture(*args, int(length.max()), implementation)
        if retention == 0.1:
            check_consume(*args, captured, dtype, implementation)
            check_slots(*args, captured, implementation)


def check_large_pool(report: Report, small: bool, implementation: str) -> None:
    pages = 600 if small else 262_144
    case = make_case(np.array([[40], [700]]), 16, 16, 128, "bfloat16", pages=pages)
    counts = jnp.array([[4], [70]], jnp.int32)
    name = f"pool of {pages} pages"
    captured = check_capture(report, name, case, counts, 70, implementation)
    check_consume(report, name, case, counts, captured, "bfloat16", implementation)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the sparse kernels on this device.")
    add_options(parser, seconds=90)
    parser.add_argument("--implementation", default="pallas", choices=("pallas", "triton"))
    options = parser.parse_args()
    small, implementation = options.small, options.implementation
    # Those first that take longest or would be missed most.
    groups = {
        f"case {shape}": functools.partial(
            check_case, small=small, implementation=implementation, shape=shape
        )
        for shape in (CASES[-2:] if small else CASES)
    }
    groups["pool"] = functools.partial(
        check_large_pool, small=small, implementation=implementation
    )
    for span, lengths in TABLES.items():
        if not small or span < 1000:
            groups[f"select {span}"] = functools.partial(
                check_selection, implementation=implementation, span=span, lengths=lengths
            )
    print(f"implementation: {implementation}")
    threads = min(6, os.cpu_count() or 1)
    return run_groups({}, groups, threads=threads, seconds=options.seconds, only=options.only)


if __name__ == "__main__":
    sys.exit(main())
