"""Checks every kernel on the device at hand against a float32 reference.

    python benchmarks/check_kernels.py            # a CUDA device; minutes
    python benchmarks/check_kernels.py --small    # anywhere, interpreted: does the script run

Prints a line per case and one that counts them, and ends with status 1 if any failed or was
left out for want of time. What it covers that the tests on the CPU cannot: the compiled
kernels, long contexts, pools of more than 2^31 elements, and bits that must not depend on the
rest of a batch.
"""

from __future__ import annotations

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from check_products import PRODUCTS, check_product, check_projection
from checking import TOLERANCE, Case, Report, add_options, error, make_case, oracle, run_groups

from sparse_loop_jax.kernels import paged_attention, prefill_attention

LENGTHS = (1, 2, 3, 15, 16, 17, 256, 513, 1023, 8191, 32768)
THREADS = 3  # they compile side by side; more would not fit the memory of a device
# Queries of a group, head size, dtype and rows of a request: every two of these somewhere.
SHAPES = (
    (1, 128, "bfloat16", 1),
    (1, 128, "bfloat16", 4),
    (1, 64, "float32", 4),
    (4, 64, "bfloat16", 1),
    (4, 64, "float32", 4),
    (4, 128, "bfloat16", 4),
    (8, 128, "float32", 1),
    (8, 64, "bfloat16", 4),
)


# Kernel of a prefill, dtype, queries of a group and head size.
PREFILLS = (
    ("pallas", "float32", 1, 64),
    ("pallas", "bfloat16", 4, 128),
    ("mosaic", "bfloat16", 1, 128),
    ("mosaic", "bfloat16", 4, 64),
    ("mosaic", "float16", 4, 128),
    ("mosaic", "float16", 1, 64),
)


def attend(case: Case):
    return paged_attention(*case.args, implementation="pallas")


def check_attention(
    group: int, dim: int, dtype: str, rows: int, report: Report, small: bool
) -> None:
    lengths = [n for n in LENGTHS if n < 100] if small else list(LENGTHS)
    ragged = np.array([0, *lengths])[:, None]
    name = f"attention group {group} dim {dim} {dtype} {rows} rows"
    length = np.maximum(ragged - np.arange(rows)[::-1], 0)
    case = make_case(length, 16, 16 // group, dim, dtype)
    q, *_, device_lengths = case.args
    want = oracle(q, case.k, case.v, device_lengths)
    out = attend(case)
    gap = error(out, want)
    report(name, gap < TOLERANCE[dtype], f"error {gap:.1e}")
    report(f"{name}: repeats", np.array_equal(attend(case), out))
    wrong = {
        "zeros": jnp.zeros_like(out),
        "length off by one": attend(case.with_lengths(device_lengths - 1)),
        "a neighbour's request": jnp.roll(out, 1, axis=0),
    }
    missed = [key for key, value in wrong.items() if error(value, want) < TOLERANCE[dtype]]
    report(f"{name}: mutations", not missed, ", ".join(missed))
    check_independence(report, name, case, out, want, dtype)


def check_independence(report: Report, name: str, case: Case, out, want, dtype: str) -> None:
    """A request alone in its batch, alone altogether, and a row without its neighbours."""
    q, k_pool, v_pool, table, lengths = case.args
    b = lengths.shape[0] - 1
    others = jnp.arange(lengths.shape[0])[:, None] != b
    alone = attend(case.with_lengths(jnp.where(others, 0, lengths)))
    report(f"{name}: others dead", np.array_equal(alone[b], out[b]))
    pick = slice(b, b + 1)
    single = paged_attention(
        q[pick], k_pool, v_pool, table[pick], lengths[pick], implementation="pallas"
    )
    gap = error(single, want[pick])
    report(f"{name}: batch of one", gap < TOLERANCE[dtype], f"error {gap:.1e}")
    if lengths.shape[1] > 1:
        last = paged_attention(
            q[:, -1:], k_pool, v_pool, table, lengths[:, -1:], implementation="pallas"
        )
        gap = error(last[:, 0], out[:, -1])
        report(f"{name}: row = decode step", gap < TOLERANCE[dtype], f"error {gap:.1e}")


def check_large_pools(report: Report, small: bool) -> None:
    pages = 600 if small else 262_144
    for rows in (1, 4):
        length = np.array([[40], [700]]) - np.arange(rows)[::-1]
        case = make_case(length, 16, 16, 128, "bfloat16", pages=pages)
        want = oracle(case.args[0], case.k, case.v, case.args[4])
        gap = error(attend(case), want)
        name = f"attention in a pool of {pages} pages, {rows} rows"
        report(name, gap < TOLERANCE["bfloat16"], f"error {gap:.1e}")


def check_prefill(
    kernel: str, dtype: str, group: int, dim: int, report: Report, small: bool
) -> None:
    """Chunks of prompts: short, long, and with padding."""
    name = f"prefill, {kernel}, {dtype}, group {group} dim {dim}"
    count = 128 if small else 768
    lengths = np.array([[1], [9 if small else 333], [20 if small else 7000]]) + np.arange(count)
    lengths[0, -count // 3 :] = 0
    case = make_case(lengths, 16, 16 // group, dim, dtype)
    q, k_pool, v_pool, table, device_lengths = case.args

    @jax.jit
    def run(lengths):
        return prefill_attention(q, k_pool, v_pool, table, lengths, implementation=kernel)

    try:
        out = run(device_lengths)
    except NotImplementedError as refusal:
        capability = getattr(jax.devices()[0], "compute_capability", "")
        report(f"{name}: serves here", not capability.startswith("9"), str(refusal))
        return
    want = oracle(q, case.k, case.v, device_lengths)
    gap = error(out, want)
    report(name, gap < TOLERANCE[dtype], f"error {gap:.1e}")
    report(f"{name}: repeats", np.array_equal(run(device_lengths), out))
    wrong = {
        "length off by one": run(device_lengths - 1),
        "a neighbour's request": jnp.roll(out, 1, axis=0),
    }
    missed = [key for key, value in wrong.items() if error(value, want) < TOLERANCE[dtype]]
    report(f"{name}: mutations", not missed, ", ".join(missed))
    others_dead = run(jnp.where(jnp.arange(3)[:, None] == 1, device_lengths, 0))
    report(f"{name}: others dead", np.array_equal(others_dead[1], out[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks every kernel on this device.")
    add_options(parser, seconds=150)
    options = parser.parse_args()
    small = options.small
    shapes = [s for s in SHAPES if not small or s[:2] == (4, 64)]
    # Pools of more than 2^31 elements are alone on the device.
    alone = {"project_qkv": check_projection, "pools": check_large_pools}
    together = {
        **{name: functools.partial(check_product, name) for name in PRODUCTS},
        **{f"attention {s}": functools.partial(check_attention, *s) for s in shapes},
        **{
            f"prefill {p}": functools.partial(check_prefill, *p)
            for p in PREFILLS[:: 3 if small else 1]
        },
    }
    sized = [
        {name: functools.partial(job, small=small) for name, job in jobs.items()}
        for jobs in (alone, together)
    ]
    return run_groups(*sized, threads=THREADS, seconds=options.seconds, only=options.only)


if __name__ == "__main__":
    sys.exit(main())
