"""Sampled self-speculation end to end: its texts have the distribution of the model's own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import sparse_loop_jax as slj

VOCAB, TOKENS, PROMPT = 5, 4, [1, 2, 3]
REQUESTS, CALLS = 4096, 4


@pytest.fixture(scope="module")
def model():
    # Wide weights, so that drafts and targets are far from uniform and from each other.
    config = slj.OuroConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        total_ut_steps=3,
        initializer_range=0.4,
    )
    return slj.Ouro(config, rngs=0)


def _joint(model) -> np.ndarray:
    """Probability of each continuation of the prompt, `[VOCAB] * TOKENS`, float64."""
    texts = np.array(list(itertools.product(range(VOCAB), repeat=TOKENS)))
    ids = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], axis=1)
    logits = np.asarray(slj.forward(model, ids).logits[-1], np.float64)
    logits = logits[:, len(PROMPT) - 1 : -1]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    log_p = np.take_along_axis(log_p, texts[..., None], axis=-1)[..., 0]
    return np.exp(log_p.sum(-1)).reshape([VOCAB] * TOKENS)


def _excess(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square above its mean, in standard deviations.

    What is expected fewer than five times is counted together.
    """
    expected = counts.sum() * probabilities.ravel()
    rare = expected < 5
    seen, expected = (
        np.append(array[~rare], array[rare].sum()) for array in (counts.ravel(), expected)
    )
    freedom = len(expected) - 1
    assert freedom > 100
    chi_square = ((seen - expected) ** 2 / expected).sum()
    return float((chi_square - freedom) / np.sqrt(2 * freedom))


@pytest.fixture(scope="module")
def counts(model):
    counts = np.zeros([VOCAB] * TOKENS)
    for seed in range(CALLS):
        out = slj.generate(
            model,
            [PROMPT] * REQUESTS,
            max_new_tokens=TOKENS,
            eos_token_id=[],
            temperature=1.0,
            seed=seed,
            speculative=slj.SpeculativeConfig(2, 1),
        )
        np.add.at(counts, tuple(np.array(out.token_ids).T), 1)
        assert 0 < out.stats.accepted < out.stats.drafted  # both branches are taken
    return counts


def test_texts_have_the_joint_distribution_of_the_model(model, counts):
    joint = _joint(model)
    np.testing.assert_allclose(joint.sum(), 1.0, rtol=1e-5)
    excess = _excess(counts, joint / joint.sum())
    assert excess < 3.5


def test_a_distribution_of_no_context_would_be_refused(model, counts):
    """Each token alone may be right where the text is not."""
    joint = _joint(model)
    margins = [joint.sum(tuple(a for a in range(TOKENS) if a != t)) for t in range(TOKENS)]
    independent = np.einsum("a,b,c,d->abcd", *margins)
    excess = _excess(counts, independent / independent.sum())
    assert excess > 20
