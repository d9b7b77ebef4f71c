"""Rotation and K/V write as one Pallas kernel, which reads and writes each value once."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels import pallas_triton
from sparse_loop_jax.kernels.kv_write.pallas import read_places
from sparse_loop_jax.kernels.kv_write.places import place_rows
from sparse_loop_jax.kernels.pallas_triton import load, store
from sparse_loop_jax.kernels.rotate_write.op import rotate_write

# Heads of a row that a program takes at most, so that they share its angles, and (row, head)
# pairs of a program.
MAX_HEADS = 4
BLOCK = 32
NUM_WARPS = 4


@rotate_write.register("pallas")
def rotate_write_pallas(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`rotate_write` in one launch, rotated in float32 and rounded once.

    Raises:
      NotImplementedError: there are no rows, or a head's size is no power of two.
    """
    dim = k_pool.shape[3]
    if qkv.shape[0] * qkv.shape[1] == 0:
        raise NotImplementedError(f"rotate_write of no rows: {qkv.shape}")
    if dim < 2 or dim & (dim - 1):
        raise NotImplementedError(f"rotate_write of heads of {dim}, which is no power of two")
    return _run(
        qkv,
        cos,
        sin,
        k_pool,
        v_pool,
        page_table,
        positions,
        live,
        interpret=pallas_triton.interpreting(),
    )


@functools.partial(jax.jit, static_argnames=("interpret",))
def _run(qkv, cos, sin, k_pool, v_pool, page_table, positions, live, *, interpret: bool):
    batch, rows, width = qkv.shape
    kv_heads, dim = k_pool.shape[1], k_pool.shape[3]
    slots = width // dim
    heads = slots - 2 * kv_heads
    together = math.gcd(heads, kv_heads, MAX_HEADS)  # all queries, all keys or all values
    block = min(BLOCK // together, pl.next_power_of_2(batch * rows))
    q = jax.ShapeDtypeStruct((batch, rows, heads, dim), qkv.dtype)
    pools = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in (k_pool, v_pool)]
    # The same in every layer of a loop: XLA computes it once.
    page, token = place_rows(k_pool, page_table, positions, live)
    return tuple(
        pallas_triton.call(
            functools.partial(_kernel, together=together, block=block),
            grid=(slots // together, pl.cdiv(batch * rows, block)),
            out_shape=(q, *pools),
            num_warps=NUM_WARPS,
            aliases={5: 1, 6: 2},
            interpret=interpret,
            name="rotate_write",
        )(qkv.reshape(batch, rows, slots, dim), cos, sin, page, token, k_pool, v_pool)
    )


def _kernel(
    qkv_ref,  # [B, n, heads + 2 kv_heads, dim]
    cos_ref,  # [B, n, dim]
    sin_ref,  # [B, n, dim]
    page_ref,  # int32 [B, n], past the end for a row that writes nothing
    token_ref,  # int32 [B, n]
    k_in_ref,  # the pools' old names
    v_in_ref,
    q_ref,  # [B, n, heads, dim]
    k_ref,  # [pages, kv_heads, page_size, dim]
    v_ref,  # as k_ref
    *,
    together: int,
    block: int,
):
    """Grid (groups of heads, blocks of rows); a line is a head of a row."""
    del k_in_ref, v_in_ref
    heads, dim = q_ref.shape[2:]
    pages, kv_heads = k_ref.shape[:2]
    half = dim // 2
    first_slot = pl.program_id(0) * together
    line = jax.lax.iota(jnp.int32, block * together)
    row = pl.program_id(1) * block + line // together
    slot = first_slot + line % together
    real, b, i, page, token = read_places(page_ref, token_ref, row, pages)

    def wide(flags):
        return jnp.broadcast_to(flags[:, None], (flags.shape[0], half))

    def lines(*index):
        """The two halves of a line."""
        at = jax.lax.iota(jnp.int32, half)[None, :]
        lead = [x[:, None] for x in index]
        return (*lead, at), (*lead, half + at)

    source = lines(b, i, slot)
    first, second = (load(qkv_ref.at[at], mask=wide(real), other=0) for at in source)

    def turned():
        angle = lines(b, i)[0]
        cos, sin = (
            load(ref.at[angle], mask=wide(real), other=0).astype(jnp.float32)
            for ref in (cos_ref, sin_ref)
        )
        x, y = first.astype(jnp.float32), second.astype(jnp.float32)
        return x * cos - y * sin, y * cos + x * sin

    def put(ref, index, values, mask):
        for at, value in zip(index, values, strict=True):
            store(ref.at[at], value.astype(ref.dtype), mask=wide(mask))

    @pl.when(first_slot < heads)
    def _():
        put(q_ref, lines(b, i, slot), turned(), real)

    @pl.when((first_slot >= heads) & (first_slot < heads + kv_heads))
    def _():
        put(k_ref, lines(page, slot - heads, token), turned(), page < pages)

    @pl.when(first_slot >= heads + kv_heads)
    def _():
        put(v_ref, lines(page, slot - heads - kv_heads, token), (first, second), page < pages)
