"""The engine: each request gets what `generate` gives it, whatever arrives around it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.engine import device, loop, sizing
from sparse_loop_jax.engine.request import Status

SPARSE = slj.SparseDecodeConfig(key_retention=0.3)
SPECULATIVE = slj.SpeculativeConfig(3, 2)
KINDS = {
    "dense": (None, None),
    "sparse": (SPARSE, None),
    "speculative": (None, SPECULATIVE),
    "both": (SPARSE, SPECULATIVE),
}
CONTEXT, MOST = 128, 40


@pytest.fixture(scope="module")
def model(load_gold):
    return load_gold("mha").model()


@pytest.fixture(scope="module")
def make_engine(model):
    """A function that makes an engine of few pages, of one set of compiled programs."""

    def make(kind="dense", *, num_pages=4 * 24, scheduler=None, **cache):
        sparse, speculative = KINDS[kind]
        options = {"max_num_seqs": 4, "max_context": CONTEXT, "max_prefill_tokens": 64}
        return slj.Engine(
            model,
            cache=slj.CacheConfig(num_pages=num_pages, page_size=8, **cache),
            scheduler=slj.SchedulerConfig(**{**options, **(scheduler or {})}),
            sparse=sparse,
            speculative=speculative,
        )

    return make


def _prompts(count, seed, shared=0):
    """Distinct prompts of up to 88 tokens; every third begins with the same `shared` ones."""
    rng = np.random.default_rng(seed)
    beginning = rng.integers(1, 128, shared).tolist()
    prompts = []
    for i in range(count):
        own = [*divmod(i, 128), *rng.integers(1, 128, int(rng.integers(0, 46)))]
        prompts.append(beginning + own if i % 3 == 0 else own)
    return prompts


@pytest.fixture(scope="module")
def prompts():
    return _prompts(16, seed=1, shared=40)


@pytest.fixture(scope="module")
def greedy(model):
    """A function from prompts to `MOST` greedy tokens each, dense or sparse.

    What ends a request only cuts them, and speculation does not change them.
    """
    known: dict = {}

    def tokens(prompts, kind):
        sparse = KINDS[kind][0]
        key = (sparse is None, str(prompts))
        if key not in known:
            known[key] = slj.generate(
                model, prompts, max_new_tokens=MOST, eos_token_id=[], sparse=sparse, page_size=8
            ).token_ids
        return known[key]

    return tokens


def _cut(tokens, params):
    """What a request with these parameters keeps of its tokens, and why it ends."""
    tokens = tokens[: params.max_tokens]
    for index, token in enumerate(tokens):
        if token in params.stop_token_ids or (token == 0 and not params.ignore_eos):
            return tokens[: index + 1], "stop"
    return tokens, "length"


def _params(rng, tokens, **changes):
    stops = () if rng.random() < 0.6 else (int(rng.choice(tokens)),)
    return slj.SamplingParams(
        max_tokens=int(rng.integers(1, MOST + 1)),
        stop_token_ids=stops,
        ignore_eos=bool(rng.random() < 0.5),
        **changes,
    )


def _run_random(engine, requests, rng, *, abort_share=0.0, priorities=False):
    """Feeds requests at random steps and aborts some; final outputs by id."""
    waiting = list(requests)
    doomed = {r[0]: int(rng.integers(0, 25)) for r in requests if rng.random() < abort_share}
    final, told = {}, {}
    while waiting or engine.has_unfinished:
        for _ in range(int(rng.integers(0, 3)) if waiting else 0):
            request = waiting.pop(0) if waiting else None
            if request is not None:
                priority = int(rng.integers(0, 3)) if priorities else 0
                engine.add_request(*request, priority=priority)
        if rng.random() < 0.2:
            _assert_books_agree(engine)
        for request_id in list(doomed):
            doomed[request_id] -= 1
            if doomed[request_id] < 0 and engine.abort(request_id):
                del doomed[request_id]
        for output in engine.step():
            assert output.request_id not in final, "nothing follows the last output"
            told.setdefault(output.request_id, []).extend(output.new_token_ids)
            assert told[output.request_id] == output.token_ids
            if output.finished:
                final[output.request_id] = output
    return final


def _assert_books_agree(engine):
    """No page has two owners that may write to it, and the device's tables are the host's."""
    running = engine._loop.scheduler.running
    rows = [request.row for request in running]
    assert len(rows) == len(set(rows))
    private = []
    for request in running:
        prompt_pages = len(request.prompt) // 8 if request.hashes else 0
        private += request.blocks[prompt_pages:]
    assert len(private) == len(set(private))
    assert engine._loop.scheduler.pool.in_use == len({b for r in running for b in r.blocks})
    if not engine._loop.executor.is_open:
        return
    state = engine._loop.executor.driver.state
    table, live = np.asarray(state.cache.page_table), np.asarray(state.live)
    decoding = {r.row: r for r in running if r.status is not Status.PREFILL}
    for row in np.flatnonzero(live):
        request = decoding[row]
        known = request.blocks[: request.blocks_on_device]
        pages = np.asarray(known)[None] * 4 + np.arange(4)[:, None]
        np.testing.assert_array_equal(table[row, :, : len(known)], pages)
        assert (table[row, :, len(known) :] == state.cache.num_pages).all()
        assert int(state.position[row]) <= request.position + 4 * request.pending_rounds
        assert int(state.position[row]) <= 8 * len(known)


def _to_the_end(engine):
    """Last outputs of what is there."""
    outputs = []
    while engine.has_unfinished:
        outputs += [o for o in engine.step() if o.finished]
    return outputs


def _assert_drained(engine):
    metrics = engine.metrics()
    for name in (
        "requests_waiting", "requests_running", "requests_held", "rows_in_use",
        "pages_in_use", "outputs_outstanding", "swapped_bytes_held",
    ):  # fmt: skip
        assert metrics[name] == 0, name
    state = engine._loop.executor.driver.state
    assert not bool(state.live.any())
    if state.store is not None:
        assert not bool(state.store.held.any())
    assert not engine._loop.executor.driver._retired


def _workload(greedy, kind, prompts):
    rng = np.random.default_rng(len(prompts))
    tokens = greedy(prompts, kind)
    params = [_params(rng, t) for t in tokens]
    requests = [(f"r{i}", p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    want = {f"r{i}": _cut(t, s) for i, (t, s) in enumerate(zip(tokens, params, strict=True))}
    return requests, want


def _assert_equal(final, want):
    assert final.keys() == want.keys()
    for request_id, output in final.items():
        tokens, reason = want[request_id]
        if output.finish_reason == "abort":
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert (output.token_ids, output.finish_reason) == (tokens, reason), request_id


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_workload_gets_the_tokens_of_generate(make_engine, greedy, prompts, kind):
    requests, want = _workload(greedy, kind, prompts)
    rng = np.random.default_rng(7)
    with make_engine(kind) as engine:
        final = _run_random(engine, requests, rng, abort_share=0.2, priorities=True)
        _assert_equal(final, want)
        reasons = {output.finish_reason for output in final.values()}
        assert reasons == {"abort", "length", "stop"}
        metrics = engine.metrics()
        assert metrics["preemptions"] > 0
        assert metrics["resumptions"] > 0
        assert metrics["discarded_rounds"] > 0
        _assert_drained(engine)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_requests_get_the_tokens_of_generate(
    make_engine, greedy, kind, prefix_caching
):
    requests, want = _workload(greedy, kind, _prompts(200, seed=2, shared=40))
    rng = np.random.default_rng(8)
    engine = make_engine(
        kind,
        enable_prefix_caching=prefix_caching,
        num_pages=4 * 22,
        scheduler={"policy": "priority", "max_bypasses": 4},
    )
    with engine:
        final = _run_random(engine, requests, rng, abort_share=0.15, priorities=True)
        _assert_equal(final, want)
        assert engine.metrics()["preemptions"] > 10
        _assert_drained(engine)


# Sampling ------------------------------------------------------------------------------


SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 2**40 + 5}


def _check_sampled(make_engine, model, greedy, prompts, kind):
    sparse, speculative = KINDS[kind]
    drawn, limits = prompts[:6], [20, 5, 33, 12, 1, 24]
    want = slj.generate(
        model,
        drawn,
        max_new_tokens=limits,
        eos_token_id=[],
        sparse=sparse,
        speculative=speculative,
        page_size=8,
        **SAMPLED,
    ).token_ids
    requests = [
        (f"s{i}", p, slj.SamplingParams(max_tokens=n, ignore_eos=True, **SAMPLED))
        for i, (p, n) in enumerate(zip(drawn, limits, strict=True))
    ]
    beside = ("g", prompts[0], slj.SamplingParams(max_tokens=20, ignore_eos=True))
    # The same request twice draws the same: its seed and its prompt decide.
    twice = ("t", *requests[0][1:])
    with make_engine(kind, scheduler={"max_prefill_tokens": 32}) as engine:
        outputs = engine.run([beside, *requests, twice])
        _assert_drained(engine)
    greedily = greedy(prompts, kind)[0][:20]
    assert [o.token_ids for o in outputs] == [greedily, *want, want[0]]


def test_sampled_requests_draw_what_generate_draws(make_engine, model, greedy, prompts):
    _check_sampled(make_engine, model, greedy, prompts, "dense")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparse", "speculative", "both"])
def test_sampled_requests_draw_alike_however_they_decode(
    make_engine, model, greedy, prompts, kind
):
    _check_sampled(make_engine, model, greedy, prompts, kind)


@pytest.mark.slow
def test_leaving_early_chooses_what_generate_chooses(make_engine, model, greedy, prompts):
    early = slj.generate(
        model, prompts[:2], max_new_tokens=12, eos_token_id=[], exit_threshold=0.3, page_size=8
    ).token_ids
    whole = greedy(prompts, "dense")[:2]
    assert early[0] != whole[0][:12]
    with make_engine(scheduler={"max_prefill_tokens": 32}) as engine:
        outputs = engine.run(
            (f"{i}{t}", prompts[i], slj.SamplingParams(12, ignore_eos=True, exit_threshold=t))
            for i in range(2)
            for t in (0.3, None)
        )
    assert [o.token_ids for o in outputs] == [early[0], whole[0][:12], early[1], whole[1][:12]]


@pytest.mark.slow
def test_adaptive_drafting_survives_preemption(model, make_engine, greedy):
    """The history of a request's drafts goes out and comes back with its pages."""
    prompts = _prompts(24, seed=9)
    want = greedy(prompts, "dense")
    engine = slj.Engine(
        model,
        cache=slj.CacheConfig(num_pages=4 * 16, page_size=8),
        scheduler=slj.SchedulerConfig(max_num_seqs=4, max_context=CONTEXT),
        speculative=slj.SpeculativeConfig(3, 2, adaptive=True),
    )
    params = slj.SamplingParams(max_tokens=MOST, ignore_eos=True)
    with engine:
        outputs = engine.run((str(i), p, params) for i, p in enumerate(prompts))
        assert engine.metrics()["preemptions"] > 0
        _assert_drained(engine)
    assert [o.token_ids for o in outputs] == want


