"""What the checks on a device share: verdicts, awkward inputs, a reference."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

# Largest norm of the error over the norm of the reference, of any row and head.
TOLERANCE = {"float32": 2e-5, "bfloat16": 6e-3, "float16": 1e-3}
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


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """The options of `run_groups`, and `--small`."""
    parser.add_argument("--small", action="store_true", help="tiny shapes, anywhere")
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help=f"begin nothing after so many (default {seconds:g})",
    )
    parser.add_argument(
        "--only", default="", help="groups of checks that have this in their name"
    )


def run_groups(
    alone: Mapping[str, Callable[[Report], None]],
    together: Mapping[str, Callable[[Report], None]],
    *,
    threads: int,
    seconds: float,
    only: str = "",
) -> int:
    """Runs groups of checks, those of `together` side by side: most of the time is compilation.

    Returns:
      The status to end with: 1 if a check failed, or a group was left out for want of time.

    Raises:
      SystemExit: no group has `only` in its name.
    """
    if not any(only in name for name in (*alone, *together)):
        raise SystemExit(f"--only {only!r} is in none of {[*alone, *together]}")
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    start = time.perf_counter()
    report = Report()

    def run(job: Callable[[Report], None]) -> bool:
        if time.perf_counter() - start > seconds:
            return False
        job(report)
        return True

    begun = [run(job) for name, job in alone.items() if only in name]
    with ThreadPoolExecutor(threads) as pool:
        begun += pool.map(run, (job for name, job in together.items() if only in name))
    passed = report.count - len(report.failed)
    print(
        f"{passed} of {report.count} checks passed, {len(report.failed)} failed; "
        f"{begun.count(False)} of {len(begun)} groups left out; "
        f"{time.perf_counter() - start:.0f} s"
    )
    for name in report.failed:
        print(f"FAILED  {name}")
    return 1 if report.failed or not all(begun) else 0


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
