"""The formulas for one row, against FlashLoop's own numbers and by hand."""

from __future__ import annotations

import doctest
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_loop_jax.sparse import arithmetic
from sparse_loop_jax.sparse.arithmetic import (
    RowReference,
    capture,
    consume,
    retained_count,
    retained_counts,
)

RETENTIONS = [0.01, 0.02, 0.05, 0.07, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0]
MASS_SCALED = ["b1_n13", "b1_n13_proj", "b2_n40", "b2_n40_proj", "b1_n1", "b1_n21_full"]


def test_the_examples_in_the_docstring():
    results = doctest.testmod(arithmetic)
    assert results.attempted > 5
    assert results.failed == 0


@pytest.mark.parametrize("retention", RETENTIONS)
def test_counts_are_those_of_python(retention):
    table = retained_counts(retention, 65536)
    assert table.dtype == np.int32
    assert table.shape == (65537,)
    python = [min(n, max(1, math.ceil(n * retention))) for n in range(65537)]
    np.testing.assert_array_equal(table, python)


@pytest.mark.parametrize(
    ("retention", "tokens", "count"),
    [(0.1, 10, 1), (0.1, 13, 2), (0.07, 100, 8), (0.07, 300, 22), (0.3, 50, 15)],
)
def test_counts_where_float32_or_exact_decimals_would_differ(retention, tokens, count):
    assert retained_count(retention, tokens) == count
    assert retained_counts(retention, tokens)[tokens] == count


def test_float32_would_get_some_counts_wrong():
    """Why k is tabulated: the same rule on a device differs."""
    tokens = np.arange(1, 65537, dtype=np.float32)
    wrong = np.ceil(tokens * np.float32(0.3)) != retained_counts(0.3, 65536)[1:]
    assert wrong.any()


def test_capture_and_consume_of_everything_is_dense_attention():
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal(9), rng.standard_normal((9, 4))
    old = capture(jnp.float32(scores), jnp.float32(values), 9)
    np.testing.assert_allclose(old.mass, 1.0, atol=1e-6)
    np.testing.assert_allclose(old.c_ref, old.o_ref, atol=1e-6)
    scores, values = jnp.float32(rng.standard_normal(9)), jnp.float32(values + 1)
    new = consume(scores, values, old)
    np.testing.assert_allclose(new, jax.nn.softmax(scores) @ values, atol=1e-5)


def test_ties_keep_the_lower_position():
    kept = capture(jnp.zeros(5), jnp.ones((5, 2)), 2)
    assert kept.positions.tolist() == [0, 1]


def test_scores_decide_where_probabilities_underflow():
    scores = jnp.float32(np.array([-300.0, -200.0, 0.0, -250.0]))
    assert np.asarray(jax.nn.softmax(scores))[[0, 1, 3]].tolist() == [0, 0, 0]
    assert capture(scores, jnp.ones((4, 2)), 2).positions.tolist() == [1, 2]


def corrected(gold_ops, case: str, scaling: str) -> np.ndarray:
    """Corrections of one case over batch and heads, [B, heads, d], before any projection."""
    x = {name.rsplit("/", 1)[1]: gold_ops[name] for name in gold_ops if f"/{case}/" in name}
    batch, heads, _, keys = x["source_logits"].shape
    out = np.zeros((batch, heads, x["source_values"].shape[-1]), np.float32)
    for b, h in np.ndindex(batch, heads):
        kept = np.flatnonzero(x["mask"][b, h, 0])
        p = jax.nn.softmax(jnp.asarray(x["source_logits"][b, h, 0]))
        # The package is handed a mass, which need not be that of these logits.
        mass = jnp.asarray(x["source_mass"][b, h, 0, 0])
        mean = p[kept] @ x["source_values"][b, h][kept] / p[kept].sum()
        zero = jnp.zeros_like(mean)
        reference = RowReference(jnp.asarray(kept), mass, zero, mass * mean)
        out[b, h] = consume(
            jnp.asarray(x["target_logits"][b, h, 0])[kept],
            jnp.asarray(x["target_values"][b, h])[kept],
            reference,
            scaling=scaling,
            target_mass=jnp.asarray(x["target_mass"][b, h, 0, 0]),
        )
    assert keys >= 1
    return out


@pytest.mark.parametrize("case", MASS_SCALED)
@pytest.mark.parametrize(
    ("scaling", "output"),
    [("cached", "out_cached"), ("none", "out_unscaled"), ("oracle", "out_oracle")],
)
def test_gold_mass_scalings(gold_ops, case, scaling, output):
    path = f"mass_scaled/{case}"
    change = corrected(gold_ops, case, scaling)
    source = gold_ops[f"{path}/source_output"]
    if f"{path}/output_weight" in gold_ops:  # the package's correction after o_proj
        weight = gold_ops[f"{path}/output_weight"]
        change = change.reshape(len(change), 1, -1) @ weight.T
    else:
        change = change[:, :, None]
    np.testing.assert_allclose(source + change, gold_ops[f"{path}/{output}"], atol=1e-5)


def test_all_gold_mass_scalings_are_used(gold_ops):
    cases = {name.split("/")[1] for name in gold_ops if name.startswith("mass_scaled/")}
    assert cases == set(MASS_SCALED)


@pytest.mark.parametrize("scaling", ["official", "oracle"])
def test_bad_scalings_are_refused(scaling):
    reference = RowReference(jnp.int32([0]), jnp.float32(1), jnp.zeros(2), jnp.zeros(2))
    with pytest.raises(ValueError, match=f"with a target_mass, got '{scaling}'"):
        consume(jnp.zeros(1), jnp.zeros((1, 2)), reference, scaling=scaling)
