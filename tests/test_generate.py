"""`generate`, dense: against the golden vectors, in batches, in buckets, at its limits."""

from __future__ import annotations

import importlib
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.generation import buckets
from sparse_loop_jax.generation.compilation import count_compilations
from sparse_loop_jax.generation.options import Options

generate_module = importlib.import_module("sparse_loop_jax.generation.generate")


@pytest.fixture(scope="module")
def model(load_gold):
    return load_gold("mha").model()


@pytest.fixture(scope="module")
def bundled():
    return slj.load(dtype="float32")


def test_greedy_tokens_equal_the_golden_ones(gold):
    out = slj.generate(gold.model(), gold.prompts, max_new_tokens=32, eos_token_id=[])
    assert out.token_ids[0] == gold.dense["p0_gen_tokens"].tolist()
    assert out.token_ids[1] == gold.dense["p1_gen_tokens"].tolist()
    assert out.finish_reasons == ["length", "length"]
    assert out.texts is None


def test_bfloat16_differs_from_float32_only_on_small_margins(gold):
    out = slj.generate(gold.model("bfloat16"), gold.prompts, max_new_tokens=32, eos_token_id=[])
    for name, ids in zip(("p0", "p1"), out.token_ids, strict=True):
        want = gold.dense[f"{name}_gen_tokens"].tolist()
        if ids != want:
            first = next(i for i in range(32) if ids[i] != want[i])
            assert gold.dense[f"{name}_gen_margin"][first] < 0.9


def test_a_batch_gives_each_prompt_what_it_gets_alone(bundled):
    rng = np.random.default_rng(0)
    lengths = (1, 5, 40, 513)
    prompts = [rng.integers(1, bundled.config.vocab_size, n).tolist() for n in lengths]
    together = slj.generate(bundled, prompts, max_new_tokens=12, eos_token_id=[])
    for prompt, ids in zip(prompts, together.token_ids, strict=True):
        alone = slj.generate(bundled, [prompt], max_new_tokens=12, eos_token_id=[])
        assert alone.token_ids == [ids]
    logits = _second_logits(bundled, prompts)
    for row in (0, 3):
        alone = _second_logits(bundled, [prompts[row]])
        # Of about 12: a few units of the last place, as sums of other shapes differ.
        np.testing.assert_allclose(logits[row], alone[0], atol=3e-5, rtol=0)


def _second_logits(model, prompts) -> np.ndarray:
    """What the second token of each prompt is read from, `[B, vocab]`."""
    params, state, _ = slj.start(model, prompts, max_new_tokens=12, eos_token_id=[])
    _, output = slj.decode_step(params, state, slj.no_lease(state))
    return np.asarray(output.logits[:, 0])


