"""The engine when something fails: all requests end, nothing is held, the next one is exact."""

from __future__ import annotations

import gc

import jax
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.engine import device, sizing

KINDS = {
    "dense": (None, None),
    # As much capacity as the other engine tests have: the same programs.
    "both": (slj.SparseDecodeConfig(0.1, capacity=64), slj.SpeculativeConfig(3, 2)),
}


@pytest.fixture(scope="module")
def model(load_gold):
    return load_gold("mha").model()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def make_engine(model, kind):
    """A function that makes an engine whose pool is too small for `requests` at once."""

    def make(**scheduler):
        sparse, speculative = KINDS[kind]
        options = {"max_num_seqs": 4, "max_context": 128, "max_prefill_tokens": 64}
        return slj.Engine(
            model,
            cache=slj.CacheConfig(num_pages=4 * 24, page_size=8),
            scheduler=slj.SchedulerConfig(**{**options, **scheduler}),
            sparse=sparse,
            speculative=speculative,
        )

    return make


@pytest.fixture
def requests(load_gold, kind):
    """Requests, and the golden tokens that they get."""
    gold = load_gold("mha")
    source, name = (
        (gold.dense, "gen_tokens") if kind == "dense" else (gold.sparse(0.1), "tokens")
    )
    params = slj.SamplingParams(max_tokens=32, ignore_eos=True)
    asked = [
        (f"{p}{copy}", gold.dense[f"{p}_input_ids"].tolist(), params)
        for p in ("p1", "p0")
        for copy in "abc"
    ]
    want = {i: source[f"{i[:2]}_{name}"].tolist() for i, _, _ in asked}
    return asked, want


class _InjectedError(Exception):
    pass


@pytest.fixture
def fail_at(monkeypatch):
    """A function that lets the n-th call of `owner.name` from now on fail, once."""

    def arrange(owner, name, nth):
        function, calls = getattr(owner, name), []

        def failing(*args, **kwargs):
            calls.append(name)
            if len(calls) == nth:
                raise _InjectedError(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing)

    return arrange


def _assert_nothing_held(engine):
    metrics = engine.metrics()
    for name in ("requests_held", "rows_in_use", "pages_in_use", "outputs_outstanding"):
        assert metrics[name] == 0, name
    assert metrics["swapped_bytes_held"] == metrics["requests_waiting"] == 0
    assert not engine.has_unfinished


def _drive(engine, asked, final):
    for request in asked:
        engine.add_request(*request)
    while engine.has_unfinished:
        final.update((o.request_id, o) for o in engine.step())


def _assert_exact(engine, asked, want):
    assert {o.request_id: o.token_ids for o in engine.run(asked)} == want
    _assert_nothing_held(engine)


def _assert_fails_once(engine, requests, compile_counter):
    (asked, want), final = requests, {}
    with pytest.raises(_InjectedError):
        _drive(engine, asked, final)
    final.update((o.request_id, o) for o in engine.step())
    assert final.keys() == want.keys()
    assert all(output.finished for output in final.values())
    assert "error" in {output.finish_reason for output in final.values()}
    for request_id, output in final.items():
        assert output.token_ids == want[request_id][: len(output.token_ids)]
        assert output.finish_reason == "error" or len(output.token_ids) == 32
    _assert_nothing_held(engine)
    assert engine.metrics()["failures"] == 1
    with compile_counter() as compiled:
        _assert_exact(engine, asked, want)
    assert compiled.count == 0, compiled


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "name", ["prefill_rows", "edit_rows", "take_pages", "put_pages", "restore_row"]
)
def test_a_failed_dispatch(make_engine, requests, fail_at, compile_counter, name, nth):
    with make_engine() as engine:
        _assert_exact(engine, *requests)
        fail_at(device, name, nth)
        _assert_fails_once(engine, requests, compile_counter)