# Pages ---------------------------------------------------------------------------------


def test_prompts_that_begin_alike_share_pages(make_engine, greedy, prompts):
    alike = prompts[0::3]
    want = greedy(prompts, "dense")[0::3]
    params = slj.SamplingParams(max_tokens=6, ignore_eos=True)
    with make_engine(enable_prefix_caching=True) as engine:
        first = engine.run([("a", alike[0], params)])[0]
        assert first.reused_prompt_tokens == 0
        kept = engine.metrics()["pages_kept"]
        assert kept == 4 * (len(alike[0]) // 8)
        outputs = engine.run((f"b{i}", p, params) for i, p in enumerate(alike))
        assert outputs[0].reused_prompt_tokens == (len(alike[0]) - 1) // 8 * 8
        assert all(o.reused_prompt_tokens >= 40 for o in outputs)
        assert [o.token_ids for o in outputs] == [t[:6] for t in want]
        _assert_drained(engine)
        metrics = engine.metrics()
        assert metrics["prefix_reused_tokens"] == sum(o.reused_prompt_tokens for o in outputs)


def test_a_preempted_request_keeps_its_bytes(make_engine):
    """K/V of decoded rows, at depths where a prefill would give another one."""
    params = slj.SamplingParams(max_tokens=30, ignore_eos=True)

    def after_25_tokens(preempt):
        with make_engine("sparse") as engine:
            for i in range(3):
                engine.add_request(f"p{i}", list(range(1 + 20 * i, 12 + 20 * i)), params)
            request = engine._loop.requests["p1"]
            while len(request.tokens) < 12:
                engine.step()
            if preempt:
                engine._loop.collect_all()
                engine._loop.preempt(request)
                assert request.swapped is not None
                assert request.row is None
            while len(request.tokens) < 25:
                engine.step()
            engine._loop.collect_all()
            pages = np.asarray(request.blocks)[:, None] * 4 + np.arange(4)[None]
            cache = jax.device_get(engine._loop.executor.driver.state.cache)
        # [layers and K or V, loops, heads, tokens, head_dim]
        pools = np.stack([*cache.keys, *cache.values])[:, pages.T]
        tokens = pools.swapaxes(2, 3).reshape(*pools.shape[:2], pools.shape[3], -1, 16)
        return request.tokens[:25], tokens[:, :, :, : 11 + 24]

    tokens, written = after_25_tokens(preempt=False)
    again, written_again = after_25_tokens(preempt=True)
    assert tokens == again
    np.testing.assert_array_equal(written, written_again)


def test_tables_and_store_follow_the_longest_request(make_engine, monkeypatch):
    """A running sparse request is not disturbed when a longer one comes, nor when it goes."""
    monkeypatch.setattr(sizing, "_FIRST_SPAN", CONTEXT)
    monkeypatch.setattr(loop, "_ROOMY_STEPS", 3)
    rng = np.random.default_rng(6)
    long = ("long", rng.integers(1, 128, 122).tolist(), slj.SamplingParams(max_tokens=8))
    params = slj.SamplingParams(max_tokens=35, ignore_eos=True)
    short = ("short", rng.integers(1, 128, 20).tolist(), params)

    def store(engine):
        return engine._loop.executor.driver.state.store

    with make_engine("sparse", scheduler={"max_context": 512}) as engine:
        narrow = store(engine).capacity
        engine.add_request(*short)
        told = []
        while len(engine._loop.requests["short"].tokens) < 8:
            told = engine.step()
        assert store(engine).capacity == narrow
        assert len(told[0].token_ids) < 35
        engine.add_request(*long)
        engine.step()
        assert store(engine).capacity > narrow
        assert store(engine).nbytes == engine.memory_plan.reference_store
        while "long" in engine._loop.requests:
            told += engine.step()
        for capacity_is_narrow in (False, False, True):
            engine.step()
            assert engine._loop.requests["short"].remaining > 0
            assert (store(engine).capacity == narrow) is capacity_is_narrow
        final = {o.request_id: o for o in [*told, *_to_the_end(engine)]}
        _assert_drained(engine)
        # Both again, the short one beside the long one from the start.
        again = engine.run([short, long])
        assert store(engine).capacity == narrow
        compiled = engine.metrics()["compilations"]
        engine.run([short, long])
        assert engine.metrics()["compilations"] == compiled
    assert [o.token_ids for o in again] == [final[n].token_ids for n in ("short", "long")]


def test_a_prompt_alone_costs_its_own_rows(make_engine, monkeypatch):
    shapes = []
    run = device.prefill_rows

    def counted(params, state, rows, tokens, *args, **kwargs):
        shapes.append(tokens.shape)
        return run(params, state, rows, tokens, *args, **kwargs)

    monkeypatch.setattr(device, "prefill_rows", counted)
    with make_engine() as engine:
        engine.run([("a", list(range(1, 41)), slj.SamplingParams(max_tokens=2))])
        assert shapes == [(1, 32), (1, 32)]
        shapes.clear()
        engine.run((str(i), [i + 1], slj.SamplingParams(max_tokens=1)) for i in range(3))
        assert shapes == [(2, 32), (1, 32)]


class _Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids):
        return "".join(chr(ord("a") + token % 26) for token in ids)


