"""Self-speculation: the same tokens as plain decoding, whatever is drafted or refused."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.data import tiny_ouro
from sparse_loop_jax.decoding.acceptance import accept_greedy, accept_sampled, draft_tokens
from sparse_loop_jax.decoding.adaptive import new_history
from sparse_loop_jax.decoding.device_loop import decode_tokens, empty_buffer
from sparse_loop_jax.decoding.speculative import RoundHooks
from sparse_loop_jax.decoding.state import RequestParams
from sparse_loop_jax.evaluate.inputs import text_prompts

MODELS, KS, DRAFTS, RETENTIONS, BUDGETS = (
    ("mha", "gqa"),
    (1, 2, 3, 4, 8),
    (1, 2, 3),
    (None, 1.0, 0.25, 0.1, 0.02),
    (1, 3, 32),
)


def _prompts(gold):
    return [gold.dense["p0_input_ids"].tolist(), gold.dense["p1_input_ids"].tolist()]


def _plain(gold, retention):
    """The golden greedy tokens of both prompts."""
    if retention is None:
        return [gold.dense[f"{p}_gen_tokens"].tolist() for p in ("p0", "p1")]
    return [gold.sparse(retention)[f"{p}_tokens"].tolist() for p in ("p0", "p1")]


def _sparse(retention):
    return None if retention is None else slj.SparseDecodeConfig(key_retention=retention)


def _pairwise():
    """Few combinations in which every pair of values occurs."""
    axes = (MODELS, KS, DRAFTS, RETENTIONS, BUDGETS)
    places = range(len(axes))
    wanted = {
        (i, a, j, b)
        for i, j in itertools.combinations(places, 2)
        for a in axes[i]
        for b in axes[j]
    }

    def pairs(case):
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(places, 2)}

    cases = []
    while wanted:
        best = max(itertools.product(*axes), key=lambda case: len(pairs(case) & wanted))
        wanted -= pairs(best)
        cases.append(best)
    return cases


def _check(gold, k, draft_loops, retention, budget):
    out = slj.generate(
        gold.model(),
        _prompts(gold),
        max_new_tokens=budget,
        eos_token_id=[],
        sparse=_sparse(retention),
        speculative=slj.SpeculativeConfig(k, draft_loops),
    )
    # The golden runs keep every choice far from a tie, so the tokens are equal outright.
    assert out.token_ids == [ids[:budget] for ids in _plain(gold, retention)]
    assert out.finish_reasons == ["length", "length"]
    assert out.stats.generated_tokens == 2 * budget
    if retention not in (None, 1.0) and budget > 1:
        assert out.stats.captured_rows > 0
        assert out.stats.consumed_rows > 0


@pytest.mark.parametrize(("name", "k", "draft_loops", "retention", "budget"), _pairwise())
def test_speculation_gives_the_plain_tokens(load_gold, name, k, draft_loops, retention, budget):
    _check(load_gold(name), k, draft_loops, retention, budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("draft_loops", DRAFTS)
@pytest.mark.parametrize("k", KS)
def test_the_full_product(gold, k, draft_loops, retention, budget):
    _check(gold, k, draft_loops, retention, budget)


def _plain_with_margins(model, prompt, retention, tokens):
    """Plain greedy decoding of one prompt: tokens, and each one's lead over the runner-up."""
    params, state, first = slj.start(
        model, [prompt], max_new_tokens=tokens, eos_token_id=[], sparse=_sparse(retention)
    )
    ids, margins, lease = [int(first[0])], [np.inf], slj.no_lease(state)
    for _ in range(tokens - 1):
        state, output = slj.decode_step(params, state, lease)
        lease = output.lease
        top = np.sort(np.asarray(output.logits[0, 0]))[-2:]
        ids.append(int(output.tokens[0, 0]))
        margins.append(float(top[1] - top[0]))
    return ids, margins


def _assert_equal_or_tied(got, want, margins, tolerance):
    """Two greedy texts may part only where the choice was a near tie."""
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            assert margins[place] < tolerance, f"parted at {place}, margin {margins[place]}"
            return