@pytest.mark.parametrize("nth", [1, 2, 9])
def test_a_failed_round(make_engine, requests, fail_at, compile_counter, nth):
    with make_engine() as engine:
        _assert_exact(engine, *requests)
        fail_at(engine._loop.executor.driver, "_step", nth)
        _assert_fails_once(engine, requests, compile_counter)


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 12, 13, 14])
def test_a_failed_read(make_engine, requests, fail_at, compile_counter, nth):
    """Of a prompt's token, of a round, of pages on their way out."""
    with make_engine() as engine:
        _assert_exact(engine, *requests)
        fail_at(jax, "device_get", nth)
        _assert_fails_once(engine, requests, compile_counter)


def test_a_failed_run_leaves_the_engine_free(make_engine, requests, fail_at):
    with make_engine() as engine:
        fail_at(jax, "device_get", 3)
        with pytest.raises(_InjectedError):
            engine.run(requests[0])
        _assert_nothing_held(engine)
        _assert_exact(engine, *requests)


def test_an_allocation_that_fails_after_a_failure(make_engine, requests, fail_at):
    asked, want = requests
    with make_engine() as engine:
        fail_at(device, "prefill_rows", 1)
        with pytest.raises(_InjectedError, match="prefill_rows"):
            _drive(engine, asked, {})
        assert {o.finish_reason for o in engine.step()} == {"error"}
        fail_at(device, "new_state", 1)
        with pytest.raises(_InjectedError, match="new_state"):
            _drive(engine, asked, {})
        assert {o.finish_reason for o in engine.step()} == {"error"}
        _assert_exact(engine, asked, want)


def test_room_for_a_longer_request_that_cannot_be_had(
    make_engine, requests, fail_at, monkeypatch
):
    monkeypatch.setattr(sizing, "_FIRST_SPAN", 128)
    asked, want = requests
    long = ("long", [1] * 150, slj.SamplingParams(max_tokens=2))
    with make_engine(max_context=512) as engine:
        fail_at(device, "resize", 1)
        with pytest.raises(_InjectedError):
            _drive(engine, [*asked, long], {})
        assert len(engine.step()) > 0
        _assert_nothing_held(engine)
        # At the old sizes again.
        assert engine._loop.executor.sizes.width == 128 // 8
        _assert_exact(engine, asked, want)


@pytest.mark.parametrize("kind", ["dense"], indirect=True)
def test_a_failure_forgets_kept_prompts(model, requests, fail_at):
    asked, want = requests
    cache = slj.CacheConfig(num_pages=4 * 24, page_size=8, enable_prefix_caching=True)
    scheduler = slj.SchedulerConfig(max_num_seqs=4, max_context=128, max_prefill_tokens=64)
    with slj.Engine(model, cache=cache, scheduler=scheduler) as engine:
        engine.run(asked[:2])
        assert engine.metrics()["pages_kept"] > 0
        fail_at(device, "edit_rows", 1)
        with pytest.raises(_InjectedError):
            _drive(engine, asked[:2], {})
        engine.step()
        assert engine.metrics()["pages_kept"] == 0
        outputs = engine.run(asked[:2])
        assert [o.reused_prompt_tokens for o in outputs] == [0, 0]
        assert [o.token_ids for o in outputs] == [want[i] for i, _, _ in asked[:2]]


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 30])
def test_close_in_the_middle_lets_go_of_everything(make_engine, requests, steps):
    gc.collect()
    before = len(jax.live_arrays())
    engine = make_engine()
    for request in requests[0]:
        engine.add_request(*request)
    for _ in range(steps):
        engine.step()
    assert len(jax.live_arrays()) > before
    engine.close()
    engine.close()
    gc.collect()
    assert len(jax.live_arrays()) == before
    _assert_nothing_held(engine)
    counted = engine.metrics()
    ended = sum(counted[f"requests_finished_{how}"] for how in ("stop", "length", "abort"))
    assert ended == len(requests[0])
    for use in (
        engine.step,
        lambda: engine.add_request("a", [1]),
        lambda: engine.run([("a", [1], None)]),
    ):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            use()
    assert not engine.abort("p0a")
