"""The kernel: its programs, their shared memory, and the warpgroup that fills it.

A program has a multiprocessor to itself and takes one tile after another: 128 rows of a head
of a request. Of its three warpgroups two attend to 64 rows each (`mosaic_attend`), and the
third copies: queries of a tile, then block after block of its keys and values, page by page,
as far ahead as there is room. That one warpgroup only copies while others compute, and that
softmax runs under a matrix product, is FlashAttention-3's scheme (Shah et al., 2024, arXiv
2407.08608); this is a version of it for paged keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
# Registers of a thread that computes and of one that copies: 65,536 for four warpgroups.
COMPUTE_REGISTERS, COPY_REGISTERS = 232, 24


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

    q: Any  # [2, GROUPS, ROWS, dim]: of this tile and the next; holds the output at last
    k: Any  # [STAGES, KEYS, dim]
    v: Any
    bad: Any  # float32 [2, KEYS]: 1 where a value of a key is not finite
    q_full: Any
    q_free: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any  # of each warpgroup: it may start its products
    clean: Any  # both have cleaned their half of the values


class Tile(NamedTuple):
    """Where a program is; integers of the device."""

    number: jax.Array  # of the program's tiles so far
    request: jax.Array
    row: jax.Array  # the first of its TILE rows
    head: jax.Array
    shared: jax.Array  # blocks of keys that every live row sees
    steps: jax.Array  # blocks of keys that any row sees
    before: jax.Array  # blocks of the program's earlier tiles

    @property
    def place(self) -> jax.Array:
        """Of its queries in shared memory."""
        return lax.rem(self.number, jnp.int32(2))


def launch(q, k_pool, v_pool, table, limits, common, top, *, programs: int, interpret: bool):
    """Runs the kernel; see `Inputs` for the arguments. Returns `[B, n, heads, dim]`."""
    batch, rows, heads, dim = q.shape
    size = k_pool.shape[2]
    transforms = (gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))

    def buffer(*shape):
        return gpu.SMEM(shape, q.dtype, transforms=transforms)

    def barriers(arrivals: int, count: int):
        return gpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    shared = Shared(
        q=buffer(2, GROUPS, ROWS, dim),
        k=buffer(STAGES, KEYS, dim),
        v=buffer(STAGES, KEYS, dim),
        bad=gpu.SMEM((2, KEYS), jnp.float32),
        q_full=barriers(GROUPS, 2),
        q_free=barriers(GROUPS, 2),
        k_full=barriers(KEYS // size, STAGES),
        v_full=barriers(KEYS // size, STAGES),
        k_free=barriers(GROUPS, STAGES),
        v_free=barriers(GROUPS, STAGES),
        turn=barriers(1, GROUPS),
        clean=barriers(GROUPS, 1),
    )
    programs = min(programs, batch * heads * rows // TILE)
    run = gpu.kernel(
        functools.partial(_kernel, programs=programs, interpret=interpret),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=list(shared),
        grid=(programs,),
        grid_names=("program",),
        num_threads=GROUPS + 2,
        thread_name="group",
        kernel_name="prefill_attention",
        # A barrier before every copy would cost more than a copy of a page: who reads, writes
        # and copies is kept apart by the barriers above and by `commit_smem`.
        compiler_params=gpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=pallas_mosaic.interpreter() if interpret else None,
    )
    return run(q, k_pool, v_pool, table, limits, common, top)


def _kernel(*refs, programs: int, interpret: bool):
    from sparse_loop_jax.kernels.prefill_attention.mosaic_attend import attend_tile

    inputs = Inputs(*refs[: len(Inputs._fields)])
    shared = Shared(*refs[len(Inputs._fields) :])
    group = lax.axis_index("group")

    @pl.when(group < GROUPS)
    def _():
        gpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        attend = functools.partial(attend_tile, inputs, shared, group, interpret=interpret)
        _each_tile(inputs, programs, attend)
        gpu.wait_smem_to_gmem(0)

    @pl.when(group == GROUPS)
    def _():
        gpu.set_max_registers(COPY_REGISTERS, action="decrease")

        def copy(tile: Tile) -> None:
            _copy_queries(inputs, shared, tile)
            _copy_blocks(inputs, tile, inputs.k, shared.k, shared.k_full, shared.k_free)

        tiles, blocks = _each_tile(inputs, programs, copy)
        _await_last(shared.q_free, tiles, 2)
        _await_last(shared.k_free, blocks, STAGES)

    @pl.when(group == GROUPS + 1)
    def _():
        gpu.set_max_registers(COPY_REGISTERS, action="decrease")

        def copy(tile: Tile) -> None:
            _copy_blocks(inputs, tile, inputs.v, shared.v, shared.v_full, shared.v_free)

        _, blocks = _each_tile(inputs, programs, copy)
        _await_last(shared.v_free, blocks, STAGES)


def _each_tile(inputs: Inputs, programs: int, work: Callable[[Tile], None]):
    """Calls `work` with each tile of this program, the longest first.

    Returns how many tiles and blocks of keys there were, int32 [] each.
    """
    batch, rows, heads, _ = inputs.q.shape
    tiles = rows // TILE
    count = batch * heads * tiles
    program = lax.axis_index("program")
    number = functools.partial(jnp.int32)

    def one(turn, carry):
        # Back and forth, so that who gets the longest of one turn gets the shortest of the
        # next. A tile's length falls with its number.
        forth = lax.rem(turn, number(2)) == 0
        item = turn * programs + jnp.where(forth, program, programs - 1 - program)

        def live(_, carry):
            done, before = carry
            request = lax.rem(lax.div(item, number(heads)), number(batch))
            rank = tiles - 1 - lax.div(item, number(heads * batch))
            tile = Tile(
                number=done,
                request=request,
                row=rank * TILE,
                head=lax.rem(item, number(heads)),
                shared=lax.div(inputs.common[request, rank], number(KEYS)),
                steps=lax.div(inputs.top[request, rank] + (KEYS - 1), number(KEYS)),
                before=before,
            )
            work(tile)
            return done + 1, before + tile.steps

        return lax.fori_loop(0, (item < count).astype(jnp.int32), live, carry)

    return lax.fori_loop(0, -(-count // programs), one, (number(0), number(0)))


def slot_of(block: jax.Array) -> jax.Array:
    """Where the program's `block`-th block of keys, and of values, lies."""
    return lax.rem(block, jnp.int32(STAGES))


