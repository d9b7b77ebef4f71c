"""Divergence and acceptance against the golden runs and against rounds played by hand."""

from __future__ import annotations

import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.evaluate.continuations import (
    first_difference,
    measure_acceptance,
    measure_divergence,
)
from sparse_loop_jax.evaluate.progress import Steps

NEW = 32
OPTIONS = {"sparse": slj.SparseDecodeConfig(), "new_tokens": NEW, "implementation": None}


@pytest.fixture(scope="module")
def gold(load_gold):
    return load_gold("mha")


@pytest.fixture(scope="module")
def prompts(gold):
    return [gold.dense[f"{p}_input_ids"] for p in ("p0", "p1")]


def test_divergence_of_the_golden_runs(gold, prompts):
    retentions = (1.0, 0.25, 0.02)
    with Steps(0) as steps:
        rows = measure_divergence(gold.model(), prompts, retentions, steps=steps, **OPTIONS)
    margins = [gold.dense[f"{p}_gen_margin"] for p in ("p0", "p1")]
    for retention, row in zip(retentions, rows, strict=True):
        firsts, lost = [], []
        for i, p in enumerate(("p0", "p1")):
            dense = gold.dense[f"{p}_gen_tokens"]
            tokens = dense if retention == 1.0 else gold.sparse(retention)[f"{p}_tokens"]
            differs = np.flatnonzero(dense != tokens)
            firsts.append(int(differs[0]) if len(differs) else NEW)
            lost += [margins[i][differs[0]]] if len(differs) else []
        assert (row["retention"], row["prompts"], row["new tokens"]) == (retention, 2, NEW)
        assert row["equal"] == 2 - len(lost)
        assert (row["first difference"], row["earliest"]) == (np.median(firsts), min(firsts))
        if lost:
            assert row["margin there"] == pytest.approx(np.median(lost), abs=2e-3)
            assert row["largest margin"] == pytest.approx(max(lost), abs=2e-3)
        else:
            assert row["margin there"] is row["largest margin"] is None
        # The first token is the prefill's, and no decoded row's.
        want = np.median(np.concatenate([m[1:] for m in margins]))
        assert row["median margin"] == pytest.approx(want, abs=2e-3)
    assert rows[0]["equal"] == 2
    assert rows[2]["equal"] < 2


def test_the_first_difference_of_two_texts():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([4], [5]) == 0
    assert first_difference([1, 2], [1, 2, 3]) is None


def _play(gold, prompts, drafting, width):
    """Rounds by hand: which drafts of the loop `drafting - 1` equal the greedy tokens.

    Returns the drafted and accepted tokens at each place of a round.
    """
    drafted, accepted = np.zeros(width, int), np.zeros(width, int)
    for i, name in enumerate(("p0", "p1")):
        tokens = gold.dense[f"{name}_gen_tokens"].astype(np.int32)
        ids = np.concatenate([prompts[i], tokens])
        shallow = slj.forward(gold.model(), ids).loop_logits(drafting - 1)[0]
        guesses = np.asarray(shallow.argmax(axis=-1))
        done = 1  # the prefill's token
        while done < NEW:
            rows = min(width + 1, NEW - done)
            stands = 0
            for place in range(rows - 1):
                drafted[place] += 1
                # The row that holds token done - 1 + place guesses the one after it.
                at = len(prompts[i]) + done - 1 + place
                if stands == place and guesses[at] == tokens[done + place]:
                    stands += 1
                    accepted[place] += 1
            done += stands + 1
    return drafted, accepted


def test_acceptance_is_that_of_rounds_played_by_hand(gold, prompts):
    drafting = 3  # the loops that agree with the last one most often
    with Steps(0) as steps:
        (row,) = measure_acceptance(
            gold.model(), prompts, [1.0], speculative_tokens=2, draft_loops=[drafting],
            steps=steps, **OPTIONS,
        )  # fmt: skip
    drafted, accepted = _play(gold, prompts, drafting, width=2)
    assert row["draft loops"] == drafting
    assert (row["drafted"], row["accepted"]) == (drafted.sum(), accepted.sum())
    assert row["acceptance"] == accepted.sum() / drafted.sum()
    rates = accepted / drafted
    assert [row["token 1"], row["token 2"]] == pytest.approx(rates.tolist())
    assert row["tokens a round"] == pytest.approx(1 + rates.sum())
    # Weights are passed over once, and draft loops / 4 more for each drafted token.
    assert row["yield"] == pytest.approx((1 + rates.sum()) / (1 + 2 * drafting / 4))
    assert accepted.sum() > 0
