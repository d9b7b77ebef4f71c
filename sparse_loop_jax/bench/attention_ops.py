"""The ops that `bench attention` measures: each as a chain of calls, and its check.

A call's output is the next one's query (`chain`). Two ops need one more small kernel to be
chained, which is in their times: the counts of a selection, and O_ref - C_ref of a capture.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.chain import Chain, sets_for
from sparse_loop_jax.kernels.capture_attention import capture_attention
from sparse_loop_jax.kernels.paged_attention import paged_attention
from sparse_loop_jax.kernels.registry import Op, recording
from sparse_loop_jax.kernels.select_keys import select_keys
from sparse_loop_jax.kernels.sparse_attention import sparse_attention
from sparse_loop_jax.kernels.workloads import AttentionWorkload, PagedInputs

# Largest norm of an error over the norm of the reference, of any row and head.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Options:
    """Of a run.

    Attributes:
      implementation: of the ops; None: the platform's order.
      seconds, repeats: of one timing; its number of samples.
    """

    implementation: str | None = None
    seconds: float = 0.03
    repeats: int = 5

    @property
    def dense(self) -> Options:
        """For dense attention; the platform's order where only sparse ops have the name."""
        name = self.implementation
        if name in sparse_attention.implementations.keys() - paged_attention.implementations:
            return dataclasses.replace(self, implementation=None)
        return self


@dataclasses.dataclass(frozen=True)
class Result:
    served: str  # the implementation's name
    nbytes: int
    timing: measure.Timing | None = None  # None where nothing fast serves
    error: float | None = None
    sparse_rows: int | None = None  # rows whose result is not the dense one


class Bound:
    """An op with its options, and who serves it."""

    def __init__(self, op: Op, options: Options, **keywords):
        self.op, self.keywords, self.options = op, keywords, options

    def __call__(self, *args):
        return self.op(*args, implementation=self.options.implementation, **self.keywords)

    def reference(self, *args):
        keywords = dict(self.keywords)
        if "dense_implementation" in keywords:
            keywords["dense_implementation"] = "xla"
        return jax.jit(functools.partial(self.op, implementation="xla", **keywords))(*args)

    def served(self, *args) -> str:
        """The implementation's name, or "none"; found by tracing."""
        try:
            with recording() as served:
                jax.eval_shape(self, *args)
        except NotImplementedError:
            return "none"
        except ValueError:
            if self.options.implementation in self.op.implementations:
                raise
            return "none"
        return served[self.op.name]

    def worth_timing(self, served: str) -> bool:
        """The references take what they take, and far too much memory, at a GPU's sizes."""
        asked = self.options.implementation == served
        return served != "none" and (asked or served != "xla" or jax.default_backend() == "cpu")


def _run(bound: Bound, chain: Chain, args: tuple, nbytes: int, check) -> Result:
    """Times a chain and checks one call; `check(out)` gives the other fields of a result."""
    served = bound.served(*args)
    if not bound.worth_timing(served):
        return Result(served, nbytes)
    options = bound.options
    found = check(bound(*args))
    timing = chain.time(seconds=options.seconds, repeats=options.repeats)
    return Result(served, nbytes, timing, **found)


def dense(w: AttentionWorkload, inputs: PagedInputs, options: Options) -> Result:
    bound = Bound(paged_attention, options.dense)

    def step(q, shared, table):
        k_pool, v_pool, lengths = shared
        return bound(q, k_pool, v_pool, table, lengths)

    shared = inputs.k_pool, inputs.v_pool, inputs.lengths
    chain = Chain(step, inputs.q, shared, inputs.tables, w.dense_bytes)

    def check(out):
        args = inputs.args()
        return {"error": _check(w, "dense", out, bound, args, requests=(0, 3, 4))}

    return _run(bound, chain, inputs.args(), w.dense_bytes, check)


def select(w: AttentionWorkload, options: Options) -> Result:
    bound = Bound(select_keys, options, **_selection(w))
    sets = sets_for(w.scores_bytes)
    shape = (w.batch, w.rows, w.heads, w.span)
    scores = [jax.random.normal(jax.random.key(i), shape) for i in range(sets)]
    lengths, counts = (jnp.broadcast_to(x[..., None], shape[:3]) for x in _counts(w))

    def step(counts, lengths, scores):
        positions = bound(scores, lengths, counts)
        return jnp.minimum(counts, counts + positions[..., 0].astype(jnp.int32))

    chain = Chain(step, counts, lengths, scores, w.scores_bytes)
    args = (scores[0], lengths, counts)

    def check(out):
        want = bound.reference(*(x[-1:] for x in args))
        return {"error": _demand(w, "select", float(jnp.mean(out[-1:] != want)), 0.0)}

    return _run(bound, chain, args, w.scores_bytes, check)


