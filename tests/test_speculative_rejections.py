"""What a round of speculation leaves behind: refused drafts, and the ends of texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.decoding.device_loop import decode_tokens, empty_buffer
from sparse_loop_jax.decoding.speculative import RoundHooks

SPARSE = slj.SparseDecodeConfig(key_retention=0.1)


def _corrupt_from(place):
    """A draft whose candidates from `place` on are certainly wrong."""

    def candidate(tokens, i):
        return jnp.where(i >= place, -1, tokens)

    return RoundHooks(candidate=candidate)


@pytest.mark.parametrize(
    ("draft_loops", "place"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)]
)
@pytest.mark.parametrize("sparse", [None, SPARSE], ids=["dense", "sparse"])
def test_every_rejection_leaves_the_state_of_serial_decoding(
    load_gold, draft_loops, sparse, place
):
    gold = load_gold("mha")
    options = {"max_new_tokens": 32, "eos_token_id": [], "sparse": sparse}
    params, serial, _ = slj.start(gold.model(), gold.prompts, **options)
    lease = slj.no_lease(serial)
    serial_tokens = [serial.token.tolist()]
    for _ in range(place + 1):
        serial, output = slj.decode_step(params, serial, lease)
        lease = output.lease
        serial_tokens.append(serial.token.tolist())

    speculative = slj.SpeculativeConfig(3, draft_loops)
    params, state, _ = slj.start(gold.model(), gold.prompts, speculative=speculative, **options)
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
    if sparse is not None:
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
        gold.prompts,
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
        gold.prompts,
        max_new_tokens=8,
        eos_token_id=[],
        sparse=SPARSE,
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
        gold.prompts,
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
    assert np.asarray(tokens).T.tolist() == [ids[1:4] for ids in gold.tokens()]


def test_a_step_without_a_config_is_refused(load_gold):
    gold = load_gold("mha")
    params, state, _ = slj.start(gold.model(), [[1, 2]], max_new_tokens=2)
    with pytest.raises(ValueError, match="needs a state made with a SpeculativeConfig"):
        slj.speculative_step(params, state, slj.no_lease(state))


# Ends ----------------------------------------------------------------------------------


def test_a_stop_token_at_every_place_of_a_run(load_gold):
    gold = load_gold("mha")
    model, prompt, want = gold.model(), gold.prompts[1], gold.tokens()[1]
    accept_all = slj.SpeculativeConfig(3, 3)
    for stop in dict.fromkeys(want[:12]):
        out = slj.generate(
            model, [prompt], max_new_tokens=32, eos_token_id=stop, speculative=accept_all
        )
        assert out.token_ids == [want[: want.index(stop) + 1]]
        assert out.finish_reasons == ["stop"]


def test_the_stop_inside_a_forced_run_ends_the_text_there(load_gold):
    gold = load_gold("mha")
    prompt, want = gold.prompts[0], gold.tokens()[0]
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
