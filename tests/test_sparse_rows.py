"""Layers that capture, consume or do both, through the store, against the formulas."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.kernels import paged_attention
from sparse_loop_jax.kernels.capture_attention import capture_attention
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.sparse import SparseDecodeConfig, arithmetic, store as rs
from sparse_loop_jax.sparse.arithmetic import retained_count, retained_counts
from sparse_loop_jax.sparse.attention import (
    attend_rows,
    capture_rows,
    consume_rows,
    recapture_rows,
)
from sparse_loop_jax.sparse.oracle import selection_mass

HEADS, KV_HEADS, DIM, SLOTS, CAPACITY = 4, 2, 16, 16, 24
LENGTHS = [[0, 9], [9, 9], [40, 9]]
BATCH, ROWS = 3, 2
MODEL = OuroConfig(
    vocab_size=8,
    hidden_size=HEADS * DIM,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
)


def jitted(function, *static):
    """Jitted with its reference ops; `static` beside the layer and the config."""
    call = jax.jit(
        functools.partial(function, implementation="xla"),
        static_argnames=("layer", "config", *static),
    )
    return lambda *args, config: call(*args, config=config.compiled_part)


capture_op = jax.jit(
    functools.partial(capture_attention, capacity=CAPACITY, implementation="xla")
)
dense_op = jax.jit(functools.partial(paged_attention, implementation="xla"))
capture, consume, recapture = map(jitted, (capture_rows, consume_rows, recapture_rows))


@pytest.fixture
def loops(paged_case):
    """A function from a dtype to the inputs of three loops: other numbers, the same pages."""

    def make(dtype="float32", lengths=LENGTHS):
        case = paged_case(
            lengths, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype,
            max_pages=4, spare_pages=14 - sum(-(-max(rows) // 16) for rows in lengths),
        )  # fmt: skip
        rng = np.random.default_rng(1)
        made = []
        for _ in range(3):
            q, k, v = (
                jnp.asarray(np.where(np.isnan(a), np.nan, rng.standard_normal(a.shape)), dtype)
                for a in (case.q, case.k_pool, case.v_pool)
            )
            made.append((q, k, v, case.page_table, case.lengths))
        return made

    return make


def table(config) -> jax.Array:
    return jnp.asarray(retained_counts(config.key_retention, 64))


def begin(slots=SLOTS, lengths=LENGTHS):
    """A store, a lease of ROWS rows for each request, and the plan of the rows that live."""
    store = rs.create(MODEL, slots=slots, capacity=CAPACITY)
    store, lease = rs.reserve(store, jnp.full((BATCH,), ROWS, jnp.int32), ROWS)
    rows, refused = rs.plan(store, lease, jnp.asarray(lengths) > 0)
    assert not refused.any()
    return store, lease, rows


def row_inputs(inputs, b, i):
    """Scores [heads, N] and values [heads, N, d] of one row over its own keys, float32."""
    q, k_pool, v_pool, pages, lengths = inputs
    token = np.arange(int(lengths[b, i]))
    page = np.asarray(pages)[b, token // 16]
    group = HEADS // KV_HEADS

    def keys_of(pool):
        rows = np.asarray(pool.astype(jnp.float32))[page, :, token % 16]  # [N, kv_heads, d]
        return np.repeat(rows.swapaxes(0, 1), group, axis=0)

    k, v = keys_of(k_pool), keys_of(v_pool)
    q = np.asarray(q.astype(jnp.float32))[b, i]
    return jnp.asarray(np.einsum("hd,hnd->hn", q, k) / np.sqrt(DIM)), jnp.asarray(v)


def expected_row(loops, o_ref, k: int, config: SparseDecodeConfig):
    """Outputs of loops 2 and 3 of one row by the formulas, all heads."""

    def one_head(loops, o_ref):
        scores, values = loops[0]
        reference = arithmetic.capture(scores, values, k)._replace(o_ref=o_ref)
        outputs = []
        for scores, values in loops[1:]:
            kept = reference.positions
            out = arithmetic.consume(
                scores[kept],
                values[kept],
                reference,
                scaling=config.mass_scaling,
                target_mass=jax.nn.softmax(scores)[kept].sum(),
            )
            outputs.append(out)
            if config.variant == "adjacent":
                reference = arithmetic.capture(scores, values, k)._replace(o_ref=out)
        return jnp.stack(outputs)

    return jax.vmap(one_head, out_axes=1)(loops, o_ref)


def expected_outputs(loops, config, out_1):
    """Outputs of loops 2 and 3, with loop 1's output as it went on."""
    outputs = np.zeros((2, BATCH, ROWS, HEADS, DIM), np.float32)
    for b, i in np.ndindex(BATCH, ROWS):
        if length := LENGTHS[b][i]:
            k = retained_count(config.key_retention, length)
            rows = [row_inputs(inputs, b, i) for inputs in loops]
            o_ref = jnp.asarray(out_1[b, i], jnp.float32)
            outputs[:, b, i] = expected_row(rows, o_ref, k=k, config=config)
    return outputs