@pytest.mark.parametrize("kind", ["dense", "speculative"])
def test_a_stop_string_ends_a_request_like_a_stop_token(make_engine, model, monkeypatch, kind):
    """Its tokens end where the string does, and nothing of it stays on the device."""
    monkeypatch.setattr(model, "tokenizer", _Letters())
    params = slj.SamplingParams(max_tokens=30, ignore_eos=True)
    with make_engine(kind) as engine:
        (whole,) = engine.run([("whole", [5, 6, 7], params)])
        assert whole.text == _Letters().decode(whole.token_ids)
        for stop in (whole.text[9:12], (whole.text[13:16], "?"), "no such", whole.text[0]):
            asked = dataclasses.replace(params, stop=stop)
            engine.add_request("cut", [5, 6, 7], asked)
            engine.add_request("other", [5, 6, 7], params)
            cut, other = sorted(_to_the_end(engine), key=lambda o: o.request_id)
            found = [(whole.text.find(s), s) for s in asked.stop if s in whole.text]
            if not found:
                assert (cut.token_ids, cut.finish_reason) == (whole.token_ids, "length")
            else:
                at, text = found[0]
                assert (cut.text, cut.finish_reason) == (whole.text[:at], "stop")
                assert cut.token_ids == whole.token_ids[: at + len(text)]
            assert other.token_ids == whole.token_ids
            assert not engine._loop.executor.driver.state.live.any()
            _assert_drained(engine)
        monkeypatch.setattr(model, "tokenizer", None)
        with pytest.raises(ValueError, match=r"stop .'x',. needs texts and the model has no"):
            engine.add_request("mute", [5], slj.SamplingParams(stop="x"))


