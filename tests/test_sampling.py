"""Filters and draws, one distribution at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.decoding.sampling import choose_tokens, filtered_logits
from sparse_loop_jax.decoding.state import RequestParams

LOGITS = jnp.log(jnp.asarray([0.4, 0.3, 0.2, 0.1], jnp.float32))


def _filtered(logits, temperature=1.0, top_k=4, top_p=1.0):
    logits = filtered_logits(jnp.asarray(logits), temperature, top_k, top_p)
    return np.asarray(jax.nn.softmax(logits))


def test_no_filter_is_the_softmax():
    np.testing.assert_allclose(_filtered(LOGITS), [0.4, 0.3, 0.2, 0.1], rtol=1e-6)


def test_temperature_divides_the_logits():
    want = np.asarray([0.4, 0.3, 0.2, 0.1]) ** 2
    np.testing.assert_allclose(_filtered(LOGITS, temperature=0.5), want / want.sum(), rtol=1e-5)


def test_temperature_zero_is_the_first_argmax():
    np.testing.assert_array_equal(
        _filtered([1.0, 3.0, 3.0, 2.0], temperature=0.0), [0, 1, 0, 0]
    )


def test_top_k_keeps_ties_at_the_threshold():
    np.testing.assert_allclose(_filtered(LOGITS, top_k=2), [4 / 7, 3 / 7, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(
        _filtered([1.0, 0.0, 1.0, 1.0], top_k=2), [1 / 3, 0, 1 / 3, 1 / 3]
    )


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4), (1.0, 4)],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    assert (_filtered(LOGITS, top_p=top_p) > 0).sum() == kept


def test_top_k_comes_before_top_p():
    # Of the renormalised [4/7, 3/7], the first alone reaches a half.
    np.testing.assert_allclose(_filtered(LOGITS, top_k=2, top_p=0.5), [1, 0, 0, 0])


@pytest.fixture(scope="module")
def vocabulary():
    """Logits as wide as Ouro's, over which float32 sums round visibly: `[30, vocab]`."""
    return 4 * jax.random.normal(jax.random.key(0), (30, 49152))


def test_a_top_p_of_one_keeps_every_token(vocabulary):
    assert np.isfinite(filtered_logits(vocabulary[0], 1.0, 49152, 1.0)).all()


def test_top_k_holds_where_the_kept_probabilities_do_not_round_to_one(vocabulary):
    kept = jax.vmap(lambda logits: filtered_logits(logits, 1.0, 50, 1.0))(vocabulary)
    shifted = np.asarray(vocabulary - vocabulary.max(axis=1, keepdims=True))
    np.testing.assert_array_equal(np.isfinite(kept), shifted >= np.sort(shifted)[:, -50:-49])


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-45])
def test_the_coldest_draw_is_the_argmax(temperature):
    # Both of the largest overflow when they are divided first; -inf stays what it is.
    logits = [90.0, 100.0, -jnp.inf, 99.0, -3.0]
    np.testing.assert_array_equal(_filtered(logits, temperature, 5), [0, 1, 0, 0, 0])


def test_minus_infinity_is_never_drawn():
    assert _filtered([0.0, -jnp.inf, 1.0, -jnp.inf])[[1, 3]].sum() == 0


def _request(batch, **changes):
    fields = {
        "temperature": jnp.ones(batch, jnp.float32),
        "top_k": jnp.full(batch, 4, jnp.int32),
        "top_p": jnp.ones(batch, jnp.float32),
        "exit_threshold": jnp.ones(batch, jnp.float32),
        "min_loops": jnp.ones(batch, jnp.int32),
        "max_loops": jnp.ones(batch, jnp.int32),
        "stop_ids": jnp.full((batch, 1), -1, jnp.int32),
        "key": jax.random.split(jax.random.key(0), batch),
    }
    return RequestParams(**{**fields, **changes})


def test_draws_follow_the_distribution():
    batch = 20_000
    logits = jnp.broadcast_to(LOGITS[None], (batch, 4))
    tokens = choose_tokens(logits, _request(batch), jnp.zeros(batch, jnp.int32), sampled=True)
    counts = np.bincount(tokens, minlength=4)
    expected = batch * np.asarray([0.4, 0.3, 0.2, 0.1])
    # Chi-square with three degrees of freedom: above 16.27 once in a thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 16.27


def test_a_place_has_its_own_draw():
    logits = jnp.zeros((1, 4), jnp.float32)
    draws = [
        int(choose_tokens(logits, _request(1), jnp.asarray([p], jnp.int32), sampled=True)[0])
        for p in range(30)
    ]
    assert len(set(draws)) == 4


def test_greedy_and_sampled_requests_share_a_batch():
    logits = jnp.broadcast_to(LOGITS[None], (64, 4))
    temperature = jnp.asarray([0.0, 5.0] * 32, jnp.float32)
    tokens = choose_tokens(
        logits, _request(64, temperature=temperature), jnp.zeros(64, jnp.int32), sampled=True
    )
    assert set(np.asarray(tokens[0::2]).tolist()) == {0}
    assert len(set(np.asarray(tokens[1::2]).tolist())) > 1