def _texts_and_logits(model, prompts, **options):
    """Of each prompt: 32 tokens, and float32 `[31, vocab]`, what all but the first are from."""
    params, state, first = slj.start(
        model, prompts, max_new_tokens=32, eos_token_id=[], **options
    )
    step = slj.decode_step if state.spec.speculative is None else slj.speculative_step
    ids, logits, lease = [[int(t)] for t in first], [[] for _ in first], slj.no_lease(state)
    while bool(state.live.any()):
        state, output = step(params, state, lease)
        lease = output.lease
        for row, count in enumerate(output.count.tolist()):
            ids[row] += output.tokens[row, :count].tolist()
            logits[row] += list(np.asarray(output.logits[row, :count]))
    return list(zip(ids, map(np.array, logits), strict=True))


@pytest.mark.parametrize("retention", [None, 0.25])
def test_in_bfloat16_texts_part_only_on_near_ties(load_gold, retention):
    """A near tie is a lead below twice the most by which logits of equal texts differ.

    Products of one and of four rows round differently. Where that makes a kept key another
    one, which is seldom, logits move by far more: hence a bound of the median as well. In a
    single place they may be 0.9 apart, since each way is within 0.45 of float32
    (tests/gold/README.md).
    """
    gold = load_gold("mha")
    model, prompts, sparse = gold.model("bfloat16"), _prompts(gold), _sparse(retention)
    plain = _texts_and_logits(model, prompts, sparse=sparse)
    for draft_loops in (1, 2):
        speculative = slj.SpeculativeConfig(3, draft_loops)
        run = _texts_and_logits(model, prompts, sparse=sparse, speculative=speculative)
        differences, leads = [], []
        for (want, expected), (got, logits) in zip(plain, run, strict=True):
            assert want[0] == got[0]
            # Logits j choose token j + 1; up to `same` the tokens before them are equal.
            same = next((j for j in range(31) if want[j + 1] != got[j + 1]), 31)
            differences += np.abs(logits[:same] - expected[:same]).max(axis=1).tolist()
            if same < 31:
                top = np.sort(expected[same])
                leads.append(top[-1] - top[-2])
        assert len(differences) > 31  # enough to tell what is near
        assert np.median(differences) <= (0.05 if retention is None else 0.2)
        assert max(differences) <= (0.05 if retention is None else 0.9)
        assert all(lead <= 2 * max(differences) for lead in leads)


def test_the_bundled_model_speculates_exactly(bundled_prompts):
    model, prompts = bundled_prompts
    options = {"max_new_tokens": 24, "eos_token_id": []}
    for retention, k, draft_loops in ((None, 3, 2), (0.1, 3, 2), (0.1, 8, 1), (None, 1, 3)):
        out = slj.generate(
            model,
            prompts,
            sparse=_sparse(retention),
            speculative=slj.SpeculativeConfig(k, draft_loops),
            **options,
        )
        for prompt, got in zip(prompts, out.token_ids, strict=True):
            ids = model.tokenizer.encode(prompt).ids
            want, margins = _plain_with_margins(model, ids, retention, 24)
            _assert_equal_or_tied(got, want, margins, 1e-4)
        if draft_loops > 1:
            assert out.stats.accepted > 0.4 * out.stats.drafted


@pytest.fixture(scope="module")
def bundled_prompts():
    return slj.load(dtype="float32"), ["Once upon a time", "In the beginning God created the"]


@pytest.mark.slow
def test_two_draft_loops_of_the_bundled_model_are_right_four_times_in_five():
    """The row of docs/speculation.md that it recommends: 0.811 of 873 tokens there."""
    model = slj.load(dtype="float32")
    text = (tiny_ouro() / "heldout.txt").read_text(encoding="utf-8")
    prompts = [ids.tolist() for ids in text_prompts(model, text, count=16, tokens=128)]
    out = slj.generate(
        model,
        prompts,
        max_new_tokens=64,
        eos_token_id=[],
        speculative=slj.SpeculativeConfig(3, 2),
    )
    assert out.stats.drafted > 800
    assert out.stats.accepted > 0.8 * out.stats.drafted


# Rejections ----------------------------------------------------------------------------


def _corrupt_from(place):
    """A draft whose candidates from `place` on are certainly wrong."""

    def candidate(tokens, i):
        return jnp.where(i >= place, -1, tokens)

    return RoundHooks(candidate=candidate)


