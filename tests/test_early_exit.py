"""Early exit: against a replay by hand, a row alone and in a batch, and the work it leaves."""

from __future__ import annotations

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.decoding import DecodeSpec, exits, steps
from sparse_loop_jax.generation.options import ExitRule

NEW = 10
SIZE = 8  # tokens in a page
PROMPTS = [[5, 80, 33], [9, 101, 2, 64, 77, 12, 3], [120, 44], [17, 18, 90, 6, 52]]
# exit_threshold, min_loops, max_loops: by the gate, by a bound, by both, never.
NEVER = (1.0, 1, None)
RULES = [
    (0.6, 1, None),
    (1.0, 1, 2),
    (0.2, 2, 3),
    NEVER,
    (0.0, 1, None),
    (0.8, 3, None),
]


@pytest.fixture(scope="module")
def model(ascii_checkpoint):
    return slj.load(ascii_checkpoint, dtype="float32")


def _options(rule) -> dict:
    return dict(zip(("exit_threshold", "min_loops", "max_loops"), rule, strict=True))


# By hand -------------------------------------------------------------------------------


class ByHand:
    """One request, row by row, in NumPy and float64; K/V in lists by loop and layer."""

    def __init__(self, model, rule):
        self.config = config = model.config
        self.params = jax.tree.map(lambda a: np.asarray(a, np.float64), model.params)
        self.threshold, self.least, most = rule
        self.most = config.total_ut_steps if most is None else most
        self.kv = [[[] for _ in self.params.layers] for _ in range(config.total_ut_steps)]

    def run(self, prompt, new):
        tokens, loops, hidden = [], [], []
        for position, token in enumerate(prompt):
            hidden = self._loops(token, position, self.config.total_ut_steps)
        while True:
            loop = self._leaves(hidden)
            logits = self.params.lm_head @ hidden[loop - 1]
            best, second = np.sort(logits)[[-1, -2]]
            assert best - second > 1e-4, "a near tie proves nothing: take other prompts"
            tokens.append(int(np.argmax(logits)))
            loops.append(loop)
            if len(tokens) == new:
                return tokens, loops
            hidden = self._loops(tokens[-1], len(prompt) + len(tokens) - 1)

    def _loops(self, token, position, depth=0):
        """States after each loop until the row leaves, `depth` at least; K/V of all loops."""
        x, hidden = self.params.embed[token], []
        while len(hidden) < depth or not self._leaves(hidden):
            x = self._one_loop(x, position, self.kv[len(hidden)])
            hidden.append(x)
        for skipped in self.kv[len(hidden) :]:
            for planes, last in zip(skipped, self.kv[len(hidden) - 1], strict=True):
                planes.append(last[-1])
        return hidden

    def _leaves(self, hidden):
        """The loop, counted from 1, after which these states leave; 0 if not yet."""
        stays = 1.0
        for loop, x in enumerate(hidden, 1):
            gate = (self.params.exit_gate @ x + self.params.exit_gate_bias)[0]
            stays *= 1 - 1 / (1 + np.exp(-gate))
            asked = self.threshold < 1 and loop >= self.least
            if loop == self.most or (asked and 1 - stays >= self.threshold):
                return loop
        return 0

    def _one_loop(self, x, position, planes):
        config, dim = self.config, self.config.head_dim
        heads = config.num_attention_heads  # as many as of keys
        angles = position / config.rope_theta ** (np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(np.tile(angles, 2)), np.sin(np.tile(angles, 2))

        def norm(y, gain):
            return y / np.sqrt(np.mean(y * y) + config.rms_norm_eps) * gain

        def turned(y):
            first, second = np.split(y, 2, axis=-1)
            return y * cos + np.concatenate([-second, first], axis=-1) * sin

        for p, kv in zip(self.params.layers, planes, strict=True):
            q, k, v = (p.qkv @ norm(x, p.input_norm)).reshape(3, heads, dim)
            kv.append((turned(k), v))
            keys, values = (np.stack(part) for part in zip(*kv, strict=True))
            scores = np.einsum("hd,nhd->hn", turned(q), keys) / np.sqrt(dim)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            mixed = np.einsum("hn,nhd->hd", weights, values).ravel()
            x = x + norm(p.out @ mixed, p.input_norm_2)
            gate, up = np.split(p.gate_up @ norm(x, p.post_attention_norm), 2)
            x = x + norm(p.down @ (gate / (1 + np.exp(-gate)) * up), p.post_attention_norm_2)
        return norm(x, self.params.norm)


@pytest.fixture(scope="module")
def by_hand(model):
    """Tokens and exit loops of every prompt (first index) under every rule (second)."""
    return [[ByHand(model, rule).run(prompt, NEW) for rule in RULES] for prompt in PROMPTS]


def _generate(model, rule, **options):
    return slj.generate(
        model, PROMPTS, max_new_tokens=NEW, eos_token_id=[], page_size=SIZE, **_options(rule),
        **options,
    )  # fmt: skip


def test_generate_is_the_replay_by_hand(model, by_hand, compile_counter):
    early = [r for r, rule in enumerate(RULES) if rule != NEVER]
    _generate(model, RULES[0])
    with compile_counter() as compiled:
        outs = [_generate(model, RULES[r]) for r in early]
    assert compiled.count == 0, compiled  # a rule is data
    for r, out in zip(early, outs, strict=True):
        assert out.token_ids == [by_hand[i][r][0] for i in range(len(PROMPTS))], RULES[r]
        assert out.exit_loops == [by_hand[i][r][1] for i in range(len(PROMPTS))], RULES[r]
        assert out.stats.loops_run + out.stats.loops_skipped == 4 * out.stats.rounds
        # What is saved is what no row of the batch wanted.
        deepest = np.max(out.exit_loops, axis=0)[1:]
        assert out.stats.loops_run == deepest.sum(), RULES[r]
    assert {d for out in outs for loops in out.exit_loops for d in loops} == {1, 2, 3, 4}


def test_stream_tells_the_exit_loops(model, by_hand):
    got = [([], []) for _ in PROMPTS]
    for chunk in slj.stream(
        model, PROMPTS, max_new_tokens=NEW, eos_token_id=[], page_size=SIZE,
        **_options(RULES[0]),
    ):  # fmt: skip
        assert len(chunk.exit_loops) == len(chunk.token_ids)
        got[chunk.index][0].extend(chunk.token_ids)
        got[chunk.index][1].extend(chunk.exit_loops)
    assert got == [every[0] for every in by_hand]


# The engine ----------------------------------------------------------------------------


def _requests(which):
    return [
        (
            f"{i}{r}",
            PROMPTS[i],
            slj.SamplingParams(max_tokens=NEW, ignore_eos=True, **_options(RULES[r])),
        )
        for i, r in which
    ]


def test_engine_requests_each_have_their_rule(model, by_hand, compile_counter):
    """Of a pool so small that requests go out and come back, with the K/V of both kinds."""
    engine = slj.Engine(
        model,
        cache=slj.CacheConfig(num_pages=4 * 5, page_size=SIZE, watermark=0.0),
        scheduler=slj.SchedulerConfig(max_num_seqs=4, max_context=24, max_prefill_tokens=32),
    )
    every = [(i, r) for r in range(len(RULES)) for i in range(len(PROMPTS))]
    with engine:
        together = engine.run(_requests(every))
        assert engine.metrics()["preemptions"] > 0
        before = engine.metrics()
        with compile_counter() as compiled:
            alone = [engine.run(_requests([which]))[0] for which in ((0, 0), (1, 2), (2, 5))]
        assert compiled.count == 0, compiled
        metrics, text = engine.metrics(), engine.prometheus()
    for (i, r), output in zip(every, together, strict=True):
        assert (output.token_ids, output.exit_loops) == by_hand[i][r], (i, r)
    for output in alone:
        i, r = map(int, output.request_id)
        assert (output.token_ids, output.exit_loops) == by_hand[i][r], (i, r)
    for name in ("loops_run", "loops_skipped"):
        assert f"sparse_loop_{name}_total {metrics[name]}\n" in text
    run = metrics["loops_run"] - before["loops_run"]
    assert run == sum(sum(output.exit_loops[1:]) for output in alone)
    rounds = metrics["rounds"] - before["rounds"]
    assert metrics["loops_skipped"] - before["loops_skipped"] == 4 * rounds - run


# A step --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(model):
    """The weights and a state behind the prompts; copy it, steps donate."""
    params, state, _ = slj.start(
        model, PROMPTS, max_new_tokens=NEW, eos_token_id=[], page_size=SIZE, exit_threshold=0.6
    )
    return params, state


def _ruled(state, rules):
    """A copy of the state with a rule for each row."""
    state = jax.tree.map(jnp.copy, state)
    threshold, least, most = zip(*rules, strict=True)
    request = dataclasses.replace(
        state.request,
        exit_threshold=jnp.asarray(threshold, jnp.float32),
        min_loops=jnp.asarray(least, jnp.int32),
        max_loops=jnp.asarray(most, jnp.int32),
    )
    return dataclasses.replace(state, request=request)


def _step(params, state):
    return slj.decode_step(params, state, slj.no_lease(state))


DEPTHS = [(1.0, 1, 1), (1.0, 1, 3), (1.0, 1, 2), (1.0, 1, 4)]


def _rows(state, row):
    """K and V of the row's next token in each loop, `[layers, 2, loops, heads, dim]`."""
    position = int(state.position[row])
    pages = np.asarray(state.cache.page_table)[row, :, position // SIZE]
    layers = zip(state.cache.keys, state.cache.values, strict=True)
    return np.asarray([[np.asarray(p)[pages, :, position % SIZE] for p in kv] for kv in layers])


def test_skipped_planes_hold_what_the_last_loop_wrote_and_nothing_else_changes(begun):
    params, before = begun
    after, output = _step(params, _ruled(before, DEPTHS))
    assert output.exit_loops[:, 0].tolist() == [1, 3, 2, 4]
    written = [np.asarray(pool).copy() for pool in (*after.cache.keys, *after.cache.values)]
    at_before = dataclasses.replace(after, position=before.position)
    for row, (_, _, depth) in enumerate(DEPTHS):
        planes = _rows(at_before, row)
        for skipped in range(depth, 4):
            np.testing.assert_array_equal(planes[:, :, skipped], planes[:, :, depth - 1])
        for loop in range(1, depth):  # those that were run are their own
            assert (planes[:, :, loop] != planes[:, :, loop - 1]).any(axis=(0, 2, 3)).all()
        position = int(before.position[row])
        pages = np.asarray(before.cache.page_table)[row, :, position // SIZE]
        for pool in written:
            pool[pages, :, position % SIZE] = 0
    for pool, old in zip(written, (*before.cache.keys, *before.cache.values), strict=True):
        np.testing.assert_array_equal(pool, np.asarray(old))


@pytest.mark.parametrize("row", range(4))
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(begun, row):
    params, state = begun
    rules = [(0.6, 1, 4), (0.2, 2, 4), (0.9, 1, 4), (1.0, 1, 3)]
    _, together = _step(params, _ruled(state, rules))
    alone = _ruled(state, rules)
    only = jnp.arange(4) == row
    alone = dataclasses.replace(alone, remaining=jnp.where(only, alone.remaining, 0))
    # The others are dead, and their K/V is not even a number.
    for other in set(range(4)) - {row}:
        alone = _poisoned(alone, other, range(4))
    _, output = _step(params, alone)
    np.testing.assert_array_equal(output.logits[row], together.logits[row])
    assert output.exit_loops[row] == together.exit_loops[row]
    assert output.counters.loops_skipped == 4 - output.exit_loops[row, 0]
    assert together.counters.loops_skipped == 4 - together.exit_loops.max()


def _poisoned(state, row, loops):
    """The state with NaN in place of the row's K/V in these loops."""
    pages = np.asarray(state.cache.page_table)[row, list(loops)].ravel()

    def poisoned(pools):
        return tuple(pool.at[pages].set(jnp.nan, mode="drop") for pool in pools)

    cache = state.cache
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(
            cache, keys=poisoned(cache.keys), values=poisoned(cache.values)
        ),
    )


def test_nan_in_one_request_reaches_no_other(begun):
    params, state = begun
    rules = [(0.6, 1, 4)] * 4
    _, clean = _step(params, _ruled(state, rules))
    _, output = _step(params, _poisoned(_ruled(state, rules), 1, range(4)))
    assert np.isnan(output.logits[1]).all()
    assert output.exit_loops[1] == 4  # its gate says nothing
    for row in (0, 2, 3):
        np.testing.assert_array_equal(output.logits[row], clean.logits[row])
        assert output.exit_loops[row] == clean.exit_loops[row]


def test_a_skipped_loop_is_not_run(begun, monkeypatch):
    """The compiled program calls the host at the end of each loop that it runs."""
    params, state = begun
    ran = []
    gate = exits.exit_gate_logits

    def told(params, hidden):
        jax.debug.callback(lambda: ran.append(1))
        return gate(params, hidden)

    monkeypatch.setattr(exits, "exit_gate_logits", told)
    step = jax.jit(lambda *args: inspect.unwrap(slj.decode_step)(*args))
    for deepest in (1, 2, 4):
        ran.clear()
        # Loops that are not run do not read their K/V either.
        ruled = _ruled(state, [(1.0, 1, deepest)] * 2 + [(1.0, 1, 1)] * 2)
        for row in range(4):
            ruled = _poisoned(ruled, row, range(deepest, 4))
        _, output = step(params, ruled, slj.no_lease(ruled))
        jax.effects_barrier()
        assert len(ran) == deepest == 4 - output.counters.loops_skipped
        assert np.isfinite(output.logits).all()
    ended = dataclasses.replace(ruled, remaining=jnp.zeros(4, jnp.int32))
    ran.clear()
    _, output = step(params, ended, slj.no_lease(ended))
    jax.effects_barrier()
    assert (len(ran), int(output.counters.loops_skipped)) == (0, 0)


def test_pools_are_updated_in_place(begun):
    params, state = begun
    shape = (1 << 15, *state.cache.keys[0].shape[1:])
    pools = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in state.cache.keys)
    cache = dataclasses.replace(state.cache, keys=pools, values=pools)
    grown = dataclasses.replace(state, cache=cache)
    compiled = slj.decode_step.lower(params, grown, slj.no_lease(state)).compile()
    pool_bytes = 4 * int(np.prod(shape))
    assert pool_bytes == 64 << 20
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


def test_full_depth_is_another_program_that_knows_nothing_of_exits(model):
    _, state, _ = slj.start(model, PROMPTS, max_new_tokens=NEW, eos_token_id=[], page_size=SIZE)
    assert not state.spec.early_exit

    def fails(*_):
        raise AssertionError("the gate was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exits, "exit_gate_logits", fails)
        patch.setattr(steps, "run_until_left", fails)
        _, output = jax.eval_shape(
            inspect.unwrap(slj.decode_step), model.params, state, slj.no_lease(state)
        )
    assert output.exit_loops is None
    assert output.counters.loops_skipped is None


# The rule ------------------------------------------------------------------------------


def _loops_by_gate(params, request, count=4):
    """Exit loops of one row, told by the readout itself."""
    hidden = jnp.ones((1, 1, params.embed.shape[1]))
    readout = exits.start_exit_readout(hidden, jnp.ones((1, 1), bool), request)
    for depth in range(count):
        readout = readout.after_loop(params, jnp.int32(depth), hidden * depth)
    assert readout.left.all()
    assert (readout.hidden == readout.loop[..., None]).all()
    return int(readout.loop[0, 0]) + 1


@pytest.mark.parametrize(
    ("gate", "rule", "loop"),
    [
        (100.0, (1.0, 1, 4), 4),  # saturated: the sum is 1 after the first loop
        (100.0, (0.999, 1, 4), 1),
        (100.0, (0.999, 3, 4), 3),
        (100.0, (1.0, 1, 2), 2),
        (0.0, (0.5, 1, 4), 1),  # a half, three quarters, seven eighths
        (0.0, (0.75, 1, 4), 2),
        (0.0, (0.875, 1, 2), 2),
        (0.0, (0.9, 1, 4), 4),
        (-100.0, (0.0, 1, 4), 1),
        (-100.0, (0.0, 2, 4), 2),
        (float("nan"), (0.0, 1, 4), 4),
    ],
)
def test_the_rule(model, begun, gate, rule, loop):
    params = dataclasses.replace(
        model.params,
        exit_gate=jnp.zeros_like(model.params.exit_gate),
        exit_gate_bias=jnp.full_like(model.params.exit_gate_bias, gate),
    )
    request = dataclasses.replace(
        begun[1].request,
        exit_threshold=jnp.asarray(rule[:1], jnp.float32),
        min_loops=jnp.asarray(rule[1:2], jnp.int32),
        max_loops=jnp.asarray(rule[2:], jnp.int32),
    )
    assert _loops_by_gate(params, request) == loop


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_loops": 0}, "min_loops must be an integer >= 1, got 0"),
        ({"min_loops": True}, "min_loops must be an integer >= 1, got True"),
        ({"max_loops": 0}, "max_loops must be an integer >= 1, got 0; None is all"),
        ({"max_loops": 2.0}, "max_loops must be an integer >= 1, got 2.0; None is all"),
        ({"min_loops": 3, "max_loops": 2}, "min_loops 3 is above max_loops 2: lower it"),
        ({"min_loops": 5}, "min_loops must be at most the model's 4 loops, got 5"),
        ({"max_loops": 5}, "max_loops must be at most the model's 4 loops, got 5"),
    ],
)
def test_impossible_rules_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        slj.generate(model, [[1]], **options)
    with (
        slj.Engine(model, cache=slj.CacheConfig(num_pages=8)) as engine,
        pytest.raises(ValueError, match=message),
    ):
        engine.add_request("a", [1], slj.SamplingParams(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_threshold": 0.5}, r"exit_threshold 0.5 leaves early, but X takes every loop: "
         "pass exit_threshold=1.0, or leave X out"),
        ({"max_loops": 2}, "max_loops 2 leaves early, but X takes every loop: "
         "pass max_loops=None, or leave X out"),
        ({"exit_threshold": 0, "max_loops": 2}, "exit_threshold 0.0 with max_loops 2 leaves "
         "early, but X takes every loop: pass exit_threshold=1.0 and max_loops=None, or leave"),
    ],
)  # fmt: skip
def test_a_fixed_depth_is_refused_with_both_options_named(model, options, message):
    both = slj.SparseDecodeConfig(0.5), slj.SpeculativeConfig(2)
    for name, sparse, speculative in (
        ("sparse=", both[0], None),
        ("speculative=", None, both[1]),
        ("sparse= and speculative=", *both),
    ):
        told = message.replace("X", name)
        with pytest.raises(ValueError, match=told):
            slj.generate(model, [[1]], sparse=sparse, speculative=speculative, **options)
        engine = slj.Engine(
            model, cache=slj.CacheConfig(num_pages=8), sparse=sparse, speculative=speculative
        )
        with engine, pytest.raises(ValueError, match=told):
            engine.add_request("a", [1], slj.SamplingParams(**options))


def test_rules_that_never_leave_early_go_with_anything(model):
    for rule in ((1.0, 1, None), (1.0, 4, 4), (0.3, 4, None)):
        assert not ExitRule.resolve(model.config, *rule).leaves_early
        with slj.Engine(
            model, cache=slj.CacheConfig(num_pages=8), sparse=slj.SparseDecodeConfig(0.5)
        ) as engine:
            engine.add_request("a", [1], slj.SamplingParams(1, **_options(rule)))


def test_a_spec_of_two_minds_is_refused(model):
    with pytest.raises(ValueError, match="early_exit needs plain, dense decoding"):
        DecodeSpec(model.config, early_exit=True, speculative=slj.SpeculativeConfig(2))