# The order -----------------------------------------------------------------------------


def test_a_long_prompt_does_not_stop_running_requests(make_engine):
    with make_engine(scheduler={"max_prefill_tokens": 32}) as engine:
        engine.add_request("a", [1, 2, 3], slj.SamplingParams(max_tokens=40, ignore_eos=True))
        while not engine._loop.requests["a"].tokens:
            engine.step()
        before = len(engine._loop.requests["a"].tokens)
        engine.add_request("b", [5] * 85, slj.SamplingParams(max_tokens=1))
        while not any(o.request_id == "b" for o in engine.step()):
            pass
        # Three chunks, a round beside each.
        assert len(engine._loop.requests["a"].tokens) - before >= 3


def test_two_rounds_are_outstanding_before_one_is_read(make_engine):
    with make_engine() as engine:
        engine.add_request("a", [1, 2, 3], slj.SamplingParams(max_tokens=40, ignore_eos=True))
        assert engine.step() == []
        assert engine._loop.executor.driver.outstanding == 1
        told = engine.step()
        assert engine._loop.executor.driver.outstanding == 1  # two, and the older one was read
        assert [len(o.token_ids) for o in told] == [2]


def test_priority_goes_first(make_engine):
    def params(count):
        return slj.SamplingParams(max_tokens=count, ignore_eos=True)

    with make_engine(scheduler={"policy": "priority", "max_num_seqs": 3}) as engine:
        for name in ("x", "y"):
            engine.add_request(name, [1, 2, 3], params(40))
        engine.step()
        for name, priority in (("low", 5), ("high", -1), ("middle", 0)):
            engine.add_request(name, [1, 2, 3], params(3), priority=priority)
        order = [o.request_id for o in _to_the_end(engine)]
    assert order == ["high", "middle", "low", "x", "y"]


