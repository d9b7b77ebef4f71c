"""Checks every kernel on the device at hand against a float32 reference.

    python benchmarks/check_kernels.py            # a CUDA device; minutes
    python benchmarks/check_kernels.py --small    # anywhere, interpreted: does the script run

Prints a line per case and one that counts them, and ends with status 1 if any failed or was
left out for want of time. What it covers that the tests on
the CPU cannot: the compiled kernels, long contexts, pools of more than 2^31 elements, and
bits that must not depend on the rest of a batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.kernels import (
    matvec,
    paged_attention,
    prefill_attention,
)
from sparse_loop_jax.kernels.matvec.pallas import FEW_ROWS, MAX_ROWS
from sparse_loop_jax.kernels.project_qkv import project_qkv

LENGTHS = (1, 2, 3, 15, 16, 17, 256, 513, 1023, 8191, 32768)
# Largest norm of the error over the norm of the reference, of any row and head.
TOLERANCE = {"float32": 2e-5, "bfloat16": 6e-3, "float16": 1e-3}
PAGE = 16
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


class Report:
    """Collects verdicts; one line each."""

    def __init__(self):
        self.failed: list[str] = []
        self.count = 0

    def __call__(self, name: str, passed, detail: str = "") -> None:
        self.count += 1
        print(f"{'ok' if passed else 'FAILED':7s} {name}  {detail}", flush=True)
        if not passed:
            self.failed.append(name)


def error(out, want) -> float:
    """The largest relative error of a row and head; NaN counts as infinite."""
    out, want = (np.asarray(x, np.float64) for x in (out, want))
    norm = np.linalg.norm(want, axis=-1)
    gap = np.linalg.norm(out - want, axis=-1) / np.where(norm == 0, 1, norm)
    return float(np.inf if np.isnan(gap).any() else gap.max())


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of `paged_attention` and the same numbers in order, for the reference."""

    args: tuple  # q, k_pool, v_pool, page_table, lengths
    k: jax.Array  # [B, S, kv_heads, dim]
    v: jax.Array

    def with_lengths(self, lengths) -> Case:
        return dataclasses.replace(self, args=(*self.args[:4], lengths))


