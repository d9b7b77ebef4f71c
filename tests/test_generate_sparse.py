"""Sparse decode attention in `generate`: the golden runs, inside and out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.decoding import references
from sparse_loop_jax.decoding.loops import Rows, run_loops
from sparse_loop_jax.kernels import paged_attention, prefill_attention
from sparse_loop_jax.kernels.capture_attention import capture_attention, capture_into
from sparse_loop_jax.kernels.sparse_attention import sparse_attention
from sparse_loop_jax.sparse import store as reference_store

OTHER_OPS = (prefill_attention, capture_attention, capture_into, sparse_attention)
RETENTIONS = (0.02, 0.1, 0.25, 0.5)


def _config(retention, **changes):
    return slj.SparseDecodeConfig(key_retention=retention, **changes)


def _start(gold, retention, **options):
    return slj.start(
        gold.model(),
        gold.prompts,
        max_new_tokens=32,
        eos_token_id=[],
        sparse=_config(retention),
        **options,
    )


@pytest.mark.parametrize("retention", RETENTIONS)
def test_greedy_tokens_equal_the_golden_ones(gold, retention):
    out = slj.generate(
        gold.model(),
        gold.prompts,
        max_new_tokens=32,
        eos_token_id=[],
        sparse=_config(retention),
    )
    want = gold.sparse(retention)
    assert out.token_ids == [want["p0_tokens"].tolist(), want["p1_tokens"].tolist()]
    # 31 decoded rows of each prompt: captured once, consumed twice, in each layer.
    layers = gold.config.num_hidden_layers
    assert out.stats.captured_rows == 2 * 31 * layers
    assert out.stats.consumed_rows == 2 * 31 * layers * 2
    lengths = [len(p) + 1 + s for p in gold.prompts for s in range(31)]
    kept = np.concatenate([want["p0_k"], want["p1_k"]])
    assert out.stats.keys_dense == 4 * sum(lengths)
    assert out.stats.keys_read == 2 * sum(lengths) + 2 * kept.sum()
    assert out.stats.reference_store_bytes > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_retention_one_is_the_dense_path(load_gold, dtype, compile_counter):
    gold = load_gold("mha")
    options = {"max_new_tokens": 32, "eos_token_id": []}
    dense = slj.generate(gold.model(dtype), gold.prompts, **options)
    with compile_counter() as compiled:
        out = slj.generate(gold.model(dtype), gold.prompts, sparse=_config(1.0), **options)
    assert out.token_ids == dense.token_ids
    assert compiled.count == 0, compiled  # not a program like it: the same one
    assert out.stats.reference_store_bytes == 0
    assert out.stats.captured_rows == out.stats.consumed_rows == 0


def test_another_retention_of_the_bucket_compiles_nothing(load_gold, compile_counter):
    gold = load_gold("mha")
    options = {"max_new_tokens": 32, "eos_token_id": []}
    slj.generate(gold.model(), gold.prompts, sparse=_config(0.4), **options)
    with compile_counter() as compiled:
        out = slj.generate(gold.model(), gold.prompts, sparse=_config(0.5), **options)
    assert compiled.count == 0, compiled
    assert out.token_ids[1] == gold.sparse(0.5)["p1_tokens"].tolist()


@pytest.mark.parametrize("retention", RETENTIONS)
def test_each_step_has_the_golden_logits_and_references(gold, retention):
    want = gold.sparse(retention)
    params, state, _ = _start(gold, retention)
    lease = slj.no_lease(state)
    for step in range(4):
        state, output = slj.decode_step(params, state, lease)
        lease = output.lease
        slots = np.asarray(lease.slots)[:, 0]
        for row, name in enumerate(("p0", "p1")):
            np.testing.assert_allclose(
                output.logits[row, 0], want[f"{name}_logits"][step + 1], atol=1e-3
            )
            at = f"{name}_s{step}_"
            kept = int(state.store.count[slots[row]])
            assert kept == want[f"{name}_k"][step]
            for layer in range(gold.config.num_hidden_layers):
                positions = state.store.positions[layer][slots[row], :, :kept]
                np.testing.assert_array_equal(positions, want[f"{at}sel"][layer])
                np.testing.assert_allclose(
                    state.store.mass[layer][slots[row]], want[f"{at}mass"][layer], atol=1e-4
                )
                np.testing.assert_allclose(
                    state.store.base[layer][slots[row]],
                    want[f"{at}o_ref"][layer] - want[f"{at}c_ref"][layer],
                    atol=1e-4,
                )


@pytest.mark.parametrize("retention", RETENTIONS)
def test_each_loop_has_the_golden_state(gold, retention):
    want = gold.sparse(retention)
    params, state, _ = _start(gold, retention)
    round_ = references.open_round(state, slj.no_lease(state), jnp.ones((2,), jnp.int32))
    hidden, cache, sparse = params.embed[state.token][:, None], state.cache, round_.sparse
    rows = Rows(state.position[:, None], jnp.ones((2, 1), bool))
    run = jax.jit(run_loops, static_argnames=("spec", "depths"))
    for loop in range(4):
        depths = range(loop, loop + 1)
        done = run(params, state.spec, hidden, rows, cache, depths, sparse=sparse)
        hidden, cache, sparse = done.hidden, done.cache, done.sparse
        for row, name in enumerate(("p0", "p1")):
            np.testing.assert_allclose(
                hidden[row, 0], want[f"{name}_hidden"][0, loop], atol=1e-4
            )


def test_dead_requests_capture_nothing(load_gold):
    gold = load_gold("mha")
    params, state, _ = slj.start(
        gold.model(),
        [*gold.prompts, [5]],
        max_new_tokens=[8, 8, 1],
        eos_token_id=[],
        sparse=_config(0.1),
    )
    assert state.live.tolist() == [True, True, False, False]
    before = np.asarray(state.store.positions[0])
    state, output = slj.decode_step(params, state, slj.no_lease(state))
    assert int(state.store.held.sum()) == 2
    assert int(output.counters.sparse.captured) == 2 * gold.config.num_hidden_layers
    dead = [s for s in range(state.store.slots) if s not in np.asarray(output.lease.slots)]
    np.testing.assert_array_equal(np.asarray(state.store.positions[0])[dead], before[dead])


def test_a_round_without_slots_does_nothing_and_says_so(load_gold):
    gold = load_gold("mha")
    params, state, _ = _start(gold, 0.1)
    token, position = state.token.tolist(), state.position.tolist()
    state, first = slj.decode_step(params, state, slj.no_lease(state))
    token, position = state.token.tolist(), state.position.tolist()
    # The first round's lease is not retired, and the store has slots for one round.
    state, output = slj.decode_step(params, state, slj.no_lease(state))
    assert output.count.tolist() == [0, 0]
    assert int(output.counters.refused) == 2
    assert (state.token.tolist(), state.position.tolist()) == (token, position)
    with pytest.raises(slj.StaleLeaseError, match="rounds: 2"):
        reference_store.check(rounds=output.counters.refused)
    # With the lease back it goes on as if nothing had been.
    state, output = slj.decode_step(params, state, first.lease)
    assert output.tokens[:, 0].tolist() == [
        int(gold.sparse(0.1)[f"{p}_tokens"][2]) for p in ("p0", "p1")
    ]


def test_capturing_changes_nothing_of_what_goes_on(load_gold):
    gold = load_gold("mha")
    model = gold.model("bfloat16")
    options = {"max_new_tokens": 4, "eos_token_id": []}
    params, dense, _ = slj.start(model, gold.prompts, **options)
    _, sparse, _ = slj.start(model, gold.prompts, sparse=_config(0.1), **options)
    rows = Rows(dense.position[:, None], jnp.ones((2, 1), bool))
    run = jax.jit(run_loops, static_argnames=("spec", "depths"))
    embedded = params.embed[dense.token][:, None]
    first = run(params, dense.spec, embedded, rows, dense.cache, range(1))
    round_ = references.open_round(sparse, slj.no_lease(sparse), jnp.ones((2,), jnp.int32))
    second = (first.hidden, rows, first.cache, range(1, 2))
    plain = run(params, dense.spec, *second)
    captured = run(params, sparse.spec, *second, sparse=round_.sparse)
    assert int(captured.sparse.captured) > 0
    np.testing.assert_array_equal(
        np.asarray(captured.hidden, np.float32), np.asarray(plain.hidden, np.float32)
    )


def test_a_capacity_below_the_longest_context_is_refused(load_gold, compile_counter):
    model = load_gold("mha").model()
    with compile_counter() as compiled, pytest.raises(ValueError, match="capacity 4 is below"):
        slj.generate(model, [[1] * 100], max_new_tokens=9, sparse=_config(0.1, capacity=4))
    assert compiled.count == 0
    slj.generate(model, [[1] * 20], max_new_tokens=9, sparse=_config(0.1, capacity=4))


def test_loops_that_the_model_lacks_are_refused(load_gold):
    model = load_gold("mha").model()
    with pytest.raises(ValueError, match="more than the model's 4 loops"):
        slj.generate(model, [[1]], sparse=_config(0.1, capture_loop=3))


@pytest.mark.parametrize(
    "config",
    [
        _config(0.25, variant="adjacent"),
        _config(0.25, mass_scaling="none"),
        _config(0.25, mass_scaling="oracle"),
        _config(0.25, sink_keys=1, recent_keys=2),
        _config(0.25, consume_loops=(3,)),
    ],
)
def test_variants_run_and_differ_from_the_method(load_gold, config):
    gold = load_gold("mha")
    results = []
    for sparse in (_config(0.25), config):
        params, state, _ = slj.start(
            gold.model(), gold.prompts, max_new_tokens=9, eos_token_id=[], sparse=sparse
        )
        _, output = slj.decode_step(params, state, slj.no_lease(state))
        assert int(output.counters.refused) == 0
        results.append(np.asarray(output.logits))
    assert np.isfinite(results[1]).all()
    assert np.abs(results[0] - results[1]).max() > 1e-3


def test_the_oracle_counts_as_reading_every_key(load_gold):
    gold = load_gold("mha")
    config = _config(0.25, mass_scaling="oracle")
    params, state, _ = slj.start(
        gold.model(), gold.prompts, max_new_tokens=9, eos_token_id=[], sparse=config
    )
    _, output = slj.decode_step(params, state, slj.no_lease(state))
    counted = output.counters.sparse
    assert int(counted.keys_read) == int(counted.keys_dense) == 4 * _keys_seen(gold)


def _keys_seen(gold) -> int:
    """Keys that the first decoded rows of both prompts see."""
    return sum(len(prompt) + 1 for prompt in gold.prompts)


@pytest.mark.parametrize("variant", ["joint", "adjacent"])
def test_every_variant_is_dense_attention_when_all_keys_are_kept(
    load_gold, variant, monkeypatch
):
    gold = load_gold("mha")
    # Keep every key without taking the dense path: the correction has to vanish by itself.
    monkeypatch.setattr(
        "sparse_loop_jax.generation.setup.retained_counts",
        lambda retention, span: np.arange(span + 1, dtype=np.int32),
    )
    params, state, _ = slj.start(
        gold.model(),
        gold.prompts,
        max_new_tokens=9,
        eos_token_id=[],
        sparse=_config(0.5, variant=variant, capacity=64),
    )
    _, output = slj.decode_step(params, state, slj.no_lease(state))
    for row, name in enumerate(("p0", "p1")):
        np.testing.assert_allclose(
            output.logits[row, 0], gold.dense[f"{name}_gen_logits"][1], atol=1e-3
        )


def test_the_named_implementation_is_the_one_that_runs(load_gold, monkeypatch):
    gold, calls = load_gold("mha"), []

    def counting(op):
        def count(*args, **kwargs):
            calls.append((op.name, args[0].shape[1]))
            return op.get("xla")(*args, **kwargs)

        return count

    for op in OTHER_OPS:
        monkeypatch.setitem(op.implementations, "counting", op.get("xla"))
    for op in (paged_attention, prefill_attention):
        monkeypatch.setitem(op.implementations, "counting", counting(op))
    out = slj.generate(
        gold.model(), [[1, 2]], max_new_tokens=3, sparse=_config(0.3), implementation="counting"
    )
    # Prompts, in chunks of 32 at least, have an op of their own.
    assert {name for name, rows in calls if rows == 1} == {"paged_attention"}
    assert {name for name, rows in calls if rows > 1} == {"prefill_attention"}
    assert out.stats.implementations["prefill_attention"] == "counting"