def capture(w: AttentionWorkload, inputs: PagedInputs, options: Options) -> Result:
    bound = Bound(
        capture_attention,
        options,
        dense_implementation=options.dense.implementation,
        **_selection(w),
    )
    counts = _counts(w)[1]

    def step(q, shared, table):
        k_pool, v_pool, lengths, counts = shared
        got = bound(q, k_pool, v_pool, table, lengths, counts)
        # Everything that was captured is used, or the compiler would leave it out.
        rest = got.mass[..., None] + got.positions[..., :1].astype(jnp.float32)
        return (got.out.astype(jnp.float32) - got.kept + 1e-20 * rest).astype(q.dtype)

    shared = inputs.k_pool, inputs.v_pool, inputs.lengths, counts
    chain = Chain(step, inputs.q, shared, inputs.tables, w.dense_bytes)
    args = (*inputs.args(), counts)

    def check(got):
        want = bound.reference(*_request(args, (0, 3, 4, 5), w.batch - 1))
        # Two scores may tie to within their rounding: then another key is right as well.
        same = jnp.all(got.positions[-1:] == want.positions, axis=-1)
        _demand(w, "choice of keys of capture", 1 - float(same.mean()), 0.5)
        mass = jnp.where(same, got.mass[-1:], want.mass)
        kept = jnp.where(same[..., None], got.kept[-1:], want.kept)
        pairs = (got.out[-1:], want.out), (kept, want.kept), (mass, want.mass)
        errors = [_error(*pair) for pair in pairs]
        return {"error": _demand(w, "capture", max(errors), TOLERANCE[w.dtype])}

    return _run(bound, chain, args, w.dense_bytes, check)


def consume(w: AttentionWorkload, inputs: PagedInputs, options: Options) -> Result:
    bound = Bound(sparse_attention, options)
    counts = _counts(w)[1]
    selections = _random_selections(w, len(inputs.tables), options)

    def step(q, shared, item):
        k_pool, v_pool, counts = shared
        table, (positions, mass, base) = item
        return bound(q, k_pool, v_pool, table, positions, counts, mass, base)

    shared = inputs.k_pool, inputs.v_pool, counts
    items = list(zip(inputs.tables, selections, strict=True))
    chain = Chain(step, inputs.q, shared, items, w.kept_bytes)
    positions, mass, base = selections[0]
    args = (*inputs.args()[:4], positions, counts, mass, base)

    def check(out):
        dense = Bound(paged_attention, options.dense)(*inputs.args())
        differs = int(jnp.sum(jnp.any(out != dense, axis=(2, 3))))
        if differs != w.batch * w.rows:
            raise RuntimeError(f"{w.name}: only {differs} rows of consume are not dense ones")
        error = _check(w, "consume", out, bound, args, requests=(0, 3, 4, 5, 6, 7))
        return {"error": error, "sparse_rows": differs}

    return _run(bound, chain, args, w.kept_bytes, check)


def _selection(w: AttentionWorkload) -> dict[str, Any]:
    index = jnp.uint16 if w.span <= 1 << 16 else jnp.uint32
    return {"capacity": w.capacity, "index_dtype": index}


def _counts(w: AttentionWorkload) -> tuple[jax.Array, jax.Array]:
    """Lengths and kept keys of each row, int32 `[B, n]`."""
    lengths = w.context + jnp.arange(1 - w.rows, 1, dtype=jnp.int32)
    lengths = jnp.broadcast_to(lengths, (w.batch, w.rows))
    return lengths, jnp.minimum(lengths, w.kept)


def _random_selections(w: AttentionWorkload, sets: int, options: Options) -> list[tuple]:
    """Positions of random selections, a mass and a base, as captures would leave them."""
    shape = (w.batch, w.rows, w.heads, w.span)
    lengths, counts = (jnp.broadcast_to(x[..., None], shape[:3]) for x in _counts(w))
    select = Bound(select_keys, options, **_selection(w))

    @jax.jit
    def make(key):
        scores, base = jax.random.split(key)
        positions = select(jax.random.normal(scores, shape), lengths, counts)
        base = 0.01 * jax.random.normal(base, (*shape[:3], w.head_dim))
        return positions, jnp.full(shape[:3], 0.3, jnp.float32), base

    return [make(jax.random.key(100 + i)) for i in range(sets)]


def _check(w, op: str, out, bound: Bound, args: tuple, requests: tuple[int, ...]) -> float:
    """The error of the last request against the reference on it alone."""
    want = bound.reference(*_request(args, requests, w.batch - 1))
    return _demand(w, op, _error(out[-1:], want), TOLERANCE[w.dtype])


def _request(args: tuple, of_requests: tuple[int, ...], b: int) -> tuple:
    """Arguments of one request; the pools are everyone's."""
    return tuple(x[b : b + 1] if i in of_requests else x for i, x in enumerate(args))


def _error(out, want) -> float:
    """The largest relative error of a row and head; infinite where one is not a number."""
    out, want = (np.asarray(x, np.float64) for x in (out, want))
    norm = np.linalg.norm(want, axis=-1)
    gap = np.linalg.norm(out - want, axis=-1) / np.where(norm == 0, 1, norm)
    return float(gap.max()) if np.isfinite(gap).all() else float("inf")


def _demand(w: AttentionWorkload, op: str, error: float, most: float) -> float:
    if not error <= most:
        raise RuntimeError(f"{w.name}: {op} is off by {error:.2g}, more than {most:g}")
    return error