@pytest.mark.parametrize("scaling", ["cached", "none", "oracle"])
def test_joint_capture_and_both_consumptions(loops, scaling):
    config = SparseDecodeConfig(key_retention=0.3, mass_scaling=scaling)
    inputs = loops()
    store, lease, rows = begin()
    out, store, refused = capture(store, rows, 0, *inputs[0], table(config), config=config)
    assert not refused.any()
    np.testing.assert_array_equal(out, dense_op(*inputs[0]))
    expected = expected_outputs(inputs, config, out)
    for t in (0, 1):
        got, refused = consume(store, rows, 0, *inputs[t + 1], config=config)
        assert not refused.any()
        np.testing.assert_array_equal(got[0, 0], 0)  # the dead row
        np.testing.assert_allclose(got, expected[t], atol=1e-5)
    mass = rs.retained_mass(store, lease)
    assert int(mass.rows) == 5
    assert (np.asarray(mass.least) > 0).all()
    assert (np.asarray(mass.least) * 5 <= np.asarray(mass.total)).all()
    assert (np.asarray(mass.total) < 5).all()


@pytest.mark.parametrize("scaling", ["cached", "none"])
def test_adjacent_captures_the_corrected_loop_again(loops, scaling):
    config = SparseDecodeConfig(key_retention=0.3, variant="adjacent", mass_scaling=scaling)
    inputs = loops()
    store, _, rows = begin()
    out, store, _ = capture(store, rows, 0, *inputs[0], table(config), config=config)
    expected = expected_outputs(inputs, config, out)
    second, store, refused = recapture(store, rows, 0, *inputs[1], table(config), config=config)
    assert not refused.any()
    third, _ = consume(store, rows, 0, *inputs[2], config=config)
    np.testing.assert_allclose(second, expected[0], atol=1e-5)
    np.testing.assert_allclose(third, expected[1], atol=2e-5)


def test_retention_near_1_is_dense_attention(loops):
    config = SparseDecodeConfig(key_retention=0.9999)  # every key at these lengths
    inputs = loops(lengths=[[1, 2], [23, 24], [7, 0]])
    store, _, rows = begin(lengths=[[1, 2], [23, 24], [7, 0]])
    _, store, _ = capture(store, rows, 0, *inputs[0], table(config), config=config)
    out, _ = consume(store, rows, 0, *inputs[1], config=config)
    np.testing.assert_allclose(out, dense_op(*inputs[1]), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_captured_output_goes_on_as_it_was(loops, dtype):
    """Bit for bit the dense op's, with the store's update in the same program."""
    config = SparseDecodeConfig(key_retention=0.1)
    inputs = loops(dtype)[0]

    @jax.jit
    def both(store, rows, q, k_pool, v_pool, pages, lengths):
        paged = (q, k_pool, v_pool, pages, lengths)
        out, store, _ = attend_rows(
            "capture", store, rows, 0, q, k_pool, v_pool, pages, lengths, table(config),
            config=config, implementation="xla", dense_implementation="xla",
        )  # fmt: skip
        return out, paged_attention(*paged, implementation="xla"), store

    store, _, rows = begin()
    out, dense, store = both(store, rows, *inputs)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, dense)
    np.testing.assert_array_equal(out, dense_op(*inputs))
    # The reference is made of the output as rounded, which here is far from unrounded.
    counts = jnp.where(rows.live, table(config)[inputs[-1]], 0)
    kept = capture_op(*inputs, counts).kept
    reference, _ = rs.consume(store, rows, 0)
    expected = np.where(rows.live[..., None, None], out.astype(jnp.float32) - kept, 0)
    base = np.where(rows.live[..., None, None], reference.base, 0)
    np.testing.assert_allclose(base, expected, atol=1e-6)


def test_rows_captured_one_by_one_are_consumed_together(loops):
    """As a draft captures and a verification consumes."""
    config = SparseDecodeConfig(key_retention=0.3)
    inputs = loops()
    store, _, rows = begin()
    for i in range(ROWS):
        q, k, v, pages, lengths = inputs[0]
        one = (q[:, i : i + 1], k, v, pages, lengths[:, i : i + 1])
        _, store, refused = capture(store, rows.row(i), 0, *one, table(config), config=config)
        assert not refused.any()
    together, _ = consume(store, rows, 0, *inputs[1], config=config)
    store, _, rows = begin()
    _, store, _ = capture(store, rows, 0, *inputs[0], table(config), config=config)
    expected, _ = consume(store, rows, 0, *inputs[1], config=config)
    np.testing.assert_allclose(together, expected, atol=1e-6)