def _copy_queries(inputs: Inputs, shared: Shared, tile: Tile) -> None:
    """Copies a tile's queries into shared memory, once there is room."""

    @pl.when(tile.number >= 2)
    def _():
        gpu.barrier_wait(shared.q_free.at[tile.place])

    for group in range(GROUPS):
        rows = pl.ds(tile.row + group * ROWS, ROWS)
        gpu.copy_gmem_to_smem(
            inputs.q.at[tile.request, rows, tile.head],
            shared.q.at[tile.place, group],
            shared.q_full.at[tile.place],
        )


def _copy_blocks(inputs: Inputs, tile: Tile, pool, buffer, full, free) -> None:
    """Copies the blocks of a tile's keys, or of its values, as room gets free."""
    heads, kv_heads, size = inputs.q.shape[2], *pool.shape[1:3]
    pages = KEYS // size
    kv_head = lax.div(tile.head, jnp.int32(heads // kv_heads))

    def copy_block(step, _):
        block = tile.before + step
        slot = slot_of(block)
        # Read before there is room, so that the copies need not wait for them.
        ids = [inputs.table[tile.request, step * pages + i] for i in range(pages)]

        @pl.when(block >= STAGES)
        def _():
            gpu.barrier_wait(free.at[slot])

        for i, page in enumerate(ids):
            part = buffer.at[slot, pl.ds(i * size, size)]
            gpu.copy_gmem_to_smem(pool.at[page, kv_head], part, full.at[slot])

    lax.fori_loop(0, tile.steps, copy_block, None)


def _await_last(free, done: jax.Array, count: int) -> None:
    """Waits for what the copies did not: who waits on barriers sees all of their phases.

    Args:
      free: `count` barriers that take turns; `done` times one was to be completed.
    """

    def wait(number, _):
        gpu.barrier_wait(free.at[lax.rem(number, jnp.int32(count))])

    lax.fori_loop(jnp.maximum(done - count, 0), done, wait, None)
