"""A decoded row from inside, against the golden runs and against plain NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.evaluate import Forced, force, look_inside
from sparse_loop_jax.evaluate.inside import summary_step

RETENTION = 0.25


@pytest.fixture(scope="module")
def gold(load_gold):
    """The golden model whose query heads share K and V."""
    return load_gold("gqa")


def _start(gold, **options):
    return slj.start(
        gold.model(),
        gold.prompts,
        max_new_tokens=32,
        eos_token_id=[],
        **options,
    )


@pytest.fixture(scope="module")
def seen(gold):
    """The first decoded rows of both golden prompts: state after them, output, views."""
    sparse = slj.SparseDecodeConfig(key_retention=RETENTION)
    params, state, _ = _start(gold, sparse=sparse)
    position = np.asarray(state.position)
    state, output, views = look_inside(params, state, slj.no_lease(state))
    return params, state, output, views, position


def test_views_have_the_golden_references(gold, seen):
    want = gold.sparse(RETENTION)
    _, _, _, views, _ = seen
    assert sorted(views) == [1, 2, 3]
    for row, name in enumerate(("p0", "p1")):
        kept = want[f"{name}_k"][0]
        for layer in range(gold.config.num_hidden_layers):
            for view in (views[1][layer], views[2][layer], views[3][layer]):
                assert int(view.count[row, 0]) == kept
                np.testing.assert_array_equal(
                    view.positions[row, 0, :, :kept], want[f"{name}_s0_sel"][layer]
                )
            np.testing.assert_allclose(
                views[1][layer].mass[row, 0], want[f"{name}_s0_mass"][layer], atol=1e-4
            )


def test_views_have_the_golden_attention(gold, seen):
    """What went on, and what dense attention would have given, through the projection."""
    want = gold.sparse(RETENTION)
    params, _, _, views, _ = seen
    for row, name in enumerate(("p0", "p1")):
        for loop, layers in views.items():
            for layer, view in enumerate(layers):
                project = np.asarray(params.layers[layer].out).T
                for got, golden in ((view.out, "attn_out"), (view.dense, "attn_dense_out")):
                    np.testing.assert_allclose(
                        np.asarray(got[row, 0]).reshape(-1) @ project,
                        want[f"{name}_{golden}"][0, loop, layer],
                        atol=1e-4,
                    )


def test_numpy_gets_the_same_from_the_tensors(gold, seen):
    """Masses, dense and corrected outputs in float64, from the queries and the cache."""
    _, state, _, views, position = seen
    config = gold.config
    group = config.num_attention_heads // config.num_key_value_heads

    def attention(loop, layer, row, head):
        """Probabilities and values of the keys that a row sees."""
        pages = np.asarray(state.cache.page_table)[row, loop]
        pages = pages[pages < state.cache.num_pages]
        length = position[row] + 1

        def tokens(pools):
            pool = np.asarray(pools[layer], np.float64)[pages, head // group]
            return pool.reshape(-1, config.head_dim)[:length]

        q = np.asarray(views[loop][layer].q[row, 0, head], np.float64)
        scores = tokens(state.cache.keys) @ q / config.head_dim**0.5
        weights = np.exp(scores - scores.max())
        return weights, tokens(state.cache.values)

    checked = 0
    for row in range(2):
        kept = int(views[1][0].count[row, 0])
        assert kept == -(-(position[row] + 1) // 4)
        for layer in range(config.num_hidden_layers):
            for head in range(config.num_attention_heads):
                weights, values = attention(1, layer, row, head)
                p = weights / weights.sum()
                chosen = np.sort(np.argsort(-weights, kind="stable")[:kept])
                mass, o_ref = p[chosen].sum(), p @ values
                base = o_ref - p[chosen] @ values[chosen]
                for loop in (1, 2, 3):
                    weights, values = attention(loop, layer, row, head)
                    view = views[loop][layer]
                    mean = weights[chosen] @ values[chosen] / weights[chosen].sum()
                    corrected = o_ref if loop == 1 else base + mass * mean
                    for got, want in (
                        (view.mass, weights[chosen].sum() / weights.sum()),
                        (view.dense, weights @ values / weights.sum()),
                        (view.out, corrected),
                    ):
                        np.testing.assert_allclose(got[row, 0, head], want, atol=2e-5)
                        checked += 1
    assert checked == 2 * config.num_hidden_layers * config.num_attention_heads * 9


def test_kept_keys_lose_mass_in_later_loops(seen):
    """The drift is there to be measured: a later loop's own mass is another number."""
    _, _, _, views, _ = seen
    for layer, first in enumerate(views[1]):
        assert np.abs(np.asarray(first.mass - views[3][layer].mass)).max() > 1e-3


def test_it_decodes_what_decode_step_decodes(gold, seen):
    _, state, output, _, _ = seen
    sparse = slj.SparseDecodeConfig(key_retention=RETENTION)
    params, plain, _ = _start(gold, sparse=sparse)
    plain, wanted = slj.decode_step(params, plain, slj.no_lease(plain))
    np.testing.assert_allclose(output.logits, wanted.logits, atol=1e-4)
    assert output.tokens.tolist() == wanted.tokens.tolist()
    assert state.position.tolist() == plain.position.tolist()
    assert state.store.held.tolist() == plain.store.held.tolist()
    for name in ("captured", "consumed", "keys_read", "keys_dense"):
        ours, theirs = (getattr(o.counters.sparse, name) for o in (output, wanted))
        assert float(ours) == float(theirs) > 0


def test_the_summary_is_of_the_views(gold, seen):
    want = gold.sparse(RETENTION)
    sequences = []
    for name in ("p0", "p1"):
        start = gold.dense[f"{name}_input_ids"]
        ids = np.concatenate([start, want[f"{name}_tokens"]]).astype(np.int32)
        sequences.append(Forced(ids, len(start)))
    sparse = slj.SparseDecodeConfig(key_retention=RETENTION)
    run = force(gold.model(), sequences, sparse=sparse, step=summary_step)
    # The first row is the one that was seen: the first golden token was fed there too.
    _, _, _, views, _ = seen
    for loop, layers in views.items():
        summary = run.inside[loop]
        for layer, view in enumerate(layers):
            out, dense = (np.asarray(x[:, 0], np.float64) for x in (view.out, view.dense))
            for got, wanted in (
                (summary.mass, view.mass[:, 0]),
                (summary.error, ((out - dense) ** 2).sum(axis=-1)),
                (summary.size, (dense**2).sum(axis=-1)),
            ):
                np.testing.assert_allclose(got[0, layer], wanted, atol=1e-4)
    assert run.inside[1].error.max() < 1e-9  # the capture is dense attention
    assert run.inside[3].error[0].max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"sparse": None},
        {"sampled": True},
        {"sparse": None, "early_exit": True},
        {"speculative": slj.SpeculativeConfig(1, draft_loops=1)},
    ],
)
def test_only_plain_greedy_sparse_decoding_is_watched(seen, changes):
    params, state, output, _, _ = seen
    state = dataclasses.replace(state, spec=dataclasses.replace(state.spec, **changes))
    with pytest.raises(ValueError, match="only plain greedy sparse decoding can be watched"):
        look_inside(params, state, output.lease)
