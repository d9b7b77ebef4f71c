"""Rounds outstanding: nothing read early, nothing shared, nothing held in the end."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.decoding import RoundDriver, references, rounds
from sparse_loop_jax.generation.outputs import sum_counters


class _ReadError(AssertionError):
    pass


class _Unread:
    """An array that may be copied in the background and handed on, and not looked at.

    Patching JAX's own arrays would miss reads through the buffer protocol, which is how
    NumPy reads them on a CPU.
    """

    def __init__(self, array):
        self.hidden = array

    def copy_to_host_async(self):
        self.hidden.copy_to_host_async()

    def _read(self, *_, **__):
        raise _ReadError

    __array__ = __dlpack__ = __dlpack_device__ = __jax_array__ = _read
    __int__ = __float__ = __bool__ = __index__ = __iter__ = __len__ = __getitem__ = _read
    __eq__ = __lt__ = __gt__ = __add__ = _read
    item = tolist = block_until_ready = any = all = sum = max = min = _read


def _unread(tree):
    return jax.tree.map(_Unread, tree)


def _hidden(tree):
    return jax.tree.map(lambda leaf: leaf.hidden if isinstance(leaf, _Unread) else leaf, tree)


@pytest.fixture(params=["dense", "sparse", "plain sparse"])
def kind(request, load_gold):
    """Options of a way to decode, and its golden tokens."""
    gold = load_gold("mha")
    sparse = None if request.param == "dense" else slj.SparseDecodeConfig(key_retention=0.1)
    speculative = None if request.param == "plain sparse" else slj.SpeculativeConfig(3, 3)
    want = gold.tokens(None if sparse is None else 0.1)
    return {"sparse": sparse, "speculative": speculative}, want


@pytest.fixture
def started(load_gold, kind):
    """A function that starts the golden prompts, and the golden tokens."""

    def start(**changes):
        options = {"max_new_tokens": 32, "eos_token_id": [], "outstanding_rounds": 2}
        gold = load_gold("mha")
        return slj.start(gold.model(), gold.prompts, **{**options, **kind[0], **changes})

    return start, kind[1]


def test_two_rounds_are_submitted_before_anything_is_read(started, monkeypatch):
    params, state, _ = started[0]()
    with RoundDriver(params, state) as driver:
        step = driver._step
        monkeypatch.setattr(
            driver, "_step", lambda *inputs: _unread(step(*map(_hidden, inputs)))
        )
        driver.submit()
        driver.submit()
        assert driver.outstanding == 2
        assert not driver.can_submit
        with pytest.raises(_ReadError):
            driver.collect()


def test_no_way_to_read_an_array_goes_unseen():
    array = _Unread(jax.numpy.arange(1))
    for read in (np.asarray, np.array, int, bool, list, jax.device_get, jax.numpy.asarray):
        with pytest.raises(_ReadError):
            read(array)
    array.copy_to_host_async()


def test_collected_rounds_are_the_golden_tokens(started):
    start, want = started
    params, state, first = start()
    got = [[int(t)] for t in first]
    with RoundDriver(params, state) as driver:
        while any(len(ids) < 32 for ids in got):
            while driver.can_submit:
                driver.submit()
            done = driver.collect()
            for ids, tokens, count in zip(got, done.tokens, done.count, strict=True):
                ids += tokens[:count].tolist()
    assert got == want


def test_outstanding_rounds_hold_disjoint_slots(started):
    params, state, _ = started[0]()
    if state.store is None:
        pytest.skip("dense rounds hold no slots")
    leases = []
    with RoundDriver(params, state) as driver:
        for _ in range(2):
            driver.submit()
            leases.append(set(np.asarray(driver._outputs[-1].lease.slots).ravel().tolist()))
        assert leases[0].isdisjoint(leases[1])
        rows = 2 * state.spec.rows
        assert int(driver.state.store.held.sum()) == 2 * rows == len(leases[0] | leases[1])
        # Retiring the older round, with the next submission, leaves the newer one alone.
        newer = driver._outputs[-1].lease
        before = _references(driver.state.store, newer)
        assert before["count"].any()
        driver.collect()
        driver.submit()
        jax.tree.map(
            np.testing.assert_array_equal, _references(driver.state.store, newer), before
        )
        drained = driver.drain()
    assert int(drained.store.held.sum()) == 0


def _references(store, lease):
    """Copies of all that the store holds in the slots of a lease, by field."""
    slots = np.asarray(lease.slots).ravel()
    names = ("version", "held", "count", "positions", "mass", "base")
    return {
        name: jax.tree.map(lambda array: np.asarray(array)[slots], getattr(store, name))
        for name in names
    }


@pytest.mark.parametrize("outstanding", [0, 1, 2])
def test_a_drain_in_the_middle_leaves_nothing_held(started, outstanding):
    params, state, _ = started[0]()
    driver = RoundDriver(params, state)
    for _ in range(outstanding):
        driver.submit()
    drained = driver.drain()
    if drained.store is not None:
        assert not bool(drained.store.held.any())
    assert driver.outstanding == 0
    with pytest.raises(RuntimeError, match="closed"):
        driver.submit()


class _InjectedError(Exception):
    pass


def _boom(*_, **__):
    raise _InjectedError


@contextlib.contextmanager
def _failing(monkeypatch, owner, name):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _boom)
        yield


def test_a_failed_dispatch_closes_and_the_next_request_is_exact(
    started, monkeypatch, compile_counter
):
    start, want = started
    params, state, _ = start()
    driver = RoundDriver(params, state)
    driver.submit()
    with _failing(monkeypatch, driver, "_step"), pytest.raises(_InjectedError):
        driver.submit()
    _assert_closed_and_usable(driver, start, want, compile_counter)


def test_a_failed_read_closes_and_the_next_request_is_exact(
    started, monkeypatch, compile_counter
):
    start, want = started
    params, state, _ = start()
    driver = RoundDriver(params, state)
    driver.submit()
    driver.submit()
    with _failing(monkeypatch, rounds.jax, "device_get"), pytest.raises(_InjectedError):
        driver.collect()
    _assert_closed_and_usable(driver, start, want, compile_counter)


def _assert_closed_and_usable(driver, start, want, compile_counter):
    assert driver.outstanding == 0
    with pytest.raises(RuntimeError, match="closed"):
        _ = driver.state
    with compile_counter() as compiled:
        params, state, first = start()
        with RoundDriver(params, state) as again:
            again.submit()
            done = again.collect()
    assert compiled.count == 0, compiled
    for row, ids in enumerate(want):
        assert first[row] == ids[0]
        assert done.tokens[row, : done.count[row]].tolist() == ids[1 : 1 + done.count[row]]


def test_a_refused_round_is_an_error_on_the_host(started):
    params, state, _ = started[0](outstanding_rounds=1)
    if state.store is None:
        pytest.skip("dense rounds are refused nothing")
    driver = RoundDriver(params, state, max_outstanding=2)  # more than the store has room for
    driver.submit()
    driver.submit()
    driver.collect()
    with pytest.raises(slj.StaleLeaseError, match="round: 2"):
        driver.collect()
    assert not driver.can_submit


def test_misuse_of_a_driver_is_refused(load_gold):
    params, state, _ = slj.start(load_gold("mha").model(), [[1]], max_new_tokens=4)
    with pytest.raises(ValueError, match="max_outstanding must be at least 1, got 0"):
        RoundDriver(params, state, max_outstanding=0)
    driver = RoundDriver(params, state, max_outstanding=1)
    with pytest.raises(RuntimeError, match="no round is outstanding"):
        driver.collect()
    driver.submit()
    with pytest.raises(RuntimeError, match="1 rounds are outstanding"):
        driver.submit()
    driver.close()
    driver.close()


def test_closing_lets_go_of_the_device_memory(load_gold):
    model = load_gold("mha").model()
    params, state, _ = slj.start(model, [[1]], max_new_tokens=4)
    shape = state.cache.keys[0].shape
    driver = RoundDriver(params, state)
    del state
    driver.submit()
    driver.close()
    assert [a for a in jax.live_arrays() if a.shape == shape] == []


def test_retiring_a_lease_outside_of_a_round_frees_it(load_gold):
    params, state, _ = slj.start(
        load_gold("mha").model(),
        [[1, 2]],
        max_new_tokens=4,
        eos_token_id=[],
        sparse=slj.SparseDecodeConfig(key_retention=0.5),
    )
    state, output = slj.decode_step(params, state, slj.no_lease(state))
    assert int(state.store.held.sum()) == 1
    state = references.retire(state, output.lease)
    assert int(state.store.held.sum()) == 0


# Streaming -----------------------------------------------------------------------------


@pytest.fixture
def order(monkeypatch):
    """A list that gets "s" with each submission of a round and "c" with each collection."""
    events = []
    for name in ("submit", "collect"):
        method = getattr(RoundDriver, name)

        def noted(self, method=method, event=name[0]):
            events.append(event)
            return method(self)

        monkeypatch.setattr(RoundDriver, name, noted)
    return events


@pytest.mark.parametrize("ahead", [1, 2])
def test_streamed_tokens_are_the_generated_ones(load_gold, kind, ahead, order):
    gold, (options, want) = load_gold("mha"), kind
    if options["speculative"] is not None:
        speculative = slj.SpeculativeConfig(3, 3, max_outstanding_rounds=ahead)
        options = {**options, "speculative": speculative}
    elif ahead == 1:
        pytest.skip("plain rounds are two ahead always")
    got, finished, stats = [[], []], {}, None
    for chunk in slj.stream(
        gold.model(), gold.prompts, max_new_tokens=32, eos_token_id=[], **options
    ):
        assert chunk.index not in finished
        got[chunk.index] += chunk.token_ids
        if chunk.finished:
            finished[chunk.index] = chunk.finish_reason
        else:
            assert chunk.finish_reason is None
        assert stats is None
        stats = chunk.stats
    assert got == want
    assert finished == {0: "length", 1: "length"}
    # Two rounds are on their way before the first is read, or one after the other.
    submitted, collected = order.count("s"), order.count("c")
    assert "".join(order).startswith("ss" if ahead == 2 else "sc")
    outstanding = np.cumsum([1 if event == "s" else -1 for event in order])
    assert outstanding.max() == ahead
    assert stats is not None  # of the last chunk alone
    assert (stats.rounds, stats.discarded_rounds) == (collected, submitted - collected)
    assert (stats.prompt_tokens, stats.generated_tokens) == (49, 64)
    assert 0 <= stats.accepted <= stats.drafted
    assert (stats.drafted > 0) == (options["speculative"] is not None)
    assert (stats.reference_store_bytes > 0) == (options["sparse"] is not None)


def test_the_stats_of_a_stream_are_those_of_generate(load_gold):
    gold = load_gold("mha")
    options = {
        "max_new_tokens": 32,
        "eos_token_id": [],
        "sparse": slj.SparseDecodeConfig(key_retention=0.1),
        "speculative": slj.SpeculativeConfig(3, 3),
    }
    want = vars(slj.generate(gold.model(), gold.prompts, **options).stats)
    *_, last = slj.stream(gold.model(), gold.prompts, **options)
    got = vars(last.stats)
    assert got.keys() == want.keys()
    measured = {"compile_seconds", "compilations", "prefill_seconds", "decode_seconds"}
    measured |= {"tokens_per_second", "peak_bytes"}
    assert got["implementations"] == want["implementations"]
    other = {"implementations", "discarded_rounds", "reference_store_bytes"}  # twice the slots
    for name in want.keys() - measured - other:
        assert got[name] == pytest.approx(want[name], rel=1e-5), name
    assert want["discarded_rounds"] == 0
    assert got["reference_store_bytes"] >= want["reference_store_bytes"]


def test_retained_mass_is_of_emitted_rows_alone(load_gold):
    """Speculation runs rows that are refused; what it says of the others is the same."""
    gold = load_gold("mha")
    plain, speculated = (
        list(
            slj.stream(
                gold.model(),
                gold.prompts,
                max_new_tokens=32,
                eos_token_id=[],
                sparse=slj.SparseDecodeConfig(key_retention=0.1),
                speculative=speculative,
            )
        )[-1].stats
        for speculative in (None, slj.SpeculativeConfig(3, 3))
    )
    assert speculated.accepted < speculated.drafted
    for name in ("retained_mass_mean", "retained_mass_min"):
        np.testing.assert_allclose(
            getattr(speculated, name), getattr(plain, name), rtol=1e-4, err_msg=name
        )


def test_retained_mass_is_the_golden_one(load_gold):
    gold = load_gold("mha")
    params, state, _ = slj.start(
        gold.model(),
        gold.prompts,
        max_new_tokens=32,
        eos_token_id=[],
        outstanding_rounds=2,
        sparse=slj.SparseDecodeConfig(key_retention=0.1),
    )
    with RoundDriver(params, state) as driver:
        rounds_ = []
        for _ in range(4):
            driver.submit()
            rounds_.append(driver.collect().counters)
    sparse = sum_counters(rounds_).sparse
    source = gold.sparse(0.1)
    want = np.stack([source[f"p{p}_s{s}_mass"] for p in range(2) for s in range(4)])
    assert sparse.mass_rows == 8
    np.testing.assert_allclose(sparse.mass_sum / 8, want.mean(axis=(0, 2)), rtol=1e-4)
    np.testing.assert_allclose(sparse.mass_min, want.min(axis=(0, 2)), rtol=1e-4)


def test_a_stream_stops_at_a_stop_token_and_wastes_one_round_at_most(
    load_gold, kind, monkeypatch
):
    gold, (options, want) = load_gold("mha"), kind
    submitted = []
    submit = RoundDriver.submit
    monkeypatch.setattr(
        RoundDriver, "submit", lambda self: (submitted.append(1), submit(self))[1]
    )
    stop = want[0][9]
    chunks = list(
        slj.stream(
            gold.model(), gold.prompts[:1], max_new_tokens=32, eos_token_id=stop, **options
        )
    )
    ids = [t for chunk in chunks for t in chunk.token_ids]
    assert ids == want[0][: want[0].index(stop) + 1]
    assert chunks[-1].finish_reason == "stop"
    # The first chunk is the prompt's; one round at most is dropped.
    assert chunks[-1].stats.discarded_rounds == len(submitted) - (len(chunks) - 1) <= 1


def test_leaving_a_stream_early_frees_everything(load_gold, kind):
    model = load_gold("mha").model()
    before = len(jax.live_arrays())
    chunks = slj.stream(model, [[1, 2, 3]], max_new_tokens=32, eos_token_id=[], **kind[0])
    next(chunks)
    chunks.close()
    assert len(jax.live_arrays()) == before


def test_streamed_text_adds_up_and_splits_no_character():
    model = slj.load(dtype="float32")
    # A prompt in bytes that the tokenizer must spread over tokens.
    whole = slj.generate(model, "naïve café —", max_new_tokens=12, eos_token_id=[])
    chunks = list(slj.stream(model, "naïve café —", max_new_tokens=12, eos_token_id=[]))
    assert "".join(chunk.text or "" for chunk in chunks) == whole.texts[0]


def test_a_character_of_several_tokens_comes_whole():
    from sparse_loop_jax.generation.inputs import Request
    from sparse_loop_jax.generation.stream import _Reader

    tokenizer = slj.load().tokenizer
    ids = tokenizer.encode("é—é").ids
    assert len(ids) > 3  # several tokens a character, or this shows nothing
    request = Request(np.asarray([1], np.int32), len(ids), (), 0)
    reader = _Reader(0, request, tokenizer)
    texts = [reader.take([token], [4]).text or "" for token in ids]
    assert "".join(texts) == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