# Ends ----------------------------------------------------------------------------------


def test_aborted_wherever_it_is(make_engine, greedy, prompts):
    want = greedy(prompts, "dense")
    params = slj.SamplingParams(max_tokens=12, ignore_eos=True)
    options = {"max_num_seqs": 3, "max_prefill_tokens": 32}
    with make_engine(scheduler=options) as engine:
        engine.add_request("beside", [4], slj.SamplingParams(max_tokens=40, ignore_eos=True))
        engine.add_request("running", prompts[0], params)
        while not engine._loop.requests["running"].tokens:
            engine.step()
        engine.add_request("stays", prompts[1], params)
        engine.add_request("waiting", prompts[2], params)
        assert engine.abort("waiting")
        engine.step()
        assert engine.abort("running")
        assert not engine.abort("running")  # ended, though rounds with it are outstanding
        engine.add_request("prompt", [3] * 90, params)
        final = {o.request_id: o for o in engine.step()}
        assert final["running"].finish_reason == "abort"
        assert engine._loop.requests["prompt"].prefilled < 90
        assert engine.abort("prompt")
        final |= {o.request_id: o for o in _to_the_end(engine)}
        assert final["stays"].token_ids == want[1][:12]
        assert final["prompt"].token_ids == []
        assert not engine.abort("never there")
        _assert_drained(engine)


