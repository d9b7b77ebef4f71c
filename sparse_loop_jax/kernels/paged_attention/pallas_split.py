"""Attention over one piece of one request's context: the kernel of split decoding.

The context of a request is cut into pieces. One program takes one piece, one kv head and
one block of the queries that share it (the rows of the request times the query heads of the
group), so that a page is read once for all of them, and leaves an unnormalised partial
result that `pallas_merge` adds to the others. Products run on the matrix units: a row's result
does not depend on its neighbours. Few queries are their narrow operand (keys along the long
axis of every tile, at least 8 queries along the short one), many are the long one.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels.pallas_triton import load, store

LOG2E = math.log2(math.e)  # exp2 is the hardware's exponential


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """How the kernel cuts the work.

    Attributes:
      block_rows: queries of a program; at least 8.
      block_keys: keys of one step of a program.
      splits: pieces of a context, at most; 1 unless one block holds all queries.
      min_keys: keys below which a piece is not cut further.
      num_warps, num_stages: warps of a program, tiles in flight.
    """

    block_rows: int
    block_keys: int
    splits: int
    min_keys: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("block_rows", "block_keys", "min_keys", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.block_rows < 8 or self.block_keys < 16:
            raise ValueError(f"a tile needs at least 8 rows and 16 keys, got {self}")
        if self.splits < 1 or self.num_stages < 1:
            raise ValueError(f"splits and num_stages must be positive, got {self}")

    @property
    def keys_first(self) -> bool:
        """Whether tiles of scores are [keys, rows]; [rows, keys] where there are many rows."""
        return self.block_rows <= 32


def context_length(lengths_ref, b, span: int):
    """Keys of request b that any of its rows sees, at most what its table holds."""
    top = lengths_ref[b, 0]
    for i in range(1, lengths_ref.shape[1]):
        top = jnp.maximum(top, lengths_ref[b, i])
    return jnp.minimum(top, span)


def piece_keys(length, config: SplitConfig):
    """Keys of each piece of a context of `length`: equal, whole blocks, not tiny."""
    blocks = _ceil_div(length, config.block_keys)
    least = max(config.min_keys // config.block_keys, 1)
    return jnp.maximum(_ceil_div(blocks, config.splits), least) * config.block_keys


def split_kernel(
    q_ref,  # [B, n, heads, dim]
    k_ref,  # [pages, kv_heads, page_size, dim]
    v_ref,  # [pages, kv_heads, page_size, dim]
    table_ref,  # int32 [B, max_pages]
    lengths_ref,  # int32 [B, n]
    *out_refs,  # out [B, n, heads, dim] where splits is 1, else
    #   acc float32 [B, kv_heads, splits, R, dim] with R = n * group,
    #   top and total float32 [B, kv_heads, splits, R]: the maximum of the base-2 scores and
    #   the sum of the weights relative to it.
    #   Where scored: top and total [B, n, heads] after out, and last scores float32
    #   [B, n, heads, span], the base-2 scores of the keys that each row sees
    config: SplitConfig,
    scored: bool = False,
):
    """Grid (kv_heads, splits or row blocks, B)."""
    head, b = pl.program_id(0), pl.program_id(2)
    rows, heads, dim = q_ref.shape[1:]
    pages, kv_heads, size, _ = k_ref.shape
    group = heads // kv_heads
    count, span = rows * group, table_ref.shape[1] * size
    whole = config.splits == 1
    piece, row_block = (0, pl.program_id(1)) if whole else (pl.program_id(1), 0)
    block_rows = config.block_rows
    dtype = jnp.promote_types(q_ref.dtype, k_ref.dtype)
    scale = dim**-0.5 * LOG2E

    # Tiles of scores are [keys, rows] or [rows, keys]; what belongs to a row or to a key is
    # a vector that is spread along the other axis.
    key_axis, row_axis = (0, 1) if config.keys_first else (1, 0)

    def of_row(x):
        return jnp.expand_dims(x, key_axis)

    def of_key(x):
        return jnp.expand_dims(x, row_axis)

    query = row_block * block_rows + jax.lax.iota(jnp.int32, block_rows)
    real = query < count
    row = jax.lax.div(jnp.minimum(query, count - 1), jnp.int32(group))
    lane = head * group + jax.lax.rem(query, jnp.int32(group))
    flat = jax.lax.iota(jnp.int32, dim)
    q = load(
        q_ref.at[b, row[:, None], lane[:, None], flat[None, :]],
        mask=jnp.broadcast_to(real[:, None], (block_rows, dim)),
        other=0,
    ).astype(dtype)

    if rows == 1:
        length = common = jnp.minimum(lengths_ref[b, 0], span)
        limits = jnp.full((block_rows,), length, jnp.int32)
    else:
        limits = jnp.minimum(load(lengths_ref.at[b, row], mask=real, other=0), span)
        # All programs of a piece, the merging one too, must cut the context alike.
        length = jnp.max(limits, axis=0) if whole else context_length(lengths_ref, b, span)
        # What every live row sees. Dead and padding rows compute there too, and are dropped.
        common = jnp.min(jnp.where(limits > 0, limits, length), axis=0)
    keys = length if whole else piece_keys(length, config)
    start = piece * keys
    end = jnp.minimum(start + keys, length)

    def gather(weights, values):
        """Values summed by weight: [dim, rows], or [rows, dim]."""
        if config.keys_first:
            return _dot(values, weights, 1, 0)
        return _dot(weights, values, 1, 0)

    def attend(first, last, carry, *, block: int, shared: bool):
        """Takes in the keys from `first` to `last`; `shared` by all live rows or not."""
        within = jax.lax.iota(jnp.int32, block)

        def body(step, carry):
            top, total, acc = carry
            position = first + step * block + within
            # A key past the last stands for the last one, so that nothing unseen is read,
            # and is masked as a score.
            place = jnp.minimum(position, last - 1)
            page = load(table_ref.at[b, place >> (size.bit_length() - 1)])
            # An id past the pool has no page; any page is as good to read.
            page = jnp.clip(page, 0, pages - 1)[:, None]
            key = (page, head, (place & (size - 1))[:, None], flat[None, :])
            k = load(k_ref.at[key]).astype(dtype)
            scores = _dot(k, q, 1, 1) if config.keys_first else _dot(q, k, 1, 1)
            visible = of_key(position < last)
            scores = scores * scale + jnp.where(visible, 0.0, -jnp.inf)
            if not shared:
                visible = visible & (of_key(position) < of_row(limits))
                scores = jnp.where(visible, scores, -jnp.inf)
            if scored:
                seen = of_key(position) < of_row(jnp.where(real, limits, 0))
                # What a row does not see is written past the end: nowhere.
                column = jnp.where(seen & of_key(position < last), of_key(position), span)
                index = (b, of_row(row), of_row(lane), column)
                store(out_refs[-1].at[index], scores, mask=column < span)
            peak = jnp.maximum(top, jnp.max(scores, axis=key_axis))
            # -inf minus -inf is nan: a row that has seen no key yet subtracts zero.
            shift = peak if shared else jnp.where(peak == -jnp.inf, 0.0, peak)
            weights = jnp.exp2(scores - of_row(shift))
            keep = jnp.exp2(top - shift)
            total = total * keep + jnp.sum(weights, axis=key_axis)
            if config.keys_first:  # [dim, keys], so that nothing has to be transposed
                key = (
                    page[:, 0][None, :],
                    head,
                    (place & (size - 1))[None, :],
                    flat[:, None],
                )
            v = load(v_ref.at[key]).astype(dtype)
            if not shared:
                # Zero times NaN is NaN: what is not finite stays out of the product and
                # comes back in the rows that see it.
                finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
                v = jnp.where(finite, v, jnp.zeros_like(v))
                bad = jnp.max(jnp.where(finite, 0, 1), axis=0 if config.keys_first else 1)
                spoiled = jnp.max(jnp.where(visible, of_key(bad), 0), axis=key_axis)
                acc = jnp.where(of_row(spoiled) > 0, jnp.nan, acc)
            high = weights.astype(dtype)
            acc = acc * of_row(keep) + gather(high, v)
            # With few rows the matrix units idle anyway, and the sums stay float32: the
            # weights' rounding error is a second term. With many (a prefill) they are what
            # limits, and weights are rounded to the dtype of V, as flash attention does.
            if config.keys_first and dtype != jnp.float32:
                acc += gather((weights - high.astype(jnp.float32)).astype(dtype), v)
            return peak, total, acc

        steps = _ceil_div(jnp.maximum(last - first, 0), block)
        return jax.lax.fori_loop(0, steps, body, carry)

    carry = (
        jnp.full((block_rows,), -jnp.inf, jnp.float32),
        jnp.zeros((block_rows,), jnp.float32),
        jnp.zeros((dim, block_rows) if config.keys_first else (block_rows, dim), jnp.float32),
    )
    block = config.block_keys
    carry = attend(start, jnp.minimum(common, end), carry, block=block, shared=True)
    if rows > 1:
        # The few keys that only some rows see, in small tiles: with large ones the masks of
        # both kinds do not fit the registers of two warps.
        tail = 16 if config.keys_first else block
        carry = attend(jnp.maximum(start, common), end, carry, block=tail, shared=False)
    top, total, acc = carry

    wide = jnp.broadcast_to(of_row(real), acc.shape)
    if whole:
        out_ref = out_refs[0]
        seen = limits > 0
        out = acc / of_row(jnp.where(seen, total, 1.0))
        out = jnp.where(of_row(seen), out, 0.0).astype(out_ref.dtype)
        # A padding row's index is past the end, so that it repeats no live one.
        place = of_row(jnp.where(real, row, rows)), of_row(lane)
        store(out_ref.at[(b, *place, of_key(flat))], out, mask=wide)
        if scored:
            place = (b, jnp.where(real, row, rows), lane)
            store(out_refs[1].at[place], top, mask=real)
            store(out_refs[2].at[place], total, mask=real)
    else:
        acc_ref, top_ref, total_ref = out_refs[:3]

        @pl.when(start < length)
        def _():
            place = (b, head, piece)
            store(acc_ref.at[(*place, of_row(query), of_key(flat))], acc, mask=wide)
            store(top_ref.at[(*place, query)], top, mask=real)
            store(total_ref.at[(*place, query)], total, mask=real)


def _ceil_div(a, b: int):
    return jax.lax.div(a + (b - 1), jnp.int32(b))


def _dot(a, b, a_axis: int, b_axis: int):
    """`a_axis` of a against `b_axis` of b, summed in float32; float32 stays float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
