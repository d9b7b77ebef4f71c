"""The parts of the engine that need no device, its limits and its numbers."""

from __future__ import annotations

import re

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.decoding import DecodeSpec
from sparse_loop_jax.engine import memory
from sparse_loop_jax.engine.blocks import BlockPool, prompt_hashes
from sparse_loop_jax.engine.request import Request
from sparse_loop_jax.engine.sizing import sizing_for
from sparse_loop_jax.engine.waiting import WaitingQueue
from sparse_loop_jax.generation.options import ExitRule


@pytest.fixture(scope="module")
def model(load_gold):
    return load_gold("mha").model()


@pytest.fixture(scope="module")
def make_engine(model):
    def make(*, scheduler=None, sparse=None, speculative=None, **cache):
        options = {"max_num_seqs": 4, "max_context": 128, "max_prefill_tokens": 64}
        pool = {} if "memory_bytes" in cache else {"num_pages": 4 * 24}
        return slj.Engine(
            model,
            cache=slj.CacheConfig(**{"page_size": 8, **pool, **cache}),
            scheduler=slj.SchedulerConfig(**{**options, **(scheduler or {})}),
            sparse=sparse,
            speculative=speculative,
        )

    return make


# Blocks --------------------------------------------------------------------------------


def _take(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.take(count)
    assert blocks is not None
    return blocks


def test_blocks_are_handed_out_once_and_come_back():
    pool = BlockPool(4)
    blocks = _take(pool, 3)
    assert sorted(blocks) == sorted(set(blocks))
    assert pool.take(2) is None
    assert (pool.in_use, pool.available) == (3, 1)
    pool.release(blocks)
    assert (pool.in_use, pool.available) == (0, 4)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([blocks[0]])


def test_published_blocks_are_kept_until_the_room_is_needed_oldest_first():
    pool = BlockPool(3)
    hashes = prompt_hashes(np.arange(24), 8)
    blocks = _take(pool, 3)
    for block, digest in zip(blocks, hashes, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert (pool.in_use, pool.kept) == (0, 3)
    assert pool.find(hashes) == blocks
    # The end of a prompt goes first: without its beginning nobody could use it.
    assert pool.take(1) == [blocks[2]]
    assert pool.find(hashes) == blocks[:2]
    pool.share(blocks[0])
    assert pool.take(2) is None
    assert pool.take(1) == [blocks[1]]
    assert pool.find(hashes) == blocks[:1]
    pool.forget()
    assert pool.find(hashes) == []


def test_hashes_depend_on_all_tokens_before():
    one, other = np.arange(20), np.arange(20)
    other[0] = 7
    mine, theirs = prompt_hashes(one, 8), prompt_hashes(other, 8)
    assert len(mine) == len(theirs) == 2
    assert set(mine).isdisjoint(theirs)
    assert prompt_hashes(one[:16], 8) == mine


@hypothesis.given(st.data())
def test_the_pool_is_a_bookkeeper(data):
    """Random use against owners counted by hand."""
    pool, held, published = BlockPool(6), [], 0
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["take", "share", "release", "publish"]))
        if action == "take":
            got = pool.take(data.draw(st.integers(0, 4)))
            if got is not None:
                assert not {b for blocks in held for b in blocks} & set(got)
                held.append(got)
        elif action == "share" and held:
            blocks = list(data.draw(st.sampled_from(held)))
            for block in blocks:
                pool.share(block)
            held.append(blocks)
        elif action == "release" and held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif action == "publish" and held and held[-1]:
            pool.publish(held[-1][0], published.to_bytes(4))
            published += 1
        owned = {b for blocks in held for b in blocks}
        assert pool.in_use == len(owned)
        assert pool.available == 6 - len(owned)
        assert pool.kept <= pool.available


# Sizes ---------------------------------------------------------------------------------