@pytest.mark.parametrize(
    ("draft_loops", "place"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)]
)
@pytest.mark.parametrize("retention", [None, 0.1])
def test_every_rejection_leaves_the_state_of_serial_decoding(
    load_gold, draft_loops, retention, place
):
    gold = load_gold("mha")
    options = {"max_new_tokens": 32, "eos_token_id": [], "sparse": _sparse(retention)}
    params, serial, _ = slj.start(gold.model(), _prompts(gold), **options)
    lease = slj.no_lease(serial)
    serial_tokens = [serial.token.tolist()]
    for _ in range(place + 1):
        serial, output = slj.decode_step(params, serial, lease)
        lease = output.lease
        serial_tokens.append(serial.token.tolist())

    speculative = slj.SpeculativeConfig(3, draft_loops)
    params, state, _ = slj.start(
        gold.model(), _prompts(gold), speculative=speculative, **options
    )
    start = state.position.tolist()

    # What stands is what a draft that is always right would have: force it. At place 3
    # there is no candidate left to refuse.
    wanted = jnp.asarray(serial_tokens[1:])  # [place + 1, B]

    def candidate(tokens, i):
        right = wanted[jnp.minimum(i, place)]
        return jnp.where(i >= place, (right + 1) % 128, right)

    state, output = slj.speculative_step(
        params, state, slj.no_lease(state), hooks=RoundHooks(candidate=candidate)
    )
    assert output.count.tolist() == [place + 1] * 2
    assert state.position.tolist() == [s + place + 1 for s in start] == serial.position.tolist()
    assert state.token.tolist() == serial.token.tolist()
    assert state.remaining.tolist() == serial.remaining.tolist()
    _assert_same_kv(state, serial)
    if retention is not None:
        count = np.asarray(state.store.count)[np.asarray(output.lease.slots)]
        assert (count[:, : place + 1] > 0).all()
        assert (count[:, place + 1 :] == 0).all()


def _assert_same_kv(state, serial):
    from sparse_loop_jax.kernels.paged_attention.xla import gather_pages

    for layer in range(len(state.cache.keys)):
        for loop in range(4):
            planes = []
            for s in (state, serial):
                table = s.cache.page_table[:, loop]
                planes.append(
                    [gather_pages(p[layer], table) for p in (s.cache.keys, s.cache.values)]
                )
            for row, tokens in enumerate(serial.position.tolist()):
                for got, want in zip(*planes, strict=True):
                    np.testing.assert_allclose(
                        got[row, :tokens], want[row, :tokens], rtol=1e-4, atol=1e-4
                    )


