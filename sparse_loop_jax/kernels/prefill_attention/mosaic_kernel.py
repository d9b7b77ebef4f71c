"""The kernel: its programs, their shared memory, and the warpgroup that fills it.

A program has a multiprocessor to itself and one tile: 128 rows of a head of a request. Of its
three warpgroups two attend to 64 rows each (`mosaic_attend`), and the third copies: queries,
then block after block of keys and values, page by page, as far ahead as there is room. That one
warpgroup only copies while others compute, that the last keys come first, and that softmax runs
under a matrix product, is FlashAttention-3's scheme (Shah et al., 2024, arXiv 2407.08608); this
is a version of it for paged keys and values.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from sparse_loop_jax.kernels import pallas_mosaic

ROWS = 64  # of a warpgroup: those of a matrix product
GROUPS = 2  # warpgroups that compute
TILE = ROWS * GROUPS
KEYS = 128  # of a block
STAGES = 2  # blocks of keys and of values in shared memory
# Registers of a thread that computes and of one that copies: 65,536 for three warpgroups.
COMPUTE_REGISTERS, COPY_REGISTERS = 240, 24
WARPS = 2  # that copy keys, and as many that copy values


class Inputs(NamedTuple):
    """Arrays in the device's memory."""

    q: Any  # [B, n, heads, dim]
    k: Any  # [pages, kv_heads, page_size, dim]
    v: Any
    table: Any  # int32 [B, max_pages]; an id of a page in every entry
    limits: Any  # int32 [B, n]: keys that each row sees
    common: Any  # int32 [B, tiles]: keys that every live row of a tile sees
    top: Any  # int32 [B, tiles]: keys that any row of it sees
    out: Any  # as q


class Shared(NamedTuple):
    """Buffers in shared memory, and the barriers that say who may use them.

    `full` is completed by copies, `free` by the warpgroups that are done reading.
    """

    q: Any  # [GROUPS, ROWS, dim]; holds the output at last
    k: Any  # [STAGES, KEYS, dim]
    v: Any
    bad: Any  # float32 [2, KEYS]: 1 where a value of a key is not finite
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    clean: Any  # both have cleaned their half of the values


class Tile(NamedTuple):
    """Where a program is, and its blocks of keys, taken from the last to the first."""

    request: jax.Array
    row: jax.Array  # the first of its TILE rows
    head: jax.Array
    shared: jax.Array  # blocks that every live row sees
    steps: jax.Array  # blocks that any row sees


def launch(q, k_pool, v_pool, table, limits, common, top, *, interpret: bool):
    """Runs the kernel; see `Inputs` for the arguments. Returns `[B, n, heads, dim]`."""
    batch, rows, heads, dim = q.shape
    size = k_pool.shape[2]
    transforms = (gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))

    def buffer(*shape):
        return gpu.SMEM(shape, q.dtype, transforms=transforms)

    def barriers(arrivals: int, count: int):
        return gpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    shared = Shared(
        q=buffer(GROUPS, ROWS, dim),
        k=buffer(STAGES, KEYS, dim),
        v=buffer(STAGES, KEYS, dim),
        bad=gpu.SMEM((2, KEYS), jnp.float32),
        q_full=barriers(GROUPS, 1),
        k_full=barriers(KEYS // size, STAGES),
        v_full=barriers(KEYS // size, STAGES),
        k_free=barriers(GROUPS, STAGES),
        v_free=barriers(GROUPS, STAGES),
        clean=barriers(GROUPS, 1),
    )
    run = gpu.kernel(
        functools.partial(_kernel, interpret=interpret),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=list(shared),
        grid=(batch * heads * rows // TILE,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name="prefill_attention",
        # A barrier before every copy would cost more than a copy of a page: who reads, writes
        # and copies is kept apart by the barriers above and by `commit_smem`.
        compiler_params=gpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=pallas_mosaic.interpreter() if interpret else None,
    )
    return run(q, k_pool, v_pool, table, limits, common, top)


def _kernel(*refs, interpret: bool):
    from sparse_loop_jax.kernels.prefill_attention.mosaic_attend import attend_tile

    inputs = Inputs(*refs[: len(Inputs._fields)])
    shared = Shared(*refs[len(Inputs._fields) :])
    group = lax.axis_index("group")
    tile = _tile(inputs)

    @pl.when(group < GROUPS)
    def _():
        gpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        attend_tile(inputs, shared, group, tile, interpret=interpret)

    @pl.when(group == GROUPS)
    def _():
        gpu.set_max_registers(COPY_REGISTERS, action="decrease")
        _copy_queries(inputs, shared, tile)

        @gpu.warp_map
        def _(warp):
            keys = inputs.k, shared.k, shared.k_full, shared.k_free
            values = inputs.v, shared.v, shared.v_full, shared.v_free
            for first, kind in ((0, keys), (WARPS, values)):

                @pl.when((first <= warp) & (warp < first + WARPS))
                def _(first=first, kind=kind):
                    _copy_blocks(inputs, tile, warp - first, *kind)


def _tile(inputs: Inputs) -> Tile:
    """The tile of this program: the longest of a request begin first, whatever their head."""
    rows, heads = inputs.q.shape[1:3]
    tiles = rows // TILE
    program = lax.axis_index("program")
    head = lax.rem(program, jnp.int32(heads))
    rank = tiles - 1 - lax.rem(lax.div(program, jnp.int32(heads)), jnp.int32(tiles))
    request = lax.div(program, jnp.int32(tiles * heads))
    return Tile(
        request=request,
        row=rank * TILE,
        head=head,
        shared=lax.div(inputs.common[request, rank], jnp.int32(KEYS)),
        steps=lax.div(inputs.top[request, rank] + (KEYS - 1), jnp.int32(KEYS)),
    )


def slot_of(step: jax.Array) -> jax.Array:
    """Where in shared memory the keys and values of a step are."""
    return lax.rem(step, jnp.int32(STAGES))


def _copy_queries(inputs: Inputs, shared: Shared, tile: Tile) -> None:
    for group in range(GROUPS):
        rows = pl.ds(tile.row + group * ROWS, ROWS)
        q = inputs.q.at[tile.request, rows, tile.head]
        gpu.copy_gmem_to_smem(q, shared.q.at[group], shared.q_full)


def _copy_blocks(inputs: Inputs, tile: Tile, warp, pool, buffer, full, free) -> None:
    """One of the WARPS warps that copy a tile's keys, or its values, as room gets free."""
    heads, kv_heads, size = inputs.q.shape[2], *pool.shape[1:3]
    pages = KEYS // size
    kv_head = lax.div(tile.head, jnp.int32(heads // kv_heads))
    each = max(pages // WARPS, 1)

    def copy_block(step, _):
        slot = slot_of(step)
        # Read before there is room, so that the copies need not wait for them.
        places = [warp * each + i for i in range(each)]
        block = tile.steps - 1 - step
        ids = [inputs.table[tile.request, block * pages + place] for place in places]

        @pl.when(step >= STAGES)
        def _():
            gpu.barrier_wait(free.at[slot])

        for place, page in zip(places, ids, strict=True):
            part = buffer.at[slot, pl.ds(place * size, size)]
            gpu.copy_gmem_to_smem(pool.at[page, kv_head], part, full.at[slot])

    def await_reader(step, _):  # who waits on a barrier sees all of its phases
        gpu.barrier_wait(free.at[slot_of(step)])

    def copy():
        lax.fori_loop(0, tile.steps, copy_block, None)
        lax.fori_loop(jnp.maximum(tile.steps - STAGES, 0), tile.steps, await_reader, None)

    pl.when(warp * each < pages)(copy)