def test_an_id_is_refused_while_it_is_live_or_retiring(make_engine):
    params = slj.SamplingParams(max_tokens=20, ignore_eos=True)
    with make_engine() as engine:
        engine.add_request("a", [1, 2], params)
        with pytest.raises(ValueError, match="'a' is still being served"):
            engine.add_request("a", [1, 2], params)
        engine.step()
        engine.step()
        engine.abort("a")
        with pytest.raises(ValueError, match="'a' is still being served"):
            engine.add_request("a", [1, 2], params)
        while engine.has_unfinished:
            engine.step()
        assert len(engine.run([("a", [1, 2], params)])[0].token_ids) == 20


def test_finished_requests_leave_nothing_behind(make_engine):
    _many(make_engine, 300)


@pytest.mark.slow
def test_ten_thousand_finished_requests_leave_nothing_behind(make_engine):
    _many(make_engine, 10_000)


def _many(make_engine, count):
    params = slj.SamplingParams(max_tokens=1, ignore_eos=True)

    def held(engine):
        arrays = jax.live_arrays()
        own = (
            engine._loop.requests,
            engine._loop.news,
            engine._loop.ended_rows,
            engine._loop.scheduler.running,
        )
        return len(arrays), sum(a.nbytes for a in arrays), [len(x) for x in own]

    with make_engine(enable_prefix_caching=True) as engine:
        engine.run((f"w{i}", [i + 1] * 9, params) for i in range(8))
        before = held(engine)
        engine.run((f"r{i}", [i % 127 + 1] * 9, params) for i in range(count))
        assert held(engine) == before
        _assert_drained(engine)
        assert engine.metrics()["requests_finished_length"] == count + 8


def test_text_and_times(make_engine, model, monkeypatch):
    tokenizer = slj.load(dtype="float32").tokenizer
    monkeypatch.setattr(model, "tokenizer", tokenizer)
    with make_engine() as engine:
        engine.add_request("t", [1, 2, 3], slj.SamplingParams(max_tokens=12, ignore_eos=True))
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
    last = outputs[-1]
    assert last.text == tokenizer.decode(last.token_ids)
    assert all(last.text.startswith(output.text) for output in outputs)
    assert 0 <= last.times.queued <= last.times.first_token
    assert last.times.between_tokens > 0