def test_a_round_writes_to_no_place_but_those_of_its_live_rows(load_gold):
    """A request with one token left runs one row; its page has room for all four."""
    gold = load_gold("mha")
    params, state, _ = slj.start(
        gold.model(),
        _prompts(gold),
        max_new_tokens=[32, 2],
        eos_token_id=[],
        speculative=slj.SpeculativeConfig(3, 2),
    )
    cache = state.cache
    table, size = np.array(cache.page_table), cache.page_size
    free = np.ones((cache.num_pages, size), bool)  # where nothing may be written
    for row, (start, rows) in enumerate(zip(state.position.tolist(), [4, 1], strict=True)):
        for place in range(start, start + rows):
            free[table[row, :, place // size], place % size] = False
    start = int(state.position[1])
    assert (start + 3) // size == start // size  # dead rows would land in a page of theirs
    before = [np.array(pool) for pool in (*cache.keys, *cache.values)]
    state, output = slj.speculative_step(params, state, slj.no_lease(state))
    assert int(output.count[1]) == 1
    after = [np.asarray(pool) for pool in (*state.cache.keys, *state.cache.values)]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).any(axis=(1, 3))
        assert not (changed & free).any()
        assert changed[~free].all()


def test_steps_take_the_memory_of_the_state_they_are_given(load_gold):
    """Otherwise each round would copy the pools."""
    gold = load_gold("mha")

    def pools(state):
        store = state.store
        fields = (state.cache.keys, state.cache.values, store.positions, store.mass, store.base)
        return jax.tree.leaves(fields)

    params, state, _ = slj.start(
        gold.model(),
        _prompts(gold),
        max_new_tokens=8,
        eos_token_id=[],
        sparse=_sparse(0.1),
        speculative=slj.SpeculativeConfig(3, 2),
    )
    given = pools(state)
    state, output = slj.speculative_step(params, state, slj.no_lease(state))
    assert all(pool.is_deleted() for pool in given)
    given = pools(state)
    decode_tokens(params, state, empty_buffer(state, 8), output.lease, jnp.int32(8))
    assert all(pool.is_deleted() for pool in given)


def test_drafts_that_are_always_wrong_give_one_token_a_round(load_gold):
    gold = load_gold("mha")
    params, state, _ = slj.start(
        gold.model(),
        _prompts(gold),
        max_new_tokens=4,
        eos_token_id=[],
        speculative=slj.SpeculativeConfig(3, 3),
    )
    lease, hooks = slj.no_lease(state), _corrupt_from(0)
    tokens = []
    while bool(state.live.any()):
        state, output = slj.speculative_step(params, state, lease, hooks=hooks)
        lease = output.lease
        assert output.count.tolist() == [1, 1]
        tokens.append(output.tokens[:, 0].tolist())
    assert np.asarray(tokens).T.tolist() == [ids[1:4] for ids in _plain(gold, None)]


def test_a_step_without_a_config_is_refused(load_gold):
    gold = load_gold("mha")
    params, state, _ = slj.start(gold.model(), [[1, 2]], max_new_tokens=2)
    with pytest.raises(ValueError, match="needs a state made with a SpeculativeConfig"):
        slj.speculative_step(params, state, slj.no_lease(state))


# Ends ----------------------------------------------------------------------------------


def test_a_stop_token_at_every_place_of_a_run(load_gold):
    gold = load_gold("mha")
    model, prompt, want = gold.model(), _prompts(gold)[1], _plain(gold, None)[1]
    accept_all = slj.SpeculativeConfig(3, 3)
    for stop in dict.fromkeys(want[:12]):
        out = slj.generate(
            model, [prompt], max_new_tokens=32, eos_token_id=stop, speculative=accept_all
        )
        assert out.token_ids == [want[: want.index(stop) + 1]]
        assert out.finish_reasons == ["stop"]


def test_the_stop_inside_a_forced_run_ends_the_text_there(load_gold):
    gold = load_gold("mha")
    prompt, want = _prompts(gold)[0], _plain(gold, None)[0]
    right = jnp.asarray(want)

    def candidate(tokens, i):
        return jnp.broadcast_to(right[i + 1], tokens.shape)

    hooks, ends = RoundHooks(candidate=candidate), []
    for place in range(1, 5):
        params, state, _ = slj.start(
            gold.model(),
            [prompt],
            max_new_tokens=32,
            eos_token_id=want[place],
            speculative=slj.SpeculativeConfig(3, 1),
        )
        before = int(state.position[0])
        state, output = slj.speculative_step(params, state, slj.no_lease(state), hooks=hooks)
        end = want.index(want[place], 1)
        assert int(output.count[0]) == end
        assert output.tokens[0, :end].tolist() == want[1 : end + 1]
        assert bool(state.stopped[0])
        assert int(state.position[0]) == before + end
        ends.append(end)
    assert ends[-1] == 4  # the bonus token, which no candidate stands for


def test_the_context_limit_with_more_drafted_than_fits(load_gold):
    model = load_gold("mha").model()
    limit = model.config.max_position_embeddings
    prompts = [[3] * (limit - 2), [3]]
    plain = slj.generate(model, prompts, max_new_tokens=6, eos_token_id=[])
    out = slj.generate(
        model,
        prompts,
        max_new_tokens=6,
        eos_token_id=[],
        speculative=slj.SpeculativeConfig(8, 2),
    )
    assert [len(ids) for ids in out.token_ids] == [3, 6]
    assert out.token_ids == plain.token_ids


# Acceptance ----------------------------------------------------------------------------


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
        _prompts(gold),
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
            _prompts(gold),
            speculative=slj.SpeculativeConfig(8, 2, adaptive=adaptive),
            **options,
        )
        for adaptive in (False, True)
    )
    assert adaptive.token_ids == fixed.token_ids == _plain(gold, None)
    assert adaptive.stats.drafted < fixed.stats.drafted


def test_no_round_after_the_first_compiles(load_gold, compile_counter):
    gold = load_gold("mha")
    params, state, _ = slj.start(
        gold.model(),
        _prompts(gold),
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