def _sizing(model, rows, budget):
    scheduler = slj.SchedulerConfig(max_num_seqs=rows, max_prefill_tokens=budget)
    return sizing_for(
        DecodeSpec(model.config), None, scheduler,
        max_context=8192, page_size=16, num_blocks=64, outstanding=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "budget", "left", "shape"),
    [
        (32, 8192, [256] * 32, (32, 256)),
        (32, 8192, [256], (1, 256)),
        (32, 8192, [256, 256], (1, 256)),  # the other 30 rows would cost more than a call
        (32, 8192, [30] * 12, (32, 32)),  # for short prompts they do not
        (32, 8192, [600], (1, 512)),  # and 128 for the rest, not 2048
        (32, 8192, [1800, 10], (1, 2048)),
        (32, 8192, [512] * 16, (16, 512)),
        (4, 64, [100], (1, 32)),
        (4, 20, [100, 7], (1, 20)),  # no chunk is within the budget
    ],
)
def test_prompts_run_in_the_program_that_does_most_for_its_cost(
    model, rows, budget, left, shape
):
    sizing = _sizing(model, rows, budget)
    assert sizing.prefill_shape(left) == shape
    assert shape in sizing.prefill_shapes()


def test_programs_of_prompts_are_few_and_within_the_budget(model):
    shapes = _sizing(model, 32, 8192).prefill_shapes()
    assert len(shapes) == 10
    assert max(rows * chunk for rows, chunk in shapes) == 8192


# Order ---------------------------------------------------------------------------------


def _request(name, arrival, priority=0):
    return Request(
        name, np.ones(1, np.int32), slj.SamplingParams(), stop_ids=(), priority=priority,
        arrival=arrival, tokenizer=None, exit_rule=ExitRule(1.0, 1, 4, 4),
    )  # fmt: skip


@pytest.mark.parametrize(("bound", "expected"), [(0, 0), (1, 1), (3, 3)])
def test_nobody_is_passed_over_more_often_than_the_bound(bound, expected):
    queue = WaitingQueue("priority", bound)
    old = _request("old", 0, priority=9)
    queue.add(old)
    for arrival in range(1, 8):
        queue.add(_request(str(arrival), arrival))
    order = []
    while len(queue):
        order.append(queue.first(1)[0])
        queue.admit(order[-1])
    assert order.index(old) == expected
    assert [r.arrival for r in order if r is not old] == list(range(1, 8))


def test_first_come_first_served_ignores_priorities():
    queue = WaitingQueue("fcfs", 8)
    for arrival, priority in enumerate((3, 1, 2)):
        queue.add(_request(str(arrival), arrival, priority))
    assert [r.arrival for r in queue] == [0, 1, 2]


def test_a_large_request_is_passed_over_and_then_protected(make_engine):
    params = slj.SamplingParams(max_tokens=20, ignore_eos=True)
    with make_engine(scheduler={"max_bypasses": 2, "max_num_seqs": 3}) as engine:
        engine.add_request("running", [1] * 80, params)
        engine.step()
        engine.add_request("large", [2] * 107, slj.SamplingParams(max_tokens=2))
        for i in range(6):
            engine.add_request(f"small{i}", [3], slj.SamplingParams(max_tokens=2))
        order = []
        while engine.has_unfinished:
            engine.step()
            order += [r.id for r in engine._loop.scheduler.running if r.id not in order]
    assert order == [
        "running",
        "small0",
        "small1",
        "large",
        *(f"small{i}" for i in range(2, 6)),
    ]


# Limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"max_tokens": True}, "max_tokens must be an integer >= 1, got True"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be a finite number >= 0, got nan"),
        ({"top_k": 0}, "top_k must be an integer >= 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"seed": -1}, r"seed must be an integer in \[0, 2\^63\), got -1"),
        ({"stop": ("a", "")}, "stop must be a text or a tuple of texts, none of them empty"),
        ({"stop": 5}, "stop must be a text or a tuple of texts, none of them empty: 5"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a tuple of token ids, got 3"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must be a tuple of token ids"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"exit_threshold": 1.5}, r"exit_threshold must be in \[0, 1\], got 1.5"),
    ],
)
def test_sampling_params_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        slj.SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_pages": 0}, "num_pages must be an integer >= 1, got 0"),
        (
            {"num_pages": 4, "memory_bytes": 4},
            "num_pages or memory_bytes, not both: got 4 and 4",
        ),
        ({"page_size": 12}, "page_size must be a power of two, got 12"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False, got 1"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1.0"),
        ({"utilization": 0.0}, r"utilization must be in \(0, 1\], got 0.0"),
        ({"device_bytes": -5}, "device_bytes must be an integer >= 1, got -5"),
    ],
)
def test_cache_configs_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        slj.CacheConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer >= 1, got 0"),
        ({"max_prefill_tokens": 1.5}, "max_prefill_tokens must be an integer >= 1, got 1.5"),
        ({"max_context": 0}, "max_context must be an integer >= 1, got 0"),
        ({"max_bypasses": -1}, "max_bypasses must be an integer >= 0, got -1"),
        ({"policy": "lifo"}, "policy must be 'fcfs' or 'priority', got 'lifo'"),
    ],
)
def test_scheduler_configs_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        slj.SchedulerConfig(**values)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("", [1], None), "request_id must be a string that is not empty"),
        ((3, [1], None), "request_id must be a string that is not empty"),
        (("a", [], None), "is empty"),
        (("a", [1, 128], None), "token id 128, outside the vocabulary of 128"),
        (("a", "text", None), "the model has no tokenizer"),
        (("a", [1], {"max_tokens": 3}), "params must be SamplingParams"),
        (
            ("a", [1] * 100, slj.SamplingParams(max_tokens=30)),
            "need a context of 129 tokens and this engine serves 128",
        ),
        (
            ("a", [1], slj.SamplingParams(stop_token_ids=(500,))),
            "stop_token_ids has 500, which is not a token id below 128",
        ),
        (
            ("a", [1], slj.SamplingParams(stop_token_ids=tuple(range(1, 10)))),
            "has 10 stop tokens and the engine takes 8",
        ),
    ],
)
def test_impossible_requests_are_refused_and_disturb_nobody(make_engine, request_, message):
    with make_engine() as engine:
        engine.add_request("there", [1, 2, 3], slj.SamplingParams(max_tokens=4))
        with pytest.raises(ValueError, match=message):
            engine.add_request(*request_)
        with pytest.raises(ValueError, match="priority must be an integer, got 'high'"):
            engine.add_request("b", [1], priority="high")
        with pytest.raises(RuntimeError, match="1 requests are being served"):
            engine.run([])
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        assert {output.request_id for output in outputs} == {"there"}
        assert len(outputs[-1].token_ids) == 4


def test_a_request_beyond_the_pool_is_refused_with_both_numbers(make_engine):
    with (
        make_engine(num_pages=4 * 5) as engine,
        pytest.raises(ValueError, match="need 24 pages and the pool has 20"),
    ):
        engine.add_request("a", [1] * 40, slj.SamplingParams(max_tokens=2))


def test_leaving_early_needs_plain_decoding(make_engine):
    params = slj.SamplingParams(exit_threshold=0.5)
    with (
        make_engine(speculative=slj.SpeculativeConfig(3, 2)) as engine,
        pytest.raises(ValueError, match=r"exit_threshold 0\.5 leaves early"),
    ):
        engine.add_request("a", [1], params)


def test_a_run_with_a_bad_request_leaves_none_behind(make_engine):
    with make_engine() as engine:
        with pytest.raises(ValueError, match="is empty"):
            engine.run([("a", [1], None), ("b", [], None)])
        assert not engine.has_unfinished
        assert len(engine.run([("a", [1], None)])) == 1


def test_engines_of_parts_that_do_not_fit_are_refused(make_engine, model):
    with pytest.raises(ValueError, match="max_context 513 is beyond the model's 512 positions"):
        make_engine(scheduler={"max_context": 513})
    with pytest.raises(
        ValueError, match="no room for one page in each of 4 loops: num_pages 3"
    ):
        make_engine(num_pages=3)
    with pytest.raises(ValueError, match="capacity 2 is below the 13 keys"):
        make_engine(sparse=slj.SparseDecodeConfig(0.1, capacity=2))
    with pytest.raises(ValueError, match="cache must be a CacheConfig, got 5"):
        slj.Engine(model, cache=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="draft_loops must be below the model's 4 loops"):
        make_engine(speculative=slj.SpeculativeConfig(3, 4))


# Memory --------------------------------------------------------------------------------


def _bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("sparse", [None, slj.SparseDecodeConfig(0.3)])
def test_the_plan_is_what_is_taken(make_engine, sparse):
    with make_engine(sparse=sparse) as engine:
        plan, state = engine.memory_plan, engine._loop.executor.driver.state
        assert plan.kv_pool == state.cache.nbytes
        assert plan.reference_store == (0 if sparse is None else state.store.nbytes)
        assert plan.rows + plan.kv_pool + plan.reference_store == _bytes(state) == plan.total
        assert plan.num_pages == state.cache.num_pages == 96
        assert plan.weights == _bytes(engine._model.params)