def test_who_watches_gets_the_same(ascii_checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the captured stream for a terminal
    model = slj.load(ascii_checkpoint)
    options = {
        "max_new_tokens": 40,
        "eos_token_id": [],
        "sparse": slj.SparseDecodeConfig(key_retention=0.25),
        "speculative": slj.SpeculativeConfig(1, draft_loops=1),
    }
    prompts = [[70, 71, 72], list(range(40, 80))]
    alone = slj.generate(model, prompts, progress=False, **options)
    assert capsys.readouterr() == ("", "")
    watched = slj.generate(model, prompts, progress=True, **options)
    out, err = capsys.readouterr()
    assert out == ""
    assert "generate" in err
    assert "80/80" in err
    assert watched.stats.rounds > generate_module._WATCHED_ROUNDS  # more than one stretch
    assert watched.token_ids == alone.token_ids
    assert [len(ids) for ids in watched.token_ids] == [40, 40]
    for name, value in vars(alone.stats).items():
        if "second" not in name and name not in ("compilations", "peak_bytes"):
            # Sums of floats are taken stretch by stretch.
            value = pytest.approx(value, rel=1e-6) if "mass" in name else value
            assert getattr(watched.stats, name) == value, name


def test_the_weights_are_split_once_a_call(model, monkeypatch):
    split, calls = slj.Ouro.params, []

    def counting(self):
        calls.append(1)
        return split.__get__(self)

    monkeypatch.setattr(slj.Ouro, "params", property(counting))
    slj.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert len(calls) == 1


def test_a_sampled_request_draws_what_it_would_alone(model):
    prompts = [[5, 6, 7], [9] * 20, [100, 3]]
    options = {"max_new_tokens": 10, "eos_token_id": [], "temperature": 1.0, "seed": 11}
    together = slj.generate(model, prompts, **options)
    for prompt, ids in zip(prompts, together.token_ids, strict=True):
        assert slj.generate(model, [prompt], **options).token_ids == [ids]
    other = slj.generate(model, prompts, **{**options, "seed": 12})
    assert other.token_ids != together.token_ids


def test_equal_prompts_draw_differently(model):
    options = {"max_new_tokens": 10, "eos_token_id": [], "temperature": 1.0}
    out = slj.generate(model, [[5, 6, 7]] * 3, **options)
    assert len({tuple(ids) for ids in out.token_ids}) == 3
    assert slj.generate(model, [[5, 6, 7]], **options).token_ids[0] == out.token_ids[0]


def test_a_second_call_of_the_same_buckets_compiles_nothing(model, compile_counter):
    slj.generate(model, [[1, 2, 3], list(range(1, 38))], max_new_tokens=9, eos_token_id=[])
    with compile_counter() as compiled:
        out = slj.generate(
            model, [[9, 8], list(range(2, 40))], max_new_tokens=11, eos_token_id=7
        )
    assert compiled.count == 0, compiled
    assert out.stats.compilations == 0


def test_the_programs_of_a_call_are_counted(model):
    out = slj.generate(model, [[1, 2, 3]], max_new_tokens=3, page_size=32)
    assert out.stats.compilations >= 2  # the prefill and the loop at least
    assert out.stats.compile_seconds > 0


def test_what_another_thread_compiles_is_not_counted():
    def compile_one():
        jax.jit(lambda x: x * 3 + 1)(jnp.zeros(5)).block_until_ready()

    with count_compilations() as outer:
        other = threading.Thread(target=compile_one)
        other.start()
        other.join()
        assert outer.programs == 0
        compile_one()
    assert outer.programs >= 1


def test_every_stop_token_stops(gold):
    model = gold.model()
    prompt, want = gold.prompts[0], gold.dense["p0_gen_tokens"].tolist()
    for place in (0, 1, 7):
        first = want.index(want[place])
        out = slj.generate(
            model, [prompt], max_new_tokens=32, eos_token_id=[127 - want[place], want[place]]
        )
        ends = min(i for i in range(32) if want[i] in (127 - want[place], want[place]))
        assert ends <= first
        assert out.token_ids == [want[: ends + 1]]
        assert out.finish_reasons == ["stop"]


def test_one_request_stops_while_another_goes_on(gold):
    prompts = gold.prompts
    stop = int(gold.dense["p0_gen_tokens"][3])
    out = slj.generate(gold.model(), prompts, max_new_tokens=32, eos_token_id=stop)
    for name, ids, reason in zip(("p0", "p1"), out.token_ids, out.finish_reasons, strict=True):
        want = gold.dense[f"{name}_gen_tokens"].tolist()
        assert ids == (want[: want.index(stop) + 1] if stop in want else want)
        assert reason == ("stop" if stop in want else "length")


def test_each_prompt_may_have_its_own_limit(gold):
    out = slj.generate(gold.model(), gold.prompts, max_new_tokens=[1, 5], eos_token_id=[])
    assert out.token_ids[0] == gold.dense["p0_gen_tokens"][:1].tolist()
    assert out.token_ids[1] == gold.dense["p1_gen_tokens"][:5].tolist()


def test_the_context_ends_a_request(model):
    limit = model.config.max_position_embeddings
    prompts = [[3] * limit, [3] * (limit - 2), [3]]
    out = slj.generate(model, prompts, max_new_tokens=6, eos_token_id=[])
    # The last token emitted is never fed back, so it needs no position.
    assert [len(ids) for ids in out.token_ids] == [1, 3, 6]
    assert out.finish_reasons == ["length"] * 3


def test_text_in_text_out(bundled):
    out = slj.generate(bundled, "The state of the", max_new_tokens=5)
    ids = bundled.tokenizer.encode("The state of the").ids
    assert out.token_ids == slj.generate(bundled, [ids], max_new_tokens=5).token_ids
    assert out.texts == [bundled.tokenizer.decode(out.token_ids[0])]
    assert out.stats.prompt_tokens == len(ids)


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_the_exit_threshold_chooses_the_published_readout(gold, threshold):
    model, prompt = gold.model(), gold.prompts[1]
    out = slj.generate(model, [prompt], max_new_tokens=1, exit_threshold=threshold)
    logits = gold.dense[f"p1_exit{threshold}_logits"][-1]
    assert out.token_ids == [[int(np.argmax(logits))]]


def test_a_threshold_of_one_never_leaves_early(gold):
    # Gates that saturate: the summed probability of the first loop rounds to 1.
    params = gold.params
    bias = jnp.full_like(params.exit_gate_bias, 100.0)
    model = slj.Ouro(gold.config, params=_replace(params, exit_gate_bias=bias))
    out = slj.generate(model, gold.prompts[:1], max_new_tokens=8, eos_token_id=[])
    assert out.token_ids == [gold.dense["p0_gen_tokens"][:8].tolist()]
    early = slj.generate(
        model, gold.prompts[:1], max_new_tokens=8, eos_token_id=[], exit_threshold=0.99
    )
    assert early.token_ids != out.token_ids


def _replace(params, **changes):
    import dataclasses

    return dataclasses.replace(params, **changes)


def test_stats_count_what_was_done(gold):
    out = slj.generate(gold.model(), gold.prompts, max_new_tokens=8, eos_token_id=[])
    config = gold.config
    assert out.stats.prompt_tokens == 49
    assert out.stats.generated_tokens == 16
    assert out.stats.rounds == 7  # the first token comes from the prefill
    assert out.exit_loops == [[4] * 8] * 2
    assert (out.stats.loops_run, out.stats.loops_skipped) == (28, 0)
    assert out.stats.tokens_per_second > 0
    assert out.stats.drafted == out.stats.captured_rows == 0
    # Pages of 16 tokens: 19 and 44 tokens are 2 and 3 pages in each of 4 loops.
    assert out.stats.kv_cache_bytes == 20 * 16 * config.kv_bytes_per_token(4) // 4


def test_the_defaults_are_written_once_in_meaning():
    defaults = {f.name: f.default for f in Options.__dataclass_fields__.values()}
    for function in (slj.generate, slj.stream):
        parameters = inspect.signature(function).parameters
        given = {n: p.default for n, p in parameters.items() if n in defaults}
        assert given == defaults


@pytest.mark.parametrize(
    ("n", "want"), [(1, 4), (4, 4), (5, 5), (9, 10), (17, 20), (64, 64), (65, 80), (1000, 1024)]
)
def test_a_quarter_octave_is_never_below_and_at_most_a_quarter_above(n, want):
    assert buckets.quarter_octave(n) == want


def test_quarter_octaves_are_tight_everywhere():
    for n in range(5, 5000):
        assert n <= buckets.quarter_octave(n) <= 1.25 * n + 1


@pytest.mark.parametrize(
    ("longest", "batch", "want"),
    [(1, 1, 32), (33, 1, 128), (129, 1, 256), (5000, 1, 2048), (5000, 32, 256)],
)
def test_chunks_bound_the_tokens_of_a_batch(longest, batch, want):
    assert buckets.chunk_length(longest, batch) == want


def test_a_prompt_over_several_chunks_is_one_prompt(model, monkeypatch):
    prompt = np.random.default_rng(1).integers(1, 128, 100).tolist()
    whole = slj.generate(model, [prompt], max_new_tokens=6, eos_token_id=[])
    monkeypatch.setattr(buckets, "CHUNKS", (16,))
    pieces = slj.generate(model, [prompt], max_new_tokens=6, eos_token_id=[])
    assert pieces.token_ids == whole.token_ids


def test_donation_leaves_no_second_cache(model):
    params, state, _ = slj.start(model, [[1, 2, 3]], max_new_tokens=8, eos_token_id=[])
    pool = state.cache.keys[0]
    slj.decode_step(params, state, slj.no_lease(state))
    assert pool.is_deleted()


def test_nothing_stays_on_the_device(model):
    slj.generate(model, [[1, 2, 3]], max_new_tokens=4)
    before = {id(a) for a in jax.live_arrays()}
    out = slj.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert [a.shape for a in jax.live_arrays() if id(a) not in before] == []
    assert out.token_ids