def make_case(lengths, heads, kv_heads, dim, dtype, *, pages=None, seed=0) -> Case:
    """Random rows over permuted pages; NaN beyond each request, ids past the end unused.

    The last key of each row's request is close to its query, with about half of the
    weight, so that a length that is off by one shows at any context.
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    batch, rows = lengths.shape
    tokens = lengths.max(axis=1)
    span = -(-int(tokens.max()) // PAGE) * PAGE
    keys = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(keys[0], (batch, rows, heads, dim))
    k = jax.random.normal(keys[1], (batch, span, kv_heads, dim))
    v = jax.random.normal(keys[2], (batch, span, kv_heads, dim))
    for i in range(rows):
        lead = q[:, i, :: heads // kv_heads]  # the first query of each group
        scale = jnp.log(jnp.maximum(lengths[:, i], 2) * 1.6) * dim**0.5
        near = lead * scale[:, None, None] / jnp.sum(lead * lead, axis=-1, keepdims=True)
        at = jnp.where(lengths[:, i] > 0, lengths[:, i] - 1, span)
        k = k.at[jnp.arange(batch), at].set(near, mode="drop")
    beyond = jnp.arange(span)[None, :, None, None] >= tokens[:, None, None, None]
    k, v = (jnp.where(beyond, jnp.nan, x).astype(dtype) for x in (k, v))

    used = batch * (span // PAGE)
    pages = used + 3 if pages is None else pages
    # The highest ids, so that offsets are as large as the pool allows.
    order = pages - used + jax.random.permutation(keys[3], used).astype(jnp.int32)
    table = order.reshape(batch, -1)

    def pool(x):
        paged = x.reshape(batch, -1, PAGE, kv_heads, dim).swapaxes(2, 3)
        empty = jnp.full((pages, kv_heads, PAGE, dim), jnp.nan, dtype)
        return jax.jit(lambda e, p: e.at[table].set(p), donate_argnums=0)(empty, paged)

    needed = jnp.arange(span // PAGE)[None] * PAGE < tokens[:, None]
    table_used = jnp.where(needed, table, pages)
    return Case((q.astype(dtype), pool(k), pool(v), table_used, lengths), k, v)


@jax.jit
def oracle(q, k, v, lengths):
    """Attention of contiguous K and V in float32, one request at a time."""

    def one(args):
        q, k, v, lengths = args
        seen = jnp.arange(k.shape[0])[None] < lengths[:, None]  # [n, S]
        v = jnp.where(seen.any(axis=0)[:, None, None], v.astype(jnp.float32), 0)
        q = q.astype(jnp.float32).reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
        scores = jnp.einsum("nkgd,skd->nkgs", q, k.astype(jnp.float32), precision="highest")
        scores = jnp.where(seen[:, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
        top = jnp.maximum(scores.max(axis=-1, keepdims=True), -1e30)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total)
        out = jnp.einsum("nkgs,skd->nkgd", weights, v, precision="highest")
        return out.reshape(out.shape[0], -1, out.shape[-1])

    return jax.lax.map(one, (q, k, v, lengths))


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
        print(f"not here: {name}: {refusal}")
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


def check_product(name: str, report: Report, small: bool) -> None:
    """One of the products: its error, its repeats, and rows among others and without them."""
    hidden, inner = (128, 256) if small else (2048, 5632)
    outputs, inputs = {
        "linear": (3 * hidden, hidden),
        "gated_linear": (2 * inner, hidden),
        "linear_add_norm": (hidden, inner),
    }[name]
    keys = iter(jax.random.split(jax.random.key(1), 5))

    def draw(*shape, scale=1.0):
        return (jax.random.normal(next(keys), shape) * scale).astype(jnp.bfloat16)

    weight, x = draw(outputs, inputs, scale=inputs**-0.5), draw(MAX_ROWS, inputs)
    residual = draw(MAX_ROWS, hidden)
    gains = 1 + draw(hidden, scale=0.1), 1 + draw(hidden, scale=0.1)

    def run(pick, implementation: str = "pallas", dtype=jnp.bfloat16) -> list[np.ndarray]:
        args, options = [x[pick], weight], {}
        if name == "linear_add_norm":
            args += [residual[pick], *gains]
            options["eps"] = 1e-6
        args = [a.astype(dtype) for a in args]
        op = getattr(matvec, name)
        with jax.default_matmul_precision("highest"):
            out = jax.tree.leaves(op(*args, implementation=implementation, **options))
        return [np.asarray(a.astype(jnp.float32)) for a in out]

    def equal(out, want) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(out, want, strict=True))

    want = run(slice(None), "xla", jnp.float32)
    # A configuration serves any number of rows up to the last of each of these.
    for counts in ((1, 2, 8, 9, 31, FEW_ROWS), (33, 64, MAX_ROWS)):
        full = run(slice(counts[-1]))
        for count in counts:
            out = run(slice(count))
            gap = max(error(a, b[:count]) for a, b in zip(out, want, strict=True))
            report(f"{name}, {count} rows", gap < 2 * TOLERANCE["bfloat16"], f"error {gap:.1e}")
            same = equal(out, [a[:count] for a in full])
            how = "repeats" if count == counts[-1] else f"the bits of {counts[-1]}"
            report(f"{name}, {count} rows: {how}", same)
        turned = run(slice(counts[-1] - 1, None, -1))
        report(f"{name}, {counts[-1]} rows reversed", equal(turned, [a[::-1] for a in full]))
        if counts[0] == 1:
            alone = run(slice(17, 18))
            report(f"{name}, row 17 alone", equal(alone, [a[17:18] for a in full]))


def check_projection(report: Report, small: bool) -> None:
    hidden, heads, dim, pages = (128, 4, 64, 150) if small else (2048, 16, 128, 300_000)
    keys = jax.random.split(jax.random.key(2), 4)
    weight = (jax.random.normal(keys[0], (3 * heads * dim, hidden)) * hidden**-0.5).astype(
        jnp.bfloat16
    )
    # Requests, their rows, and how many requests without the others a configuration serves.
    for batch, rows, part in ((3, 1, 1), (8, 4, 1), (33, 1, 33), (16, 4, 9), (32, 4, 9)):
        x = jax.random.normal(keys[1], (batch, rows, hidden)).astype(jnp.bfloat16)
        half = jax.random.uniform(keys[2], (batch, rows, dim // 2)) * 6
        angles = jnp.concatenate([half, half], axis=-1)
        turn = jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)
        table = pages - 1 - jnp.arange(batch, dtype=jnp.int32)[:, None]
        positions = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
        args = (x, *turn, table, positions, (positions % 3) < 2)

        @functools.partial(jax.jit, static_argnames="implementation")
        def run(x, cos, sin, table, *place, implementation):
            shape = (pages, heads, PAGE, dim)
            pools = jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16)
            out, *pools = project_qkv(
                x, weight, cos, sin, *pools, table, *place, implementation=implementation
            )
            return [out, *(p[table[:, 0]].swapaxes(1, 2) for p in pools)]

        out, want = (run(*args, implementation=name) for name in ("pallas", "xla"))
        gap = max(error(a, b) for a, b in zip(out, want, strict=True))
        name = f"project_qkv, {batch} x {rows}"
        report(name, gap < TOLERANCE["bfloat16"], f"error {gap:.1e}")
        for count, how in ((batch, "repeats"), (part, f"first {part} alone")):
            again = run(*(a[:count] for a in args), implementation="pallas")
            same = all(np.array_equal(a, b[:count]) for a, b in zip(again, out, strict=True))
            report(f"{name}: {how}", same)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks every kernel on this device.")
    parser.add_argument("--small", action="store_true", help="tiny shapes, anywhere")
    parser.add_argument(
        "--seconds", type=float, default=150, help="begin nothing after so many (default 150)"
    )
    parser.add_argument(
        "--only", default="", help="groups of checks that have this in their name"
    )
    options = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    start = time.perf_counter()
    report = Report()

    def run(job: Callable[..., None]) -> bool:
        if time.perf_counter() - start > options.seconds:
            return False
        job(report=report, small=options.small)
        return True

    products = ("linear", "gated_linear", "linear_add_norm")
    shapes = [s for s in SHAPES if not options.small or s[:2] == (4, 64)]
    prefills = PREFILLS[::3] if options.small else PREFILLS
    # Pools of more than 2^31 elements are alone on the device.
    alone = {"project_qkv": check_projection, "pools": check_large_pools}
    together = {
        **{name: functools.partial(check_product, name) for name in products},
        **{f"attention {s}": functools.partial(check_attention, *s) for s in shapes},
        **{f"prefill {p}": functools.partial(check_prefill, *p) for p in prefills},
    }
    if not any(options.only in name for name in (*alone, *together)):
        parser.error(f"--only {options.only!r} is in none of {[*alone, *together]}")
    begun = [run(job) for name, job in alone.items() if options.only in name]
    with ThreadPoolExecutor(THREADS) as pool:
        begun += pool.map(run, (job for name, job in together.items() if options.only in name))
    passed = report.count - len(report.failed)
    print(
        f"{passed} of {report.count} checks passed, {len(report.failed)} failed; "
        f"{begun.count(False)} of {len(begun)} groups left out; "
        f"{time.perf_counter() - start:.0f} s"
    )
    for name in report.failed:
        print(f"FAILED  {name}")
    return 1 if report.failed or not all(begun) else 0


if __name__ == "__main__":
    sys.exit(main())
