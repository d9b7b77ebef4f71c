"""The steps underneath `generate`: K/V planes, states of each loop, logits, isolation."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.decoding.device_loop import decode_tokens, empty_buffer
from sparse_loop_jax.decoding.loops import Rows, run_loops
from sparse_loop_jax.kernels.paged_attention.xla import gather_pages


def _start(gold, **options):
    prompts = gold.prompts
    return slj.start(gold.model(), prompts, max_new_tokens=32, eos_token_id=[], **options)


def test_the_prefill_leaves_the_golden_planes(gold):
    _, state, first = _start(gold)
    assert first[0] == gold.dense["p0_gen_tokens"][0]
    tokens = len(gold.dense["p0_input_ids"])
    for loop in range(4):
        table = state.cache.page_table[:, loop]
        for layer in range(gold.config.num_hidden_layers):
            for pool, name in ((state.cache.keys, "cache_k"), (state.cache.values, "cache_v")):
                plane = gather_pages(pool[layer], table)[0, :tokens].swapaxes(0, 1)
                want = gold.dense[f"p0_{name}"][loop, layer]
                np.testing.assert_allclose(plane, want, atol=1e-4)


def test_each_step_has_the_golden_logits(gold):
    params, state, _ = _start(gold)
    for step in range(1, 6):
        state, output = slj.decode_step(params, state, slj.no_lease(state))
        for row, name in enumerate(("p0", "p1")):
            want = gold.dense[f"{name}_gen_logits"][step]
            np.testing.assert_allclose(output.logits[row, 0], want, atol=1e-3)
            assert output.tokens[row, 0] == gold.dense[f"{name}_gen_tokens"][step]
        assert output.count.tolist() == [1, 1]


def test_each_loop_has_the_golden_state(gold):
    params, state, _ = _start(gold)
    hidden, cache = params.embed[state.token][:, None], state.cache
    rows = Rows(state.position[:, None], jnp.ones((2, 1), bool))
    run = jax.jit(run_loops, static_argnames=("spec", "depths"))
    for loop in range(4):
        done = run(params, state.spec, hidden, rows, cache, range(loop, loop + 1))
        hidden, cache = done.hidden, done.cache
        for row, name in enumerate(("p0", "p1")):
            want = gold.dense[f"{name}_decode_hidden"][0, loop]
            np.testing.assert_allclose(hidden[row, 0], want, atol=1e-4)


def test_what_lies_beyond_a_request_is_never_read(gold):
    params, state, _ = _start(gold)
    lease = slj.no_lease(state)
    clean, want = slj.decode_step(params, jax.tree.map(jnp.copy, state), lease)
    poisoned, output = slj.decode_step(params, _poison_unused(state), lease)
    assert not np.isnan(output.logits).any()
    np.testing.assert_array_equal(output.logits, want.logits)
    assert clean.token.tolist() == poisoned.token.tolist()
    for row, name in enumerate(("p0", "p1")):
        assert output.tokens[row, 0] == gold.dense[f"{name}_gen_tokens"][1]


def _poison_unused(state):
    """The state with NaN at every position of every page that holds no token yet."""
    cache = state.cache
    used = np.zeros((cache.num_pages, cache.page_size), bool)
    for table, tokens in zip(
        np.asarray(cache.page_table), state.position.tolist(), strict=True
    ):
        for plane in table:
            for token in range(tokens):
                used[plane[token // cache.page_size], token % cache.page_size] = True
    assert not used.all()
    keep = jnp.asarray(used)[:, None, :, None]

    def poison(pools):
        return tuple(jnp.where(keep, pool, jnp.nan) for pool in pools)

    cache = dataclasses.replace(cache, keys=poison(cache.keys), values=poison(cache.values))
    return dataclasses.replace(state, cache=cache)


@pytest.mark.parametrize("loop", range(4))
@pytest.mark.parametrize("layer", range(2))
@pytest.mark.parametrize("name", ["keys", "values"])
def test_every_plane_is_read(load_gold, name, loop, layer):
    gold = load_gold("mha")
    params, state, _ = _start(gold)
    pages = state.cache.page_table[0, loop, :1]
    pools = list(getattr(state.cache, name))
    pools[layer] = pools[layer].at[pages].set(jnp.nan)
    cache = dataclasses.replace(state.cache, **{name: tuple(pools)})
    _, output = slj.decode_step(
        params, dataclasses.replace(state, cache=cache), slj.no_lease(state)
    )
    assert np.isnan(output.logits[0]).all()
    assert not np.isnan(output.logits[1]).any()


def test_permuted_pages_change_nothing(gold):
    params, state, _ = _start(gold)
    cache = state.cache
    order = jnp.asarray(np.random.default_rng(0).permutation(cache.num_pages))
    where = jnp.argsort(order).astype(jnp.int32)
    table = jnp.where(
        cache.page_table < cache.num_pages,
        where.at[cache.page_table].get(mode="clip"),
        cache.num_pages,
    )
    moved = dataclasses.replace(
        cache,
        keys=tuple(pool[order] for pool in cache.keys),
        values=tuple(pool[order] for pool in cache.values),
        page_table=table,
    )
    lease = slj.no_lease(state)
    _, want = slj.decode_step(params, jax.tree.map(jnp.copy, state), lease)
    _, got = slj.decode_step(params, dataclasses.replace(state, cache=moved), lease)
    np.testing.assert_array_equal(got.logits, want.logits)


def _one_layer(gold) -> slj.Ouro:
    """The golden model's first layer, which compiles in half the time."""
    config = dataclasses.replace(gold.config, num_hidden_layers=1)
    return slj.Ouro(
        config, params=dataclasses.replace(gold.params, layers=gold.params.layers[:1])
    )


