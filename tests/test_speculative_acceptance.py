"""Which drafts are accepted, and how many are drafted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.decoding.acceptance import accept_greedy, accept_sampled, draft_tokens
from sparse_loop_jax.decoding.adaptive import new_history
from sparse_loop_jax.decoding.speculative import RoundHooks
from sparse_loop_jax.decoding.state import RequestParams


def test_greedy_acceptance_counts_the_common_prefix():
    logits = jax.nn.one_hot(jnp.asarray([[5, 6, 7, 8]] * 5), 10)
    candidates = jnp.asarray([[5, 6, 7], [5, 6, 0], [5, 0, 7], [0, 6, 7], [5, 6, 7]], jnp.int32)
    rows = jnp.asarray([4, 4, 4, 4, 2], jnp.int32)
    accepted, tokens = accept_greedy(candidates, logits, rows)
    assert accepted.tolist() == [3, 2, 1, 0, 1]
    assert tokens.tolist() == [[5, 6, 7, 8]] * 5


def _many_rounds(trials, k, rows, temperature=1.0):
    """Rounds of a made-up draft and target over five tokens: q and p fixed by place."""
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.ones(5), k + 1).astype(np.float32)
    q = rng.dirichlet(np.ones(5), k).astype(np.float32)
    request = RequestParams(
        temperature=jnp.full(trials, temperature, jnp.float32),
        top_k=jnp.full(trials, 5, jnp.int32),
        top_p=jnp.ones(trials, jnp.float32),
        exit_threshold=jnp.ones(trials, jnp.float32),
        min_loops=jnp.ones(trials, jnp.int32),
        max_loops=jnp.ones(trials, jnp.int32),
        stop_ids=jnp.full((trials, 1), -1, jnp.int32),
        key=jax.random.split(jax.random.key(1), trials),
    )
    position = jnp.zeros(trials, jnp.int32)
    candidates, drawn_from = [], []
    for i in range(k):
        logits = jnp.broadcast_to(jnp.log(q[i])[None], (trials, 5))
        token, probabilities = draft_tokens(logits, request, position + i + 1)
        candidates.append(token)
        drawn_from.append(probabilities)
    logits = jnp.broadcast_to(jnp.log(p)[None], (trials, k + 1, 5))
    accepted, tokens = accept_sampled(
        jnp.stack(candidates, 1),
        jnp.stack(drawn_from, 1),
        logits,
        jnp.full(trials, rows, jnp.int32),
        request,
        position,
    )
    return p, np.asarray(accepted), np.asarray(tokens)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_sampled_rounds_emit_the_target_distribution_at_every_place(rows):
    p, accepted, tokens = _many_rounds(40_000, 3, rows)
    assert accepted.max() == rows - 1
    for place in range(rows):
        emitted = tokens[accepted >= place, place]
        # p does not depend on the tokens before, so neither does what is emitted.
        expected = len(emitted) * p[place]
        counts = np.bincount(emitted, minlength=5)
        # Chi-square with four degrees of freedom: above 18.47 once in a thousand.
        assert ((counts - expected) ** 2 / expected).sum() < 18.47


def test_a_wrong_acceptance_rule_would_be_seen():
    p, accepted, tokens = _many_rounds(40_000, 3, 4)
    drafted = tokens[accepted >= 1, 0]  # only the accepted ones: not the target's draws
    expected = len(drafted) * p[0]
    assert ((np.bincount(drafted, minlength=5) - expected) ** 2 / expected).sum() > 18.47


def test_temperature_zero_makes_sampling_greedy():
    p, accepted, tokens = _many_rounds(8, 3, 4, temperature=0.0)
    want = p.argmax(axis=1)
    for row, a in zip(tokens, accepted, strict=True):
        assert row[: a + 1].tolist() == want[: a + 1].tolist()


def test_sampled_speculation_is_reproducible_and_alone_is_batched(load_gold):
    model = load_gold("mha").model()
    prompts = [[5, 6, 7], [9] * 20]
    options = {
        "max_new_tokens": 12,
        "eos_token_id": [],
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 4,
        "speculative": slj.SpeculativeConfig(3, 2),
    }
    together = slj.generate(model, prompts, **options)
    assert slj.generate(model, prompts, **options).token_ids == together.token_ids
    for prompt, ids in zip(prompts, together.token_ids, strict=True):
        assert slj.generate(model, [prompt], **options).token_ids == [ids]


# Adaptive length -----------------------------------------------------------------------


def test_the_drafted_length_follows_acceptance():
    history = new_history(3)
    for _ in range(30):
        drafted = jnp.asarray([4, 4, 0], jnp.int32)
        history = history.after_round(drafted, jnp.asarray([4, 0, 0], jnp.int32))
    lengths = history.best_length(8, 0.25).tolist()
    assert lengths[0] == 8
    assert lengths[1] == 1
    assert lengths[2] == new_history(1).best_length(8, 0.25)[0]  # nothing was learnt


def test_each_request_has_a_length_of_its_own(load_gold):
    gold = load_gold("mha")
    params, state, _ = slj.start(
        gold.model(),
        gold.prompts,
        max_new_tokens=32,
        eos_token_id=[],
        speculative=slj.SpeculativeConfig(4, 2, adaptive=True),
    )

    def accepted(_, rows):
        """Of the first request everything, of the second nothing."""
        return jnp.where(jnp.arange(2) == 0, rows - 1, 0)

    lease, hooks, counts, drafted = slj.no_lease(state), RoundHooks(accepted=accepted), [], []
    for _ in range(5):
        state, output = slj.speculative_step(params, state, lease, hooks=hooks)
        lease = output.lease
        counts.append(output.count.tolist())
        drafted.append(output.counters.drafted.tolist())
    assert counts[-1] == [5, 1]
    # Requests that drafted a token at each place: from the second place on, one alone.
    assert drafted[-1] == [2, 1, 1, 1]


def test_adaptive_speculation_gives_the_plain_tokens_with_less_drafted(load_gold):
    gold = load_gold("mha")
    options = {"max_new_tokens": 32, "eos_token_id": []}
    fixed, adaptive = (
        slj.generate(
            gold.model(),
            gold.prompts,
            speculative=slj.SpeculativeConfig(8, 2, adaptive=adaptive),
            **options,
        )
        for adaptive in (False, True)
    )
    assert adaptive.token_ids == fixed.token_ids == gold.tokens()
    assert adaptive.stats.drafted < fixed.stats.drafted


def test_no_round_after_the_first_compiles(load_gold, compile_counter):
    gold = load_gold("mha")
    params, state, _ = slj.start(
        gold.model(),
        gold.prompts,
        max_new_tokens=32,
        eos_token_id=[],
        speculative=slj.SpeculativeConfig(3, 2, adaptive=True),
    )
    lease = slj.no_lease(state)
    state, output = slj.speculative_step(params, state, lease)
    with compile_counter() as compiled:
        for _ in range(6):
            state, output = slj.speculative_step(params, state, output.lease)
    assert compiled.count == 0, compiled
    assert dataclasses.is_dataclass(output)
