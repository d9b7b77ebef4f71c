"""Checks every kernel on the device at hand against a float32 reference.

    python benchmarks/check_kernels.py            # a CUDA device; minutes
    python benchmarks/check_kernels.py --small    # anywhere, interpreted: does the script run

Prints a line per case and ends with status 1 if any failed. What it covers that the tests on
the CPU cannot: the compiled kernels, long contexts, pools of more than 2^31 elements, and
bits that must not depend on the rest of a batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.kernels import matvec, paged_attention
from sparse_loop_jax.kernels.project_qkv import project_qkv

LENGTHS = (1, 2, 3, 15, 16, 17, 256, 513, 1023, 8191, 32768)
# Largest norm of the error over the norm of the reference, of any row and head.
TOLERANCE = {"float32": 2e-5, "bfloat16": 6e-3}
PAGE = 16


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


def check_attention(report: Report, small: bool) -> None:
    lengths = [n for n in LENGTHS if n < 100] if small else list(LENGTHS)
    ragged = np.array([0, *lengths])[:, None]
    shapes = itertools.product((1, 4, 8), (64, 128), ("float32", "bfloat16"), (1, 4))
    for group, dim, dtype, rows in shapes:
        if small and (group, dim) != (4, 64):
            continue
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


def check_prefill(report: Report, small: bool) -> None:
    count = 24 if small else 700
    for dtype, group in itertools.product(("float32", "bfloat16"), (1, 4)):
        first = np.array([[1], [333 if not small else 9]])
        case = make_case(first + np.arange(count), 16, 16 // group, 64, dtype)
        want = oracle(case.args[0], case.k, case.v, case.args[4])
        gap = error(attend(case), want)
        name = f"prefill of {count} rows, {dtype}, group {group}"
        report(name, gap < TOLERANCE[dtype], f"error {gap:.1e}")


def check_products(report: Report, small: bool) -> None:
    hidden, inner = (128, 256) if small else (2048, 5632)
    keys = iter(jax.random.split(jax.random.key(1), 20))

    def draw(*shape, scale=1.0):
        return (jax.random.normal(next(keys), shape) * scale).astype(jnp.bfloat16)

    weights = {
        "linear": draw(3 * hidden, hidden, scale=hidden**-0.5),
        "gated_linear": draw(2 * inner, hidden, scale=hidden**-0.5),
        "linear_add_norm": draw(hidden, inner, scale=inner**-0.5),
    }
    ending = (draw(32, hidden), 1 + draw(hidden, scale=0.1), 1 + draw(hidden, scale=0.1))
    rows = {name: draw(32, w.shape[1]) for name, w in weights.items()}

    def run(name: str, count: int, implementation: str, dtype) -> list:
        args = [rows[name][:count], weights[name]]
        options = {}
        if name == "linear_add_norm":
            args += [ending[0][:count], *ending[1:]]
            options["eps"] = 1e-6
        args = [x.astype(dtype) for x in args]
        op = getattr(matvec, name)
        with jax.default_matmul_precision("highest"):
            return jax.tree.leaves(op(*args, implementation=implementation, **options))

    for name in weights:
        full = run(name, 32, "pallas", jnp.bfloat16)
        want = run(name, 32, "xla", jnp.float32)
        gap = max(error(a, b) for a, b in zip(full, want, strict=True))
        report(f"{name}, 32 rows", gap < 2 * TOLERANCE["bfloat16"], f"error {gap:.1e}")
        for count in (1, 2, 3, 7, 8, 9, 16, 31):
            few = run(name, count, "pallas", jnp.bfloat16)
            same = all(np.array_equal(a, b[:count]) for a, b in zip(few, full, strict=True))
            report(f"{name}, {count} rows: the bits of 32", same)


def check_projection(report: Report, small: bool) -> None:
    hidden, heads, dim, pages = (128, 4, 64, 9) if small else (2048, 16, 128, 300_000)
    keys = jax.random.split(jax.random.key(2), 4)
    weight = (jax.random.normal(keys[0], (3 * heads * dim, hidden)) * hidden**-0.5).astype(
        jnp.bfloat16
    )
    for batch, rows in ((1, 1), (3, 1), (2, 4), (8, 4)):
        x = jax.random.normal(keys[1], (batch, rows, hidden)).astype(jnp.bfloat16)
        half = jax.random.uniform(keys[2], (batch, rows, dim // 2)) * 6
        angles = jnp.concatenate([half, half], axis=-1)
        turn = jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)
        table = pages - 1 - jnp.arange(batch, dtype=jnp.int32)[:, None]
        positions = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
        live = (positions % 3) < 2

        def pools():
            shape = (pages, heads, PAGE, dim)
            return jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16)

        results = []
        for name in ("pallas", "xla"):
            call = jax.jit(
                lambda k, v, *a, name=name: project_qkv(
                    a[0], a[1], a[2], a[3], k, v, *a[4:], implementation=name
                ),
                donate_argnums=(0, 1),
            )
            out = call(*pools(), x, weight, *turn, table, positions, live)
            results.append((out[0], *(p[table[:, 0]].swapaxes(1, 2) for p in out[1:])))
        gap = max(error(a, b) for a, b in zip(*results, strict=True))
        report(
            f"project_qkv, {batch} x {rows}", gap < TOLERANCE["bfloat16"], f"error {gap:.1e}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks every kernel on this device.")
    parser.add_argument("--small", action="store_true", help="tiny shapes, anywhere")
    small = parser.parse_args().small
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    report = Report()
    for check in (
        check_products,
        check_projection,
        check_large_pools,
        check_prefill,
        check_attention,
    ):
        check(report, small)
    print(f"{len(report.failed)} failed" if report.failed else "all passed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
