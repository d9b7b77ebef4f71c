"""The projection, rotation and K/V write as one Pallas kernel."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels import pallas_triton, tuning
from sparse_loop_jax.kernels.kv_write.pallas import read_places
from sparse_loop_jax.kernels.kv_write.places import place_rows
from sparse_loop_jax.kernels.matvec.pallas import MAX_ROWS, choose_config, rows_served
from sparse_loop_jax.kernels.matvec.pallas_kernels import MatvecConfig, dot_rows
from sparse_loop_jax.kernels.pallas_triton import load, store
from sparse_loop_jax.kernels.project_qkv.op import project_qkv


@project_qkv.register("pallas")
def project_qkv_pallas(
    x: jax.Array,
    weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    live: jax.Array,
    *,
    config: MatvecConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`project_qkv` for at most 128 rows of bfloat16 or float16, in one launch.

    Rotated in float32 and rounded once, which the reference may do twice.

    Raises:
      NotImplementedError: more rows, another dtype, or a matrix that no blocks cover.
    """
    batch, rows, inputs = x.shape
    dim = k_pool.shape[3]
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        raise NotImplementedError(f"project_qkv of {x.dtype} rows and {weight.dtype} weights")
    if not 1 <= batch * rows <= MAX_ROWS:
        raise NotImplementedError(f"project_qkv takes 1 to {MAX_ROWS} rows: {batch * rows}")
    if config is None:
        config = find_config(weight.shape, dim, batch * rows, x.dtype)
    if config is None or config.splits > 1 or not config.fits(dim, inputs):
        raise NotImplementedError(f"project_qkv cannot cut heads of {dim} by {config}")
    return _run(
        x,
        weight,
        cos,
        sin,
        k_pool,
        v_pool,
        page_table,
        positions,
        live,
        config=config,
        interpret=pallas_triton.interpreting(),
    )


def find_config(weight_shape, dim: int, rows: int, dtype) -> MatvecConfig | None:
    """As that of the products: blocks are of one head, of `dim` outputs."""
    outputs, inputs = weight_shape
    computed = choose_config(dim, inputs, gated=False, splits=False, rows=rows)
    if computed is None:
        return None
    return tuning.tuned(
        "project_qkv",
        functools.partial(dataclasses.replace, computed),
        rows=rows_served(rows),
        outputs=outputs,
        inputs=inputs,
        head_dim=dim,
        dtype=dtype,
    )


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _run(
    x, weight, cos, sin, k_pool, v_pool, page_table, positions, live, *, config, interpret: bool
):
    batch, rows, _ = x.shape
    kv_heads, dim = k_pool.shape[1], k_pool.shape[3]
    slots = weight.shape[0] // dim
    q = jax.ShapeDtypeStruct((batch, rows, slots - 2 * kv_heads, dim), x.dtype)
    pools = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in (k_pool, v_pool)]
    # The same in every layer of a loop: XLA computes it once.
    page, token = place_rows(k_pool, page_table, positions, live)
    return pallas_triton.call(
        functools.partial(_kernel, config=config),
        grid=(slots * (dim // config.block_out),),
        out_shape=(q, *pools),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={6: 1, 7: 2},
        interpret=interpret,
        name="project_qkv",
    )(x, weight, cos, sin, page, token, k_pool, v_pool)


def _kernel(
    x_ref,  # [B, n, K]
    weight_ref,  # [(heads + 2 kv_heads) * dim, K]
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
    config: MatvecConfig,
):
    """Grid (head slots * blocks of a head).

    A block takes half of its outputs from either half of the head: it holds whole pairs.
    """
    del k_in_ref, v_in_ref
    batch, rows, inputs = x_ref.shape
    heads, dim = q_ref.shape[2:]
    pages, kv_heads = k_ref.shape[:2]
    half, pairs = dim // 2, config.block_out // 2
    blocks = half // pairs
    program = pl.program_id(0)
    slot, block = program // blocks, program % blocks
    padded = config.padded_rows(batch * rows, config.block_out)
    line = jax.lax.iota(jnp.int32, padded)
    at = block * pairs + jax.lax.iota(jnp.int32, pairs)
    out = jax.lax.iota(jnp.int32, config.block_out)
    out = slot * dim + block * pairs + (out // pairs) * half + out % pairs

    # Read before the weights, so that nothing waits for them at the end.
    real, b, i, page, token = read_places(page_ref, token_ref, line, pages)
    wide = jnp.broadcast_to(real[None, :], (pairs, padded))
    turn = (b[None, :], i[None, :], at[:, None])
    cos = load(cos_ref.at[turn], mask=wide, other=0).astype(jnp.float32)
    sin = load(sin_ref.at[turn], mask=wide, other=0).astype(jnp.float32)

    def body(step, total):
        column = (step * config.block_in + jax.lax.iota(jnp.int32, config.block_in))[None, :]
        mask = jnp.broadcast_to(real[:, None], (padded, config.block_in))
        x = load(x_ref.at[b[:, None], i[:, None], column], mask=mask, other=0)
        return total + dot_rows(load(weight_ref.at[out[:, None], column]), x)

    zero = jnp.zeros((config.block_out, padded), jnp.float32)
    total = jax.lax.fori_loop(0, inputs // config.block_in, body, zero)
    first, second = jnp.split(total.astype(q_ref.dtype).astype(jnp.float32), 2, axis=0)
    turned = first * cos - second * sin, second * cos + first * sin

    def put(ref, lead, values, mask):
        for part, value in zip((0, half), values, strict=True):
            index = (*lead, (part + at)[:, None])
            store(ref.at[index], value.astype(ref.dtype), mask=mask)

    def line_of(head):
        return page[None, :], head, token[None, :]

    # A row that writes nothing has a page past the end, so that it repeats no live one.
    landing = jnp.broadcast_to((page < pages)[None, :], (pairs, padded))

    @pl.when(slot < heads)
    def _():
        put(q_ref, (b[None, :], i[None, :], slot), turned, wide)

    @pl.when((slot >= heads) & (slot < heads + kv_heads))
    def _():
        put(k_ref, line_of(slot - heads), turned, landing)

    @pl.when(slot >= heads + kv_heads)
    def _():
        put(v_ref, line_of(slot - heads - kv_heads), (first, second), landing)
