"""Rows of hidden states through a range of loops, over the paged cache.

The one place where the model meets the cache: prefill, plain decoding, drafting and
verification differ only in their rows and in the range of depths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from sparse_loop_jax.cache import PagedKVCache
from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.exits import ExitReadout, fill_skipped_loops
from sparse_loop_jax.decoding.references import SparseRows
from sparse_loop_jax.kernels.matvec import linear
from sparse_loop_jax.kernels.paged_attention import paged_attention
from sparse_loop_jax.kernels.prefill_attention import prefill_attention
from sparse_loop_jax.kernels.project_qkv import project_qkv
from sparse_loop_jax.kernels.registry import recording
from sparse_loop_jax.kernels.rotate_write import rotate_write
from sparse_loop_jax.models.layers import rope_angles, run_layers
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse.config import DENSE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """n rows for each of B requests. A row sees its request's tokens up to its own."""

    positions: jax.Array  # int32 [B, n]
    live: jax.Array  # bool [B, n]; dead rows write nothing and see nothing

    @property
    def lengths(self) -> jax.Array:
        """Keys that each row sees, its own among them: int32 [B, n]."""
        return jnp.where(self.live, self.positions + 1, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    """What one loop hands to the next."""

    hidden: jax.Array  # [B, n, hidden]
    cache: PagedKVCache
    sparse: SparseRows | None
    readout: ExitReadout | None


def run_loops(
    params: OuroParams,
    spec: DecodeSpec,
    hidden: jax.Array,
    rows: Rows,
    cache: PagedKVCache,
    depths: range,
    *,
    sparse: SparseRows | None = None,
    readout: ExitReadout | None = None,
    prompt: bool = False,
) -> _Carry:
    """Runs `hidden [B, n, hidden]` through the loops of `depths`.

    Each loop writes the rows' K/V into its own plane before it attends. Attention is dense
    unless `sparse` is given and the depth captures or consumes.

    Args:
      prompt: the rows are a chunk of a prompt, and many: products are XLA's own, and dense
        attention is `prefill_attention`. Other rows are few: both stream bytes.

    Returns:
      The state after the last of the loops (final norm applied), the cache, the sparse rows
      with what these loops captured and counted, and the exit readout with them counted.
    """
    one_loop = _one_loop(params, spec, hidden, rows, prompt)
    carry = _Carry(hidden, cache, sparse, readout)
    # A loop over depths of one kind, not a copy of the layers for each: a fraction of the
    # program to compile, and the page table makes the depths differ by an index only.
    with _noting_implementations(spec, prompt):
        for mode, run in _runs(spec, depths, sparse is not None):
            body = functools.partial(one_loop, mode=mode, live=rows.live)
            if len(run) == 1:
                carry = body(jnp.int32(run.start), carry)
            else:
                carry = jax.lax.fori_loop(run.start, run.stop, body, carry)
    return carry


def run_until_left(
    params: OuroParams,
    spec: DecodeSpec,
    hidden: jax.Array,
    rows: Rows,
    cache: PagedKVCache,
    readout: ExitReadout,
) -> tuple[PagedKVCache, ExitReadout, jax.Array]:
    """Runs rows `hidden [B, 1, hidden]` from loop 0 until each has left, dense.

    A row that has left is dead in later loops, and the K/V of the loops it skips is a copy
    of that of its last one: what it computes does not depend on who is beside it. A loop
    that every row skips is not run.

    Args:
      readout: of no loop.

    Returns:
      The cache, the readout with the state and depth of each row's last loop, and how many
      loops were run, int32 [].
    """
    one_loop = _one_loop(params, spec, hidden, rows, prompt=False)

    def going(carry):
        depth, done = carry
        return (depth < spec.config.total_ut_steps) & ~done.readout.left.all()

    def body(carry):
        depth, done = carry
        live = rows.live & ~done.readout.left
        return depth + 1, one_loop(depth, done, mode=DENSE, live=live)

    with _noting_implementations(spec, prompt=False):
        depth, done = jax.lax.while_loop(
            going, body, (jnp.int32(0), _Carry(hidden, cache, None, readout))
        )
    assert done.readout is not None
    cache = fill_skipped_loops(done.cache, rows.positions, rows.live, done.readout.loop)
    return cache, done.readout, depth


def _one_loop(params: OuroParams, spec: DecodeSpec, hidden, rows: Rows, prompt: bool):
    """A function that runs all layers once: `(depth, carry, mode, live) -> carry`.

    `live` bool `[B, n]` are the rows that write and attend in this loop.
    """
    angles = rope_angles(rows.positions, spec.config, hidden.dtype)
    reference = "xla" if spec.implementation == "xla" else None
    products = "xla" if prompt else reference
    dense = prefill_attention if prompt else paged_attention

    def one_loop(depth, carry: _Carry, *, mode: str, live: jax.Array) -> _Carry:
        hidden, sparse = carry.hidden, carry.sparse
        lengths = Rows(rows.positions, live).lengths
        table = jax.lax.dynamic_index_in_dim(
            carry.cache.page_table, depth, axis=1, keepdims=False
        )
        keys, values = list(carry.cache.keys), list(carry.cache.values)
        if sparse is not None:
            sparse = sparse.count_keys(spec, mode, lengths)

        def mix(layer, p):
            def attend(normed):
                nonlocal sparse
                place = (*angles, keys[layer], values[layer], table, rows.positions, live)
                if products == "xla":  # of many rows: what follows the product is a kernel
                    q, keys[layer], values[layer] = rotate_write(
                        linear(normed, p.qkv, implementation=products),
                        *place,
                        implementation=reference,
                    )
                else:
                    q, keys[layer], values[layer] = project_qkv(
                        normed, p.qkv, *place, implementation=products
                    )
                paged = (keys[layer], values[layer], table)
                if mode == DENSE or sparse is None:
                    out = dense(q, *paged, lengths, implementation=spec.implementation)
                else:
                    out, sparse = sparse.attend(spec, mode, layer, q, paged, lengths)
                return out.reshape(*normed.shape[:-1], -1)

            return attend

        hidden = run_layers(params, spec.config, hidden, mix, products)
        readout = carry.readout
        if readout is not None:
            readout = readout.after_loop(params, depth, hidden)
        cache = dataclasses.replace(carry.cache, keys=tuple(keys), values=tuple(values))
        return _Carry(hidden, cache, sparse, readout)

    return one_loop


# What served the ops of each spec's rounds, and attention to prompts by the spec without
# what prompts know nothing of; filled when a program is traced.
_served: dict[DecodeSpec, dict[str, str]] = {}


@contextlib.contextmanager
def _noting_implementations(spec: DecodeSpec, prompt: bool) -> Iterator[None]:
    """Remembers what serves the ops called meanwhile."""
    with recording() as served:
        yield
    if prompt:  # the rest is the same op as in rounds, for other rows
        name = prefill_attention.name
        served = {name: served[name]} if name in served else {}
    _served.setdefault(spec, {}).update(served)


def implementations(spec: DecodeSpec) -> dict[str, str]:
    """The implementation that served each op in the rounds of `spec`.

    And `prefill_attention`, in the program of prompts that was traced last.
    """
    served = dict(_served.get(spec, {}))
    if served:
        served = {**_served.get(spec.of_prompts, {}), **served}
    return served


def _runs(spec: DecodeSpec, depths: range, sparse: bool) -> list[tuple[str, range]]:
    """Consecutive depths whose attention is of one kind."""
    modes = (DENSE,) * spec.config.total_ut_steps
    if sparse and spec.sparse is not None:
        modes = spec.sparse.modes(spec.config.total_ut_steps)
    runs: list[tuple[str, range]] = []
    for depth in depths:
        if runs and runs[-1][0] == modes[depth]:
            runs[-1] = (modes[depth], range(runs[-1][1].start, depth + 1))
        else:
            runs.append((modes[depth], range(depth, depth + 1)))
    return runs
