"""Teacher-forced decoding: dense equals `forward`, sparse equals the golden runs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.evaluate import Forced, force

SPARSE = slj.SparseDecodeConfig(key_retention=0.1)


def _log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _ids(count):
    return np.random.default_rng(0).integers(1, 128, count).astype(np.int32)


@pytest.fixture(scope="module")
def sequences(load_gold):
    """Golden prompts with their golden sparse tokens, and one decoded from its start on.

    They are ragged: 31, 20 and 25 rows.
    """
    gold = load_gold("gqa")
    want = gold.sparse(SPARSE.key_retention)
    made = []
    for prompt, tokens in (("p0", 32), ("p1", 21)):
        start = gold.dense[f"{prompt}_input_ids"]
        ids = np.concatenate([start, want[f"{prompt}_tokens"][:tokens]])
        made.append(Forced(ids.astype(np.int32), len(start)))
    return [*made, Forced(_ids(26), 0)]


@pytest.fixture(scope="module")
def model(load_gold):
    return load_gold("gqa").model()


@pytest.fixture(scope="module")
def dense(model, sequences):
    return force(model, sequences, keep_logits=True)


@pytest.fixture(scope="module")
def sparse(model, sequences, dense):
    return force(model, sequences, sparse=SPARSE, reference=dense.logits, keep_logits=True)


def test_dense_perplexity_is_that_of_forward(model, sequences, dense):
    # Padded on the right to one shape, which causal attention does not see.
    longest = max(len(s.ids) for s in sequences)
    padded = np.stack([np.pad(s.ids, (0, longest - len(s.ids))) for s in sequences])
    logp = _log_softmax(slj.forward(model, padded).loop_logits())
    for column, s in enumerate(sequences):
        rows = np.arange(s.prefix, len(s.ids) - 1)
        want = -logp[column, rows, s.ids[rows + 1]]
        got = dense.scores.nll[: s.rows, column]
        np.testing.assert_allclose(got, want, atol=3e-5)
        perplexity = np.exp(got.mean(dtype=np.float64))
        assert perplexity == pytest.approx(np.exp(want.mean()), rel=1e-5)
        # The comparison would object to a row's neighbour.
        assert np.abs(got[:-1] - want[1:]).max() > 0.1
        assert dense.live[:, column].tolist() == [t < s.rows for t in range(len(dense.live))]
        lengths = dense.lengths[: s.rows, column]
        assert lengths.tolist() == list(range(s.prefix + 1, len(s.ids)))


def test_scores_are_those_of_the_logits(dense):
    logits = np.asarray(dense.logits)[dense.live]
    ordered = np.sort(logits)
    margin = ordered[:, -1] - ordered[:, -2]
    np.testing.assert_allclose(dense.scores.margin[dense.live], margin, atol=1e-6)
    np.testing.assert_array_equal(dense.scores.predicted[dense.live], logits.argmax(axis=-1))
    assert not dense.scores.kl.any()


def test_neighbours_in_the_batch_change_nothing(model, sequences, dense, compile_counter):
    with compile_counter() as compiled:
        turned = force(model, [*sequences[1:], sequences[0]], keep_logits=True)
    assert compiled.count == 0, compiled
    for column, s in enumerate(sequences):
        rows = slice(0, s.rows)
        there = turned.scores.nll[rows, (column - 1) % len(sequences)]
        np.testing.assert_allclose(there, dense.scores.nll[rows, column], atol=1e-5)


def test_retention_one_is_the_dense_run(model, sequences, dense, compile_counter):
    config = slj.SparseDecodeConfig(key_retention=1.0)
    with compile_counter() as compiled:
        again = force(model, sequences, sparse=config, keep_logits=True)
    assert compiled.count == 0, compiled
    np.testing.assert_array_equal(again.scores.nll, dense.scores.nll)
    assert again.counters.sparse is None


def test_golden_tokens_are_what_forced_rows_predict(load_gold, sequences, sparse):
    """Sparse decoding forced through its own greedy tokens goes on predicting them."""
    gold = load_gold("gqa")
    want = gold.sparse(SPARSE.key_retention)
    for column, prompt in enumerate(("p0", "p1")):
        count = sequences[column].rows
        tokens = want[f"{prompt}_tokens"][1 : count + 1]
        scores = [x[:count, column] for x in (sparse.scores.predicted, sparse.scores.margin)]
        np.testing.assert_array_equal(scores[0], tokens)
        np.testing.assert_allclose(
            scores[1], want[f"{prompt}_margin"][1 : count + 1], atol=2e-3
        )
        logp = _log_softmax(want[f"{prompt}_logits"][1 : count + 1])
        np.testing.assert_allclose(
            sparse.scores.nll[:count, column], -logp[np.arange(count), tokens], atol=2e-3
        )
    rows = sum(s.rows for s in sequences) * gold.config.num_hidden_layers
    assert int(sparse.counters.sparse.captured) == rows
    assert int(sparse.counters.sparse.consumed) == 2 * rows


def test_divergence_from_a_reference(dense, sparse):
    p, q = (_log_softmax(np.asarray(run.logits)[dense.live]) for run in (dense, sparse))
    got = sparse.scores.kl[dense.live]
    np.testing.assert_allclose(got, (np.exp(p) * (p - q)).sum(axis=-1), atol=1e-4)
    assert got.max() > 0.01
    # Not its reverse.
    assert np.abs(got - (np.exp(q) * (q - p)).sum(axis=-1)).max() > 1e-3


def test_the_device_is_read_once(model, sequences, dense, monkeypatch):
    reads, device_get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: reads.append(1) or device_get(x))
    force(model, sequences, keep_logits=True)
    assert len(reads) == 1


@pytest.mark.parametrize(("tokens", "prefix"), [(5, 4), (5, -1), (1, 0), (2, 1)])
def test_sequences_without_rows_are_refused(tokens, prefix):
    with pytest.raises(ValueError, match=f"a sequence of {tokens} tokens leaves no decoded"):
        Forced(_ids(tokens), prefix)


def test_a_sequence_beyond_the_context_is_refused(model, compile_counter):
    context = model.config.max_position_embeddings
    with (
        compile_counter() as compiled,
        pytest.raises(ValueError, match=f"sequence 1 feeds {context + 1} tokens, more than"),
    ):
        force(model, [Forced(_ids(20), 1), Forced(_ids(context + 2), context)])
    assert compiled.count == 0