def test_memory_bytes_are_pages(make_engine):
    page_bytes = 2 * 2 * 4 * 8 * 16 * 4  # K and V, layers, heads, tokens, head_dim, float32
    with make_engine(memory_bytes=page_bytes * 43) as engine:
        assert engine.memory_plan.num_pages == 40  # a multiple of the loops
        assert engine.memory_plan.kv_pool == 40 * page_bytes


def test_a_limit_is_held_with_all_the_numbers(make_engine, monkeypatch):
    with make_engine() as engine:
        known = engine.memory_plan
    temporaries = 1000
    monkeypatch.setattr(memory, "_step_temporaries", lambda *_: temporaries)
    limit = known.total + temporaries
    with make_engine(device_bytes=limit) as engine:
        assert (engine.memory_plan.limit, engine.memory_plan.total) == (limit, limit)
    with pytest.raises(ValueError, match="the engine does not fit") as refused:
        make_engine(device_bytes=limit - 1)
    for number in (known.kv_pool, known.rows, temporaries, limit, limit - 1, known.weights, 96):
        assert f"{number:,}" in str(refused.value)
    for knob in ("num_pages", "max_num_seqs", "max_context", "key_retention", "device_bytes"):
        assert knob in str(refused.value)


def test_what_the_device_has_free_decides_the_pool(model, monkeypatch):
    monkeypatch.setattr(memory, "_step_temporaries", lambda *_: 0)
    scheduler = slj.SchedulerConfig(max_num_seqs=4, max_context=128)
    monkeypatch.setattr(memory, "_device_free", lambda _: 10**6)
    cache = slj.CacheConfig(page_size=8, utilization=0.5)
    with slj.Engine(model, cache=cache, scheduler=scheduler) as engine:
        plan = engine.memory_plan
        assert plan.device_free == 10**6
        assert plan.limit is not None
        assert plan.limit == 5 * 10**5
        assert 0 <= plan.limit - plan.total < 4 * 8192  # a page of all loops
    monkeypatch.setattr(memory, "_device_free", lambda _: 10**9)
    with slj.Engine(model, cache=cache, scheduler=scheduler) as engine:
        # No more than could ever be used.
        assert engine.memory_plan.num_pages == 4 * 4 * 128 // 8


def test_temporaries_are_those_of_the_compiled_steps(make_engine, compile_counter):
    with make_engine(device_bytes=10**9) as engine:
        assert engine.memory_plan.step_temporaries > 0
        # What was compiled to be measured is what runs.
        with compile_counter() as compiled:
            engine._loop.executor.submit_round([])
        assert "jit(decode_step)" not in compiled.names, compiled
        engine._loop.executor.collect()


# Numbers -------------------------------------------------------------------------------


def test_metrics_count_what_happened(make_engine):
    with make_engine() as engine:
        params = slj.SamplingParams(max_tokens=5, ignore_eos=True)
        engine.run([("a", [1, 2, 3], params), ("b", [4] * 40, params)])
        engine.add_request("c", [1], params)
        engine.abort("c")
        engine.step()
        numbers = engine.metrics()
        assert numbers["prompt_tokens"] == 44
        assert numbers["generated_tokens"] == 10
        assert numbers["requests_finished_length"] == 2
        assert numbers["requests_finished_abort"] == 1
        assert numbers["time_to_first_token_seconds_count"] == 2
        assert numbers["pages"] == 96
        assert numbers["rows"] == 4
        text = engine.prometheus()
    names = set()
    for line in text.splitlines():
        assert re.fullmatch(
            r'# TYPE \w+ (counter|gauge|histogram)|\w+(\{le="[^"]+"\})? -?[\d.e+-]+', line
        ), line
        names.add(line.split()[2] if line.startswith("#") else "")
    assert "sparse_loop_generated_tokens_total 10" in text.splitlines()
    assert 'sparse_loop_time_to_first_token_seconds_bucket{le="+Inf"} 2' in text.splitlines()
    assert "sparse_loop_pages_in_use" in names