@pytest.fixture(scope="module", params=["decode_step", "decode_tokens"])
def compiled_step(request, load_gold):
    """A plain dense step, and the whole device loop of sparse speculation.

    A state, and a function from the number of pages of each pool to the compiled program.
    """
    gold, options = load_gold("mha"), {}
    if request.param == "decode_tokens":
        options["sparse"] = slj.SparseDecodeConfig(key_retention=0.25)
        options["speculative"] = slj.SpeculativeConfig(2, draft_loops=1)
    prompts = gold.prompts
    params, state, _ = slj.start(
        _one_layer(gold), prompts, max_new_tokens=32, eos_token_id=[], **options
    )

    @functools.cache
    def compiled(pages):
        shape = (pages, *state.cache.keys[0].shape[1:])
        pools = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in state.cache.keys)
        cache = dataclasses.replace(state.cache, keys=pools, values=pools)
        grown, lease = dataclasses.replace(state, cache=cache), slj.no_lease(state)
        if request.param == "decode_step":
            return slj.decode_step.lower(params, grown, lease).compile()
        buffer = empty_buffer(state, 32)
        return decode_tokens.lower(params, grown, buffer, lease, jnp.int32(32)).compile()

    return state, compiled


@pytest.mark.parametrize("line", ["copy(f32[64,4,16,16] %p)", "copy-start(f32[64,4,16,16] %p)"])
def test_a_copy_of_a_pool_would_be_seen(line):
    line = f'  %c = f32[64,4,16,16]{{3,2,1,0}} {line}, metadata={{op_name="a=b"}}'
    assert _copies(line, (64, 4, 16, 16)) == [line]
    assert _copies(line, (64, 4, 16, 8)) == []


def _copies(text: str, shape: tuple[int, ...]) -> list[str]:
    """Lines of a compiled program that copy an array of this shape."""
    dims = ",".join(map(str, shape))
    copy = re.compile(rf"\[{dims}\]\S* copy(-start)?\(")
    return [line for line in text.splitlines() if copy.search(line)]


def test_a_step_copies_no_pool(compiled_step):
    state, compiled = compiled_step
    program = compiled(64)
    shape = (64, *state.cache.keys[0].shape[1:])
    assert f"f32[{','.join(map(str, shape))}]" in program.as_text()
    assert _copies(program.as_text(), shape) == []
    pools = 2 * 4 * int(np.prod(shape))
    assert program.memory_analysis().alias_size_in_bytes >= pools


def test_the_cost_of_a_step_does_not_grow_with_the_pool(compiled_step):
    _, compiled = compiled_step
    few, many = compiled(64), compiled(4096)
    assert few.cost_analysis()["flops"] == many.cost_analysis()["flops"]
    temporaries = [p.memory_analysis().temp_size_in_bytes for p in (few, many)]
    assert temporaries[0] == temporaries[1]


def test_ouro_1_4b_decodes_abstractly():
    from sparse_loop_jax.models import OURO_1_4B, param_shapes

    params = param_shapes(OURO_1_4B, jnp.bfloat16)
    state = jax.eval_shape(lambda: _abstract_state(OURO_1_4B))
    _, output = jax.eval_shape(slj.decode_step, params, state, slj.no_lease(state))
    assert output.logits.shape == (8, 1, 49152)


def _abstract_state(config):
    from sparse_loop_jax.cache import create_cache
    from sparse_loop_jax.decoding import DecodeSpec, RequestParams

    zeros = jnp.zeros((8,), jnp.int32)
    table = np.zeros((8, 4, 512), np.int32)
    return slj.DecodeState(
        cache=create_cache(config, table, 8 * 4 * 512, 16, jnp.bfloat16),
        request=RequestParams(
            temperature=zeros.astype(jnp.float32),
            top_k=zeros,
            top_p=zeros.astype(jnp.float32),
            exit_threshold=zeros.astype(jnp.float32),
            min_loops=zeros,
            max_loops=zeros,
            stop_ids=zeros[:, None],
            key=jax.random.split(jax.random.key(0), 8),
        ),
        token=zeros,
        position=zeros,
        remaining=zeros,
        stopped=zeros.astype(bool),
        store=None,
        key_counts=None,
        history=None,
        spec=DecodeSpec(config),
    )