@pytest.mark.parametrize("variant", ["joint", "adjacent"])
def test_refused_rows_give_zeros_and_leave_the_others_alone(loops, variant):
    config = SparseDecodeConfig(key_retention=0.3, variant=variant)
    inputs = loops()
    store, _, rows = begin()
    stale = dataclasses.replace(rows, versions=rows.versions.at[1, 0].add(1))
    good, full, _ = capture(store, rows, 0, *inputs[0], table(config), config=config)
    out, part, refused = capture(store, stale, 0, *inputs[0], table(config), config=config)
    lost = np.zeros((BATCH, ROWS), bool)
    lost[1, 0] = True
    np.testing.assert_array_equal(refused, lost)
    np.testing.assert_array_equal(out, np.where(lost[..., None, None], 0, good))
    # Nothing was captured for it, so the true owner is refused too.
    out, refused = consume(part, rows, 0, *inputs[1], config=config)
    np.testing.assert_array_equal(refused, lost)
    good, _ = consume(full, rows, 0, *inputs[1], config=config)
    np.testing.assert_array_equal(out, np.where(lost[..., None, None], 0, good))
    if variant == "adjacent":
        for holder, plan in ((full, stale), (part, rows)):
            out, after, refused = recapture(
                holder, plan, 0, *inputs[1], table(config), config=config
            )
            np.testing.assert_array_equal(refused, lost)
            np.testing.assert_array_equal(out[1, 0], 0)
            slot = int(rows.slots[1, 0])
            np.testing.assert_array_equal(after.base[0][slot], holder.base[0][slot])


def test_a_slot_used_before_gives_the_same_bits(loops):
    """Longer rows and a poisoned index before; nothing of them shows."""
    config = SparseDecodeConfig(key_retention=0.3)
    inputs = loops()
    store, _, rows = begin()
    _, store, _ = capture(store, rows, 0, *inputs[0], table(config), config=config)
    fresh, _ = consume(store, rows, 0, *inputs[1], config=config)

    used, lease, _ = begin()
    used, _ = rs.release(used, lease)
    used = dataclasses.replace(
        used,
        count=jnp.full_like(used.count, CAPACITY),
        positions=tuple(jnp.full_like(p, 65535) for p in used.positions),
        mass=tuple(jnp.full_like(m, jnp.nan) for m in used.mass),
        base=tuple(jnp.full_like(b, jnp.nan) for b in used.base),
    )
    used, lease = rs.reserve(used, jnp.full((BATCH,), ROWS, jnp.int32), ROWS)
    rows, _ = rs.plan(used, lease, jnp.asarray(LENGTHS) > 0)
    _, used, _ = capture(used, rows, 0, *inputs[0], table(config), config=config)
    # The op writes whole rows of positions, so poison the tails again.
    tail = [np.array(p) for p in used.positions]
    for p in tail:
        for slot, count in enumerate(np.asarray(used.count)):
            p[slot, :, count:] = 65535
    used = dataclasses.replace(used, positions=tuple(map(jnp.asarray, tail)))
    again, refused = consume(used, rows, 0, *inputs[1], config=config)
    assert not refused.any()
    np.testing.assert_array_equal(again, fresh)


def test_sinks_and_recent_keys_are_kept(loops):
    config = SparseDecodeConfig(key_retention=0.2, sink_keys=1, recent_keys=2)
    store, _, rows = begin()
    _, store, _ = capture(store, rows, 0, *loops()[0], table(config), config=config)
    reference, _ = rs.consume(store, rows, 0)
    positions = np.asarray(reference.positions)[2, 0, :, :8]  # k = 8 of 40
    assert (positions[:, 0] == 0).all()
    assert (positions[:, -2:] == [38, 39]).all()


def test_the_true_mass_of_a_selection(loops):
    q, k_pool, _, pages, lengths = inputs = loops()[1]
    rng = np.random.default_rng(3)
    counts = np.minimum(np.asarray(lengths), 3)
    positions = np.full((BATCH, ROWS, HEADS, CAPACITY), 65535, np.uint16)
    expected = np.zeros((BATCH, ROWS, HEADS))
    for b, i, h in np.ndindex(BATCH, ROWS, HEADS):
        kept = rng.choice(max(LENGTHS[b][i], 1), counts[b, i], replace=False)
        positions[b, i, h, : len(kept)] = np.sort(kept)
        if len(kept):
            p = np.exp(np.asarray(row_inputs(inputs, b, i)[0])[h])
            expected[b, i, h] = p[kept].sum() / p.sum()
    mass = selection_mass(
        q, k_pool, pages, lengths, jnp.asarray(positions), jnp.asarray(counts)
    )
    np.testing.assert_allclose(mass, expected, atol=1e-6)


def test_modes_choose_what_a_layer_does(loops):
    config = SparseDecodeConfig(key_retention=0.3, variant="adjacent")
    inputs = loops()
    store, _, rows = begin()
    attend = jitted(attend_rows, "mode")
    modes = config.modes(4)[1:]
    one = many = store
    for mode, call, paged in zip(modes, (capture, recapture, None), inputs, strict=True):
        got, many, refused = attend(mode, many, rows, 0, *paged, table(config), config=config)
        assert not refused.any()
        if call is None:
            expected, _ = consume(one, rows, 0, *paged, config=config)
        else:
            expected, one, _ = call(one, rows, 0, *paged, table(config), config=config)
        np.testing.assert_array_equal(got, expected)
    jax.tree.map(np.testing.assert_array_equal, one, many)
    with pytest.raises(ValueError, match=r"mode must be 'capture', .* got 'dense'"):
        attend("dense", store, rows, 0, *inputs[0], table(config), config=config)
