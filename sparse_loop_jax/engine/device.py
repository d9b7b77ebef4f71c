"""What an engine does to its decode state besides rounds: jitted, donated, of few shapes.

A row of the state is written when its prompt ends; until then it is dead and its prompt runs
in a small state of a few rows that shares the pools. So a prompt costs its own rows, and a
row that is free, waiting for its prompt or retired costs rounds nothing.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.cache import create_cache
from sparse_loop_jax.decoding import adaptive, steps
from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.state import DecodeState
from sparse_loop_jax.engine.rows import RowData, Sizes, empty_rows, request_params
from sparse_loop_jax.generation.prompts import Emitted
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse import store as reference_store


def new_state(
    spec: DecodeSpec, sizes: Sizes, dtype, key_counts: np.ndarray | None = None
) -> DecodeState:
    """Allocates a state of dead rows.

    Args:
      key_counts: for sparse decode, k by N up to the table's span.
    """
    config, rows = spec.config, sizes.rows
    loops = config.total_ut_steps
    pages = sizes.num_blocks * loops
    table = np.full((rows, loops, sizes.width), pages, np.int32)
    speculative = spec.speculative
    drafts = speculative is not None and speculative.adaptive
    store = None if spec.sparse is None else _new_store(spec, sizes)
    empty = empty_rows(rows, sizes)
    return DecodeState(
        cache=create_cache(config, table, pages, sizes.page_size, dtype),
        request=request_params(jax.tree.map(jnp.asarray, empty)),
        token=jnp.zeros((rows,), jnp.int32),
        position=jnp.zeros((rows,), jnp.int32),
        remaining=jnp.zeros((rows,), jnp.int32),
        stopped=jnp.zeros((rows,), bool),
        store=store,
        key_counts=None if key_counts is None else jnp.asarray(key_counts),
        history=adaptive.new_history(rows) if drafts else None,
        spec=spec,
    )


def _new_store(spec: DecodeSpec, sizes: Sizes):
    return reference_store.create(
        spec.config,
        slots=sizes.slots,
        capacity=sizes.capacity,
        max_tokens=sizes.width * sizes.page_size,
    )


def resize(state: DecodeState, sizes: Sizes, key_counts: np.ndarray | None) -> DecodeState:
    """The state for longer or shorter requests: another page table, another store.

    The store's payloads are fresh, nothing is copied; to be done while no round is
    outstanding. Slots keep their versions, so a lease of the old store owns nothing of the
    new one.
    """
    table, pages = state.cache.page_table[:, :, : sizes.width], state.cache.num_pages
    more = jnp.full((*table.shape[:2], sizes.width - table.shape[2]), pages, jnp.int32)
    table = jnp.concatenate([table, more], axis=2)
    store = state.store
    if store is not None:
        for payload in (*store.positions, *store.mass, *store.base):
            payload.delete()  # the old store goes before the new one comes
        store = dataclasses.replace(_new_store(state.spec, sizes), version=store.version)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, page_table=table),
        store=store,
        key_counts=None if key_counts is None else jnp.asarray(key_counts),
    )


def prefill_rows(
    params: OuroParams,
    state: DecodeState,
    rows: RowData,
    tokens: np.ndarray,
    valid: np.ndarray,
    ends: np.ndarray,
    *,
    sampled: bool,
    early_exit: bool,
) -> tuple[DecodeState, Emitted]:
    """Runs a chunk of P prompts; a row whose prompt ends becomes live in the state.

    Args:
      state: donated.
      rows: of P requests; `position` is where the chunk begins and `remaining` the tokens
        that may be emitted.
      tokens, valid, ends: as for `decoding.prefill`, `[P, C]`, [P] and [P].
      sampled, early_exit: what the compiled readout has to be capable of.

    Returns:
      The state, and what the P prompts emitted.
    """
    # The program does not depend on what decodes later: one for all specs.
    plain = _plain(state, sampled=sampled, early_exit=early_exit)
    plain, emitted = _prefill_rows(params, plain, rows, tokens, valid, ends)
    return _restored(plain, state), emitted


@functools.partial(jax.jit, donate_argnames=("state",))
def _prefill_rows(params, state: DecodeState, rows: RowData, tokens, valid, ends):
    few = _few(state, rows)
    few, output = steps.prefill(params, few, tokens, valid, ends)
    target = jnp.where(ends, rows.row, state.token.shape[0])  # past the end: dropped
    return _install(state, few, target), (output.tokens, output.count, output.exit_loops)


def edit_rows(state: DecodeState, grown: np.ndarray, killed: np.ndarray) -> DecodeState:
    """Adds blocks to rows and ends rows.

    Args:
      state: its page table and `remaining` are donated.
      grown: int32 `[G, 3]`: row (past the end for none), place in its table, and block.
      killed: bool [rows]; these emit and write nothing from now on.
    """
    # Without the pools: passing a hundred arrays through costs more than the edit. And what
    # the host says is one transfer.
    said = np.concatenate([grown.ravel(), killed.astype(np.int32)])
    table, remaining = _edit_rows(state.cache.page_table, state.remaining, said)
    cache = dataclasses.replace(state.cache, page_table=table)
    return dataclasses.replace(state, cache=cache, remaining=remaining)


@functools.partial(jax.jit, donate_argnames=("table", "remaining"))
def _edit_rows(table, remaining, said):
    rows, loops, _ = table.shape
    row, place, block = said[:-rows].reshape(-1, 3).T
    pages = block[:, None] * loops + jnp.arange(loops, dtype=jnp.int32)[None]
    table = table.at[row, :, place].set(pages, mode="drop")
    return table, jnp.where(said[-rows:] > 0, 0, remaining)


# Keys and values, per layer.
_Pools = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


@jax.jit
def take_pages(pools: _Pools, pages: jax.Array) -> _Pools:
    """Copies of the pages int32 [n] of every pool; ids past the end give anything."""
    return jax.tree.map(lambda pool: pool.at[pages].get(mode="clip"), pools)


@functools.partial(jax.jit, donate_argnames=("pools",))
def put_pages(pools: _Pools, pages: jax.Array, contents: _Pools) -> _Pools:
    """The pools, donated, with the pages int32 [n] set; ids past the end set nothing."""
    return jax.tree.map(
        lambda pool, part: pool.at[pages].set(part, mode="drop"), pools, contents
    )


def restore_row(
    state: DecodeState, row: RowData, history: tuple[np.ndarray, np.ndarray] | None
) -> DecodeState:
    """Makes the row of a preempted request live again; its pages are there.

    Args:
      state: donated.
      row: of one request.
      history: of adaptive drafting, two floats, or None.
    """
    state = _restored(_restore_row(_plain(state, sampled=False, early_exit=False), row), state)
    if state.history is not None and history is not None:
        accepted, judged = history
        state = dataclasses.replace(
            state,
            history=adaptive.DraftHistory(
                state.history.accepted.at[row.row].set(accepted, mode="drop"),
                state.history.judged.at[row.row].set(judged, mode="drop"),
            ),
        )
    return state


@functools.partial(jax.jit, donate_argnames=("state",))
def _restore_row(state: DecodeState, row: RowData):
    return _install(state, _few(state, row), jnp.asarray(row.row))


def _few(state: DecodeState, rows: RowData) -> DecodeState:
    """A dense, plain state of the rows alone, on the pools of `state`."""
    return DecodeState(
        cache=dataclasses.replace(
            state.cache, page_table=_page_table(state, jnp.asarray(rows.blocks))
        ),
        request=request_params(rows),
        token=jnp.asarray(rows.token),
        position=jnp.asarray(rows.position),
        remaining=jnp.asarray(rows.remaining),
        stopped=jnp.zeros(rows.row.shape, bool),
        store=None,
        key_counts=None,
        history=None,
        spec=state.spec,
    )


def _install(state: DecodeState, few: DecodeState, target: jax.Array) -> DecodeState:
    """`state` with rows `target` taken from `few`, whose pools it takes too."""

    def put(whole, part):
        return whole.at[target].set(part, mode="drop")

    history = state.history
    if history is not None:
        new = adaptive.new_history(target.shape[0])
        history = jax.tree.map(put, history, new)
    table = put(state.cache.page_table, few.cache.page_table)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(few.cache, page_table=table),
        request=jax.tree.map(put, state.request, few.request),
        token=put(state.token, few.token),
        position=put(state.position, few.position),
        remaining=put(state.remaining, few.remaining),
        stopped=put(state.stopped, few.stopped),
        history=history,
    )


def _pages(state: DecodeState, blocks: jax.Array) -> jax.Array:
    """Pages `[..., loops]` of blocks; block past the end, pages past the end."""
    loops = state.spec.config.total_ut_steps
    depth = jnp.arange(loops, dtype=jnp.int32).reshape((1,) * blocks.ndim + (loops,))
    pages = blocks[..., None] * loops + depth
    return jnp.minimum(pages, state.cache.num_pages)


def _page_table(state: DecodeState, blocks: jax.Array) -> jax.Array:
    """int32 `[P, loops, width]` of blocks `[P, width]`."""
    return _pages(state, blocks).swapaxes(1, 2)


def with_readout(state: DecodeState, *, sampled: bool, early_exit: bool) -> DecodeState:
    """The state whose next step can sample, or leave early; nothing on the device changes."""
    spec = dataclasses.replace(state.spec, sampled=sampled, early_exit=early_exit)
    return dataclasses.replace(state, spec=spec)


def _plain(state: DecodeState, *, sampled: bool, early_exit: bool) -> DecodeState:
    """The state without what only rounds need, so that programs are shared by all specs."""
    spec = dataclasses.replace(
        state.spec, sampled=sampled, early_exit=early_exit, sparse=None, speculative=None
    )
    return dataclasses.replace(state, store=None, key_counts=None, spec=spec)


def _restored(plain: DecodeState, state: DecodeState) -> DecodeState:
    return dataclasses.replace(
        plain, store=state.store, key_counts=state.key_counts, spec=state.spec
    )


def lower_prefill(params, state: DecodeState, rows: RowData, tokens, valid, ends):
    """The lowered program of greedy prompts, for its memory analysis."""
    plain = _plain(state, sampled=False, early_exit=False)
    return _prefill_rows.lower(params, plain, rows, tokens, valid, ends)
