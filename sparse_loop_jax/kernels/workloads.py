"""Named attention workloads, shared by benchmarks, tuning and tests.

What is measured is what is tuned and, at a size that the interpreter can bear, what is
tested.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_loop_jax.sparse.arithmetic import retained_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionWorkload:
    """Attention of one layer in one loop: a decode step, or the rows of a verification.

    Attributes:
      batch, rows: requests, and rows of each that share its pages.
      context: keys that the last row of every request sees; each row before it sees one less.
      heads, kv_heads, head_dim, page_size, dtype: of the model and its cache.
      retention: share of the keys that sparse attention keeps; None: dense only.
      tags: "bench", "tune" and "test", the lists that it belongs to.
    """

    batch: int
    context: int
    rows: int = 1
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    retention: float | None = None
    tags: frozenset[str] = frozenset()

    def __post_init__(self):
        for name in ("batch", "context", "rows", "heads", "kv_heads", "head_dim", "page_size"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not share {self.kv_heads} kv heads")
        if self.rows > self.context:
            raise ValueError(f"{self.rows} rows need as many keys, got {self.context}")
        if self.retention is not None and not 0 < self.retention <= 1:
            raise ValueError(f"retention must be in (0, 1], got {self.retention}")

    @property
    def name(self) -> str:
        """For example "8x8192 rows 4 r 0.1"."""
        parts = [f"{self.batch}x{self.context}"]
        if self.rows > 1:
            parts.append(f"rows {self.rows}")
        if self.retention is not None:
            parts.append(f"r {self.retention:g}")
        if (self.heads, self.kv_heads, self.head_dim) != (16, 16, 128):
            parts.append(f"heads {self.heads}/{self.kv_heads} of {self.head_dim}")
        if self.dtype != "bfloat16":
            parts.append(self.dtype)
        return " ".join(parts)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def pages(self) -> int:
        """Of one request."""
        return -(-self.context // self.page_size)

    @property
    def span(self) -> int:
        """Tokens that the pages of a request hold."""
        return self.pages * self.page_size

    @property
    def kept(self) -> int:
        """Keys that the last row keeps; all where there is no retention."""
        return retained_count(self.retention or 1.0, self.context)

    @property
    def capacity(self) -> int:
        """Entries of a selection: `kept` in its bucket."""
        return 1 << (self.kept - 1).bit_length()

    @property
    def dense_bytes(self) -> int:
        """K and V of every request, once for all of its rows."""
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * self.itemsize

    @property
    def scores_bytes(self) -> int:
        """What a selection has to read: float32 scores of every row and head."""
        return 4 * self.batch * self.rows * self.heads * self.context

    @property
    def kept_bytes(self) -> int:
        """Kept K and V and their positions, for each row and head apart."""
        index = 2 if self.span <= 1 << 16 else 4
        each = 2 * self.head_dim * self.itemsize + index
        return self.batch * self.rows * self.heads * self.kept * each


def _list() -> tuple[AttentionWorkload, ...]:
    steps = [(1, 1024), (8, 1024), (32, 2048), (4, 8192), (8, 8192), (1, 32768), (32, 32768)]
    more = [(2, 1024), (4, 1024), (16, 2048), (2, 8192), (16, 8192), (8, 16384), (4, 32768)]
    lists = [(steps, {"bench", "tune"}), (more, {"tune"})]
    real = [
        AttentionWorkload(batch=b, context=n, tags=frozenset(tags))
        for cases, tags in lists
        for b, n in cases
    ]
    tiny = functools.partial(
        AttentionWorkload, dtype="float32", head_dim=16, page_size=8, tags=frozenset({"test"})
    )
    small = [
        tiny(batch=2, context=40, heads=2, kv_heads=2, retention=0.5),
        tiny(batch=1, context=33, rows=3, heads=4, kv_heads=2, retention=0.25),
    ]
    return (*real, *small)


WORKLOADS = _list()


def tagged(tag: str) -> list[AttentionWorkload]:
    """Workloads of one list.

    Raises:
      ValueError: nothing has that tag.
    """
    found = [w for w in WORKLOADS if tag in w.tags]
    if not found:
        known = sorted(frozenset().union(*(w.tags for w in WORKLOADS)))
        raise ValueError(f"no workload is tagged {tag!r}; the tags are {known}")
    return found


class PagedInputs(NamedTuple):
    """Arguments of paged attention, and more page tables of the same kind.

    The tables share no page, so that calls with one after the other find nothing in a cache
    that is smaller than what `sets` of them read.
    """

    q: jax.Array  # [B, n, heads, head_dim]
    k_pool: jax.Array  # [pages, kv_heads, page_size, head_dim]
    v_pool: jax.Array  # as k_pool
    tables: tuple[jax.Array, ...]  # each int32 [B, max_pages], permuted
    lengths: jax.Array  # int32 [B, n]

    def args(self, index: int = 0) -> tuple[jax.Array, ...]:
        """Arguments of `paged_attention` with one of the tables."""
        return self.q, self.k_pool, self.v_pool, self.tables[index], self.lengths


def paged_inputs(workload: AttentionWorkload, *, sets: int = 1, seed: int = 0) -> PagedInputs:
    """Normal queries and pools, permuted pages, made on the device.

    Args:
      sets: page tables, with pages of their own; at least 1.
      seed: of everything random.
    """
    w = workload
    keys = jax.random.split(jax.random.key(seed), 4)
    pages = sets * w.batch * w.pages

    @functools.partial(jax.jit, static_argnames="shape")
    def normal(key, shape):
        return jax.random.normal(key, shape, w.dtype)

    order = jax.random.permutation(keys[3], pages).astype(jnp.int32)
    last = jnp.arange(1 - w.rows, 1, dtype=jnp.int32)
    pool = (pages, w.kv_heads, w.page_size, w.head_dim)
    return PagedInputs(
        q=normal(keys[0], (w.batch, w.rows, w.heads, w.head_dim)),
        k_pool=normal(keys[1], pool),
        v_pool=normal(keys[2], pool),
        tables=tuple(order.reshape(sets, w.batch, w.pages)),
        lengths=jnp.broadcast_to(w.context + last, (w.batch, w.rows)),
    )


def spread_positions(workload: AttentionWorkload, *, seed: int = 0) -> jax.Array:
    """A selection that costs what a real one costs: `kept` positions, one in each stretch.

    Returns:
      `[B, n, heads, capacity]`, ascending, then zeros; uint16 where positions fit.
    """
    w = workload
    stride = max((w.context - w.rows + 1) // w.kept, 1)
    shape = (w.batch, w.rows, w.heads, w.kept)
    within = jax.random.randint(jax.random.key(seed), shape, 0, stride, jnp.int32)
    positions = within + stride * jax.lax.broadcasted_iota(jnp.int32, shape, 3)
    positions = jnp.minimum(positions, w.context - w.rows)
    index = jnp.uint16 if w.span <= 1 << 16 else jnp.uint32
    padding = ((0, 0),) * 3 + ((0, w.capacity - w.kept),)
    return jnp.pad(positions.astype(index), padding)
