"""The recipe of the small model, all of it, at toy size."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_loop_jax as slj
from examples.train_tiny import (
    card,
    corpus as corpora,
    evaluate,
    export,
    network,
    objective,
    options,
    plan,
    prepare,
    questions,
    recipe,
    record,
    schedule,
    scoring,
    state,
    tables,
    train,
)
from sparse_loop_jax.evaluate import read_questions
from sparse_loop_jax.models import OuroConfig
from sparse_loop_jax.models.forward import exit_probabilities, forward_params

TEXT = Path(__file__).parent.parent / "sparse_loop_jax/data/tiny-ouro/heldout.txt"
STEPS, LENGTH = 40, 96


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> corpora.Corpus:
    out = tmp_path_factory.mktemp("corpus")
    prepare.main(["--text", str(TEXT), "--out", str(out), "--vocabulary", "1024"])
    found = corpora.read(out)
    found.manifest["directory"] = str(out)
    return found


def arguments(corpus: corpora.Corpus, out: Path, *more: str) -> list[str]:
    given = f"""--steps {STEPS} --hidden 32 --intermediate 48 --layers 1 --heads 2 --loops 3
        --stages 1:{LENGTH} --batch-tokens {16 * LENGTH} --rows {8 * LENGTH} --dtype float32
        --save-every 30 --log-every 10 --warmup 5 --peak 1e-2"""
    return ["--corpus", corpus.manifest["directory"], "--out", str(out), *given.split(), *more]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    """A finished run that was never interrupted."""
    out = tmp_path_factory.mktemp("run")
    assert train.main(arguments(corpus, out))
    return out


def log_of(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def exported(corpus, run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("export") / "tiny"
    folders = ["--run", str(run), "--corpus", corpus.manifest["directory"], "--out", str(out)]
    export.main([*folders, "--lengths", "96", "--count", "8"])
    return out


# Training ------------------------------------------------------------------------------


def test_the_loss_falls(run):
    losses = [line["cross_entropy"] for line in log_of(run, "step")]
    # It starts near log(1024) = 6.9, that of a guess.
    assert min(losses[0]) > 5.8
    assert max(losses[-1]) < 5.6
    first, *_, last = log_of(run, "held_out")
    for after, before in zip(last["cross_entropy"], first["cross_entropy"], strict=True):
        assert after < before + 0.05
    assert max(last["cross_entropy"]) < math.log(1024) - 1


def test_a_resumed_run_ends_like_an_uninterrupted_one(corpus, run, tmp_path, monkeypatch):
    out = tmp_path / "run"
    # A clock that ticks when it is read, so that the time is up somewhere in the middle.
    ticks = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(train, "time", clock)
    commands = 0
    while not train.main(
        arguments(corpus, out, "--command-minutes", "1", *["--resume"] * bool(commands))
    ):
        commands += 1
        assert commands < 9
        assert 0 < log_of(out, "paused")[-1]["step"] < STEPS
    assert commands > 0
    whole, parts = (export.trained(folder, corpus).params for folder in (run, out))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    # The last checkpoint alone is kept.
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["newest", f"step-{STEPS:07d}"]


def test_a_run_is_not_overwritten_nor_resumed_with_other_settings(corpus, run, tmp_path):
    with pytest.raises(ValueError, match="has a run in it: resume it"):
        train.main(arguments(corpus, run))
    with pytest.raises(ValueError, match=r"other settings \(then, now\): \{'seed': \(0, 1\)\}"):
        train.main(arguments(corpus, run, "--resume", "--seed", "1"))
    with pytest.raises(ValueError, match="has no checkpoint: leave --resume out"):
        train.main(arguments(corpus, tmp_path, "--resume"))


def test_a_run_can_begin_with_the_weights_of_another(corpus, run, tmp_path):
    """With another optimizer, at another length: it begins where the other one ended."""
    out = tmp_path / "second"
    more = ["--weights-of", str(run), "--optimizer", "adamw", "--stages", "1:192"]
    assert train.main(arguments(corpus, out, *more, "--peak", "1e-9", "--steps", "10"))
    whole, moved = (export.trained(folder, corpus).params for folder in (run, out))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, moved)
    first, last = log_of(out, "step")[0]["loss"], log_of(run, "step")[-1]["loss"]
    assert abs(first - last) < 0.5 < abs(first - log_of(run, "step")[0]["loss"])
    with pytest.raises(ValueError, match="has no checkpoint: name the --out of a training"):
        train.main(arguments(corpus, tmp_path / "third", "--weights-of", str(tmp_path)))
    with pytest.raises(ValueError, match=r"--weights-of and --out are both .*: name another"):
        train.main(arguments(corpus, out, "--weights-of", f"{out}/../second"))
    more = ["--weights-of", str(run), "--hidden", "48"]
    with pytest.raises(ValueError, match=r"array 0 is float32\[1024, 32\], the model has"):
        train.main(arguments(corpus, tmp_path / "third", *more))


def test_a_run_can_end_before_its_budget_is_spent(corpus, run, tmp_path):
    """It is done then, and was no other than the whole run up to there."""
    out = tmp_path / "run"
    assert train.main(arguments(corpus, out, "--until", "0.5"))
    assert log_of(out, "done")[-1]["step"] == STEPS // 2
    assert log_of(out, "held_out")[-1]["step"] == STEPS // 2
    whole, part = (log_of(folder, "step") for folder in (run, out))
    assert [line["loss"] for line in part] == [line["loss"] for line in whole[: len(part)]]
    assert [line["rate"] for line in part] == [line["rate"] for line in whole[: len(part)]]


def test_a_checkpoint_of_another_model_is_refused(run):
    settings = json.loads((run / "settings.json").read_text())
    config = OuroConfig(**settings["model"] | {"intermediate_size": 64})
    with pytest.raises(ValueError, match=r"array \d+ is float32\[96, 32\], the model has"):
        state.restore(run / "checkpoints", config, settings)
    with pytest.raises(ValueError, match=r"array \d+ is float32\[96, 32\], the model has"):
        state.restore_weights(run / "checkpoints", config)


def _gradient(params):
    return jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), params
    )


def test_muon_levels_the_singular_values_of_matrices_alone(small):
    _, params, _ = small
    gradient = _gradient(params)

    def first_step(rule) -> Any:
        transform = state.make_optimizer(params, state.Optimizer(rule))
        still = jax.tree.map(jnp.zeros_like, params)  # nothing to decay
        return transform.update(gradient, transform.init(params), still)[0]

    muon, adam = first_step("muon"), first_step("adamw")
    moved = np.linalg.svd(muon.layers[0].gate_up, compute_uv=False)
    assert moved.max() / moved.min() < 2 < np.linalg.cond(gradient.layers[0].gate_up)
    # Downhill, about as far as Adam.
    assert float(jnp.vdot(muon.layers[0].gate_up, gradient.layers[0].gate_up)) > 0
    ratio = jnp.linalg.norm(muon.layers[0].gate_up) / jnp.linalg.norm(adam.layers[0].gate_up)
    assert 0.1 < float(ratio) < 1
    for name in ("embed", "head", "exit_gate"):  # each number by itself, as Adam has it
        step = np.abs(np.asarray(getattr(muon, name)))
        np.testing.assert_allclose(step, step.max(), rtol=1e-2)


@pytest.mark.parametrize("rule", state.RULES)
def test_matrices_and_tables_have_a_decay_each(small, rule):
    _, params, _ = small
    gradient = _gradient(params)

    def first_step(*decays) -> Any:
        transform = state.make_optimizer(params, state.Optimizer(rule, *decays))
        return transform.update(gradient, transform.init(params), params)[0]

    pulled = jax.tree.map(jnp.subtract, first_step(0.5, 0.25), first_step(0.0, 0.0))
    layer, of = pulled.layers[0], params.layers[0]
    for name in ("qkv", "out", "gate_up", "down"):
        np.testing.assert_allclose(getattr(layer, name), 0.5 * getattr(of, name), atol=1e-5)
    for name in ("embed", "head"):
        want = 0.25 * getattr(params, name)
        np.testing.assert_allclose(getattr(pulled, name), want, atol=1e-5)
    for free in (pulled.norm, pulled.exit_gate, pulled.exit_gate_bias, layer.input_norm):
        np.testing.assert_array_equal(free, 0.0)
    with pytest.raises(ValueError, match="--table-decay must be at least 0, got -1"):
        state.Optimizer(rule, 0.1, -1.0)


def test_a_loss_that_is_not_finite_stops_the_run(corpus, tmp_path, monkeypatch):
    def broken(params, optimizer, batch, rate, *, config, objective, rule):
        return params, optimizer, {"loss": jnp.float32(np.nan)}

    monkeypatch.setattr(train, "train_step", broken)
    with pytest.raises(FloatingPointError, match="the loss is nan after step 1"):
        train.main(arguments(corpus, tmp_path / "run"))


# The recipe ----------------------------------------------------------------------------


@pytest.fixture
def toy_recipe(corpus, tmp_path, monkeypatch):
    """A function (options) that runs the recipe below `tmp_path`, some steps a run."""
    given = arguments(corpus, tmp_path)[4:]
    monkeypatch.setattr(recipe, "FIRST", " ".join([*given, "--steps", "8", "--until", "0.5"]))
    monkeypatch.setattr(
        recipe, "SECOND", " ".join([*given, "--steps", "4", "--optimizer", "adamw"])
    )
    own = ["--corpus", corpus.manifest["directory"], "--out", str(tmp_path)]
    return lambda *options: recipe.main([*own, *options])


def test_the_recipe_goes_on_from_run_to_run(toy_recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "LEARNT", 0.0)
    # No time for a step, then no bound; options that it does not know go to both runs.
    assert not toy_recipe("--peak", "5e-3", "--command-minutes", "1e-9")
    assert capsys.readouterr().out.endswith("paused: run this again\n")
    assert not (tmp_path / "run").exists()
    assert toy_recipe("--peak", "5e-3")
    folders = [tmp_path / "first-1", tmp_path / "run"]
    first, second = (record.read_record(folder) for folder in folders)
    assert [first.end().step, second.end().step] == [4, 4]
    assert [r.settings["schedule"]["peak"] for r in (first, second)] == [5e-3, 5e-3]
    assert [r.settings["optimizer"]["rule"] for r in (first, second)] == ["muon", "adamw"]
    assert [r.settings["seed"] for r in (first, second)] == [1, 1]
    assert second.settings["weights_of"] == str(folders[0])
    # What is done is not made again.
    monkeypatch.setattr(train, "main", None)
    assert toy_recipe("--peak", "5e-3")


def test_a_run_of_the_recipe_that_was_stopped_is_resumed(toy_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "LEARNT", 0.0)
    done, calls = train.main, []

    def stop_at_first(argv):
        calls.append(argv)
        return done([*argv, *["--command-minutes", "0"] * (len(calls) == 1)])

    monkeypatch.setattr(train, "main", stop_at_first)
    assert not toy_recipe()
    assert toy_recipe()
    assert ["--resume" in argv for argv in calls] == [False, True, False]
    assert [line["step"] for line in log_of(tmp_path / "first-1", "start")] == [0, 0]


def test_the_recipe_begins_again_while_pointers_are_not_followed(toy_recipe, tmp_path):
    logs = r".*first-1/log.jsonl, .*first-2/log.jsonl, .*first-3/log.jsonl"
    with pytest.raises(RuntimeError, match=rf"no seed of \(1, 2, 3\) .* in {logs}; a higher"):
        toy_recipe()
    for seed in (1, 2, 3):
        first = record.read_record(tmp_path / f"first-{seed}")
        assert (first.settings["seed"], first.end().done) == (seed, True)
    assert not (tmp_path / "run").exists()


def test_the_constants_of_the_recipe_are_options_of_train(corpus):
    common = ["--corpus", corpus.manifest["directory"]]
    made = []
    for given in (recipe.FIRST.split(), recipe.SECOND.split()):
        parser = argparse.ArgumentParser()
        options.add_options(parser)
        made.append(options.settings_of(parser.parse_args([*common, *given]), corpus))
    first, second = made
    assert first["model"] == second["model"]
    assert first["optimizer"] == dataclasses.asdict(state.Optimizer())
    assert (first["schedule"]["minutes"], first["schedule"]["until"]) == (13, 0.33)
    assert (second["schedule"]["minutes"], second["schedule"]["until"]) == (6.6, 1)


# The objective -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(corpus):
    """A model, a batch of random tokens, and the objective in float32."""
    config = OuroConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        total_ut_steps=3,
    )
    params = network.initial_params(config, jax.random.key(1))
    gate = jax.random.normal(jax.random.key(2), params.exit_gate.shape)
    params = dataclasses.replace(params, exit_gate=gate)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 40, (2, 12)), jnp.int32)
    following = jnp.asarray(rng.integers(0, 40, (2, 12)), jnp.int32)
    weights = jnp.asarray(rng.uniform(0, 2, (2, 12)), jnp.float32)
    batch = objective.Batch(ids, jnp.stack([following] * 3), weights)
    return config, params, batch


def textbook(params, config, batch, beta=0.1):
    """The same loss by the library's forward pass, without staging."""
    out = forward_params(params, config, batch.ids)
    log_p = jax.nn.log_softmax(out.logits, axis=-1)
    loss = -jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
    exits = exit_probabilities(out.gate_logits)
    entropy = -(exits * jnp.log(exits)).sum(axis=0)
    each = (exits * loss).sum(axis=0) - beta * entropy
    return (batch.weights * each).sum() / batch.weights.sum()


@pytest.fixture(scope="module")
def objective_gradient(small):
    """A jitted function (targets, weights) -> loss, gradient."""
    config, params, batch = small
    chosen = objective.Objective(dtype="float32", rows=8)

    @jax.jit
    def compute(targets, weights):
        given = objective.Batch(batch.ids, targets, weights)
        return jax.value_and_grad(
            lambda p: objective.loss_and_metrics(p, config, chosen, given)[0]
        )(params)

    return compute


def test_the_objective_is_the_textbook_s_with_its_gradient(small, objective_gradient):
    config, params, batch = small
    loss, gradient = objective_gradient(batch.targets, batch.weights)
    wanted, expected = jax.jit(jax.value_and_grad(lambda p: textbook(p, config, batch)))(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), gradient, expected
    )


def test_staged_targets_teach_shallow_loops_but_not_the_gate(small, objective_gradient):
    _, _, batch = small
    # One position alone; its shallow loops are asked for token 3, or for what comes next.
    weights = jnp.zeros_like(batch.weights).at[0, 5].set(1.0)
    _, plain = objective_gradient(batch.targets, weights)
    _, staged = objective_gradient(batch.targets.at[:2, 0, 5].set(3), weights)
    np.testing.assert_allclose(staged.exit_gate, plain.exit_gate, rtol=1e-4, atol=1e-7)
    answer = int(batch.targets[0, 0, 5])
    assert answer != 3
    assert np.abs(staged.head[3]).sum() > 10 * np.abs(plain.head[3]).sum()
    # Every loop weighs the same: two of three ask for token 3, whose logits start near chance.
    pull = [float(jnp.linalg.norm(staged.head[token])) for token in (3, answer)]
    assert 1 < pull[0] / pull[1] < 4


def test_a_batch_must_be_a_multiple_of_the_rows(small):
    config, params, batch = small
    with pytest.raises(ValueError, match="24 tokens a batch are no multiple of rows=7"):
        objective.loss_and_metrics(params, config, objective.Objective(rows=7), batch)


def test_states_are_those_of_the_library_s_forward(small):
    config, params, batch = small
    states = jax.jit(lambda p: network.loop_states(p, config, batch.ids, dtype="float32"))(
        params
    )
    out = forward_params(params, config, batch.ids)
    np.testing.assert_allclose(states, out.hidden, rtol=1e-4, atol=1e-5)


def test_chunked_attention_is_causal_attention(small):
    q, k, v = (
        jax.random.normal(jax.random.key(i), (2, 12, heads, 8))
        for i, heads in ((0, 4), (1, 2), (2, 2))
    )
    chunked = jax.jit(lambda *args: network.chunked_attention(*args, chunk=4))(q, k, v)
    wide_k, wide_v = (np.repeat(x, 2, axis=2) for x in (k, v))  # each serves two query heads
    weights = np.exp(np.einsum("bthd,bshd->bhts", q, wide_k) / 8**0.5) * np.tri(12)
    weights /= weights.sum(axis=-1, keepdims=True)
    whole = np.einsum("bhts,bshd->bthd", weights, wide_v)
    np.testing.assert_allclose(chunked, whole, atol=1e-5)
    with pytest.raises(ValueError, match="a length of 12 is no multiple of the chunk of 5"):
        network.chunked_attention(q, k, v, chunk=5)


# The plan ------------------------------------------------------------------------------


def test_the_schedule():
    stages = schedule.parse_stages("0.35:512,1:2048:4096:0.2", tokens=1024, synthetic=0.7)
    assert stages == (
        schedule.Stage(0.35, 512, 1024, 0.7),
        schedule.Stage(1.0, 2048, 4096, 0.2),
    )
    assert [stage.rows for stage in stages] == [2, 2]
    made = schedule.Schedule(
        steps=100, stages=stages, warmup=10, peak=1.0, hops_from=0.1, hops_by=0.5
    )
    lengths = [made.stage(p).length for p in (0.0, 0.34, 0.35, 0.8, 1.0)]
    assert lengths == [512, 512, 2048, 2048, 2048]
    assert [made.hops(p) for p in (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)] == [1, 1, 2, 4, 8, 8]
    assert made.rate(0, 0.0) == pytest.approx(0.1)
    assert made.rate(50, 0.5) == pytest.approx(0.51)
    assert made.rate(100, 1.0) == pytest.approx(0.02)
    assert made.progress(25, 1e9) == 0.25
    assert schedule.Schedule(minutes=2.0, stages=stages).progress(10**9, 60.0) == 0.5
    assert [made.done(step, 0.0) for step in (99, 100)] == [False, True]
    short = dataclasses.replace(made, until=0.3)
    assert [short.done(step, 0.0) for step in (29, 30)] == [False, True]
    assert short.rate(20, 0.2) == made.rate(20, 0.2)


def test_a_bad_schedule_is_refused():
    def parse(text):
        return schedule.parse_stages(text, tokens=192, synthetic=0.5)

    for budget in ({}, {"steps": 1, "minutes": 1.0}):
        with pytest.raises(ValueError, match="either in steps or in minutes"):
            schedule.Schedule(**budget, stages=parse("1:96"))
    with pytest.raises(ValueError, match="must be positive, got -1"):
        schedule.Schedule(steps=-1, stages=parse("1:96"))
    for stages in (parse("0.5:96"), parse("1:96,0.5:48"), ()):
        with pytest.raises(ValueError, match="must rise to an end of 1"):
            schedule.Schedule(steps=1, stages=stages)
    with pytest.raises(ValueError, match=r"hops_from=0\.5, hops_by=0\.17"):
        schedule.Schedule(steps=1, stages=parse("1:96"), hops_from=0.5)
    for until in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=rf"in \(0, 1\]: --until got {until}"):
            schedule.Schedule(steps=1, stages=parse("1:96"), until=until)
    for text, got in (
        ("96", "'96'"), ("1:96:192:0.5:2", "'1:96:192:0.5:2'"), ("0.5:96,1:x", "'1:x'"),
        ("1:100", r"'1:100'.*\(192\) must be a multiple of those of a row \(100\)"),
        ("1:96:96:1.5", r"'1:96:96:1.5'.* must be in \[0, 1\], got 1.5"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"stages look like .*, got {got}"):
            parse(text)


def test_options_that_do_not_fit_are_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="--hidden 32 is no multiple of --heads 3"):
        train.main(arguments(corpus, tmp_path, "--heads", "3"))
    with pytest.raises(ValueError, match="--attention cudnn has no float32"):
        train.main(arguments(corpus, tmp_path, "--attention", "cudnn"))


def test_operations_are_six_a_weight_and_use(small):
    config, params, _ = small
    layers = sum(leaf.size for leaf in jax.tree.leaves(params.layers) if leaf.ndim == 2)
    wanted = 3 * (6 * layers + 8 * params.head.size)
    assert plan.operations(config, 0, remat=False) == wanted
    # Attention: scores and sums, 2 operations each, over half of the row; backwards twice that.
    more = plan.operations(config, 100, remat=False) - wanted
    assert more == 3 * (3 * 2 * 2 * 16 * 100 / 2)


def test_the_plan_prints_every_stage(corpus, tmp_path, capsys):
    plan.main([*arguments(corpus, tmp_path, "--stages", "0.5:96,1:192"), "--no-memory"])
    assert re.findall(r"until (\d+)%: (\d+) x (\d+)", capsys.readouterr().out) == [
        ("50", "16", "96"), ("100", "8", "192"),
    ]  # fmt: skip


# What comes out ------------------------------------------------------------------------


def test_the_export_is_the_run_s_weights_in_bfloat16(exported, run, corpus):
    masters = export.trained(run, corpus).params
    model = slj.load(exported)
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), masters)
    jax.tree.map(np.testing.assert_array_equal, model.params, rounded)
    assert model.config.max_position_embeddings == LENGTH
    assert model.tokenizer.to_str() == corpus.lexicon.tokenizer.to_str()
    assert (exported / "heldout.txt").read_bytes() == TEXT.read_bytes()


def test_task_files_ask_what_can_be_answered_within_the_context(exported):
    model = slj.load(exported)
    for name, pattern in (("recall", r"has code"), ("hops", r"go to")):
        text = (exported / f"{name}.jsonl").read_text()
        asked = read_questions(text)
        assert len(asked) == 8
        for question, line in zip(asked, text.splitlines(), strict=True):
            facts = json.loads(line)
            whole = model.tokenizer.encode(question.prompt + question.answer).ids
            assert len(whole) <= LENGTH
            assert re.search(pattern, question.prompt)
            if name == "hops":
                pointer = dict(re.findall(r"From (\w+) go to (\w+)\.", question.prompt))
                (at,) = re.findall(rf"From (\w+) take {facts['hops']} steps$", question.prompt)
                names = []
                for step in range(1, facts["hops"] + 1):
                    at = pointer[at]
                    names += [at] * (step in (4, facts["hops"]))
                assert question.answer == " to " + " ".join(names)
            else:
                *_, asked_for = re.findall(r"What code has the (\w+ \w+)\?$", question.prompt)
                assert f"The {asked_for} has code{question.answer}." in question.prompt


def test_an_export_that_is_too_large_is_refused(corpus, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LIMIT", 2**16)
    with pytest.raises(ValueError, match=r"MiB of weights are more than 0\.0625"):
        export.export(slj.load(exported), corpus, tmp_path / "x", lengths=[96], count=1)


@pytest.fixture(scope="module")
def measured(exported, corpus, tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("measured") / "new.json"
    given = ["--lengths", "96,300", "--count", "2", "--window", "64", "--json", str(path)]
    evaluate.main([str(exported), "--corpus", corpus.manifest["directory"], *given])
    return json.loads(path.read_text())


def test_the_evaluation_measures_what_the_library_s_forward_gives(
    exported, measured, monkeypatch
):
    model = slj.load(exported)
    monkeypatch.setattr(evaluate, "TOKENS_AT_A_TIME", 64 * 5)  # the last group has fewer
    text = TEXT.read_text()[:2000]
    found = evaluate.measure_text(model, text, window=64)
    ids = np.asarray(model.tokenizer.encode(text).ids)
    windows = ids[: len(ids) // 64 * 64].reshape(-1, 64)
    assert len(windows) % 5
    out = slj.forward(model, windows)
    log_p = jax.nn.log_softmax(out.logits[:, :, :-1], axis=-1)
    loss = -jnp.take_along_axis(log_p, jnp.asarray(windows)[None, :, 1:, None], axis=-1)
    np.testing.assert_allclose(found["cross_entropy"], loss.mean(axis=(1, 2, 3)), atol=0.02)
    size = sum(len(model.tokenizer.decode(row[1:].tolist())) for row in windows)
    assert found["bytes"] == size
    likeliest = np.asarray(jnp.argmax(out.logits[:, :, :-1], axis=-1))
    agreement = (likeliest[:-1] == likeliest[-1:]).mean(axis=(1, 2))
    np.testing.assert_allclose(found["agreement"], agreement, atol=0.03)
    assert len(measured["own_text"]) == 2
    assert all(0 <= share <= 1 for share in measured["own_text"])


def test_questions_that_do_not_fit_the_context_are_not_asked(measured):
    assert set(measured["recall_by_length"]) == {"96"}
    assert set(measured["hops_by_length"]) == {"96"}
    assert set(measured["hops_by_steps"]) == {str(n) for n in range(1, 9)}
    assert all(len(loops) == 3 for loops in measured["hops_by_steps"].values())


def test_text_shorter_than_a_window_is_refused(exported):
    with pytest.raises(ValueError, match=r"the text has \d+ tokens, fewer than a window of 64"):
        evaluate.measure_text(slj.load(exported), "Short.", window=64)


def test_an_answer_is_right_if_all_of_its_tokens_are():
    ids, answers = [9, 5, 1, 2, 3], [2, 3]
    tokens = np.array([[0, 1, 2, 9, 9], [0, 1, 7, 9, 9], [5, 7, 2, 3, 9]])
    assert scoring.answered(tokens, ids, answers).tolist() == [True, False, False]


def test_scores_do_not_see_the_padding(small):
    config, params, batch = small
    chosen = objective.Objective(dtype="float32")
    long, short = batch.ids[0].tolist(), batch.ids[1, :5].tolist()
    one, two = scoring.score_padded(params, config, chosen, [long, short], length=12, rows=2)
    (alone,) = scoring.score_padded(params, config, chosen, [short], length=12, rows=2)
    assert (one.shape, two.shape) == ((3, 12), (3, 5))
    np.testing.assert_array_equal(two, alone)
    out = forward_params(params, config, batch.ids)
    np.testing.assert_array_equal(one, np.asarray(out.logits).argmax(axis=-1)[:, 0])


@pytest.fixture(scope="module")
def two_runs(run) -> list[record.Record]:
    """A record of a paused run, and of one that went on from its weights."""
    whole = record.read_record(run)
    before = [line for line in whole.log if line.get("step", 0) <= 30 and "tokens" not in line]
    paused = record.Record(
        whole.settings, [*before, {"kind": "paused", "step": 32, "progress": 0.33}]
    )
    settings = json.loads(json.dumps(whole.settings))
    settings["weights_of"] = "out/first-1"
    settings["objective"]["entropy"] = 0.3
    settings["optimizer"] = {"rule": "adamw", "decay": 0.6, "table_decay": 0.5}
    return [paused, record.Record(settings, whole.log)]


def test_the_card_carries_both_models(run, corpus, measured):
    old = json.loads(json.dumps(measured)) | {"context": 64}
    old["text"]["cross_entropy"] = [1.25, 1.5, 1.75]
    del old["hops_by_steps"]["8"]
    made = record.read_record(run)
    text = card.card({"this": measured, "old": old}, [made], corpus.manifest)
    assert text.startswith("---\nlicense: apache-2.0\n")
    new = tables.numbers(measured["text"]["cross_entropy"])
    assert f"| held-out cross-entropy, nats per token | {new} | 1.250, 1.500, 1.750 |" in text
    eight = tables.numbers(measured["hops_by_steps"]["8"])
    assert f"| pointers followed: 8 | {eight} | - |" in text
    assert "One run, from random weights:" in text
    assert f"| Run | {STEPS} steps, 0 million tokens, " in text
    assert "Muon for matrices" in text
    assert "heldout (" in text
    assert f"(this {LENGTH}, old 64 tokens)" in " ".join(text.split())
    alone = card.card({"this": measured}, [made], corpus.manifest)
    assert "contexts differ" not in alone
    unfinished = record.Record(made.settings, made.log[:-1])
    with pytest.raises(ValueError, match="the run is not done"):
        card.card({"this": measured}, [unfinished], corpus.manifest)


def test_the_card_tells_of_the_runs_in_order(two_runs, corpus, measured):
    text = card.card({"this": measured}, two_runs, corpus.manifest)
    assert text.startswith("---\nlicense: apache-2.0\n")
    first, second = text.split("First run, from random weights:")[1].split(
        "Then, from its weights, with a new optimiser:"
    )
    seconds = next(line["seconds"] for line in two_runs[0].log if line.get("step") == 30)
    assert f"| Run | 32 steps, {seconds / 60:.1f} minutes of training steps on" in first
    assert "weight decay 0.1 of matrices and 0 of the embedding and the head" in first
    assert f"ended after 33% of a schedule of {STEPS} steps" in first
    assert f"| Rows | up to 33% {LENGTH} tokens" in first
    assert "minus 0.1 of that distribution's entropy" in first
    assert "minus 0.3 of the exit distribution's entropy" in second
    assert "weight decay 0.6 of matrices and 0.5 of the embedding and the head" in second
    assert f"| Rows | up to 100% {LENGTH} tokens" in second
    assert "million tokens" in second.split("## What it can do")[0]
    assert "ended after" not in second
    # Each has its own numbers on the way.
    assert [part.count(f"| {LENGTH} | ") for part in (first, second)] == [1, 2]


def test_a_card_of_runs_that_do_not_follow_on_each_other_is_refused(two_runs, corpus, measured):
    first, second = two_runs
    killed = record.Record(first.settings, first.log[:-1])
    for runs, message in (
        ([second, first], "the run is not done"),
        ([second], "run 1 of 1 began with the weights of out/first-1: name all runs"),
        ([first, record.Record(first.settings, second.log)], "run 2 of 2 began with random"),
        ([killed, second], "neither done nor paused"),
    ):
        with pytest.raises(ValueError, match=message):
            card.card({"this": measured}, runs, corpus.manifest)


@pytest.mark.parametrize(
    ("hops", "recall", "said"),
    [
        ([[1, 0, 0], [1, 0.95, 0], [1, 1, 1]], 1.0, "code among records in up to 512 tokens, "
         "and follows 1 to 3 pointers from record to record. It needs all 3 loops for that: it "
         "follows 1 after loop 1, 1 to 2 after loop 2. What"),
        ([[0, 0, 0], [1, 0, 1], [1, 0, 1]], 0.95, "follows 1 to 1 pointers"),
        ([[0, 0, 0]] * 3, 0.5, "It does not reliably find a code among records, and does not "
         "follow pointers from record to record."),
    ],
)  # fmt: skip
def test_the_card_says_what_was_measured(hops, recall, said):
    measured = {
        "text": {"cross_entropy": [4.0, 3.01, 3.0]},
        "hops_by_steps": {str(n): [loop[n - 1] for loop in hops] for n in (1, 2, 3)},
        "recall_by_length": {"256": [1, 1, 1], "512": [0, 0, recall]},
    }
    if recall < 0.9:
        del measured["recall_by_length"]["256"]
    text = " ".join(card.abilities(measured).split())
    assert said in text
    assert text.endswith("In plain text loop 2 is within 1 % of the last or better.")


def test_a_corpus_that_is_missing_or_spoilt_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"has no manifest.json: make it"):
        corpora.read(tmp_path)
    facts = {"name": "x", "weight": 1.0}
    good, bad = np.arange(5, dtype=np.uint16), np.array([1024], np.uint16)
    for train_tokens in (bad, bad[:0]):
        corpora.write(tmp_path, corpus.lexicon.tokenizer, [(facts, train_tokens, good)])
        with pytest.raises(ValueError, match="is empty or has tokens outside the vocabulary"):
            corpora.read(tmp_path)


def test_a_source_too_short_to_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="x: too little text to hold some of it out"):
        prepare.build(
            tmp_path, [({"name": "x", "weight": 1.0}, [["one"]])], vocabulary=1024, judged=""
        )


def test_questions_are_drawn_anew_for_another_seed(corpus):
    first, again, other = (questions.draw_hops(corpus, 200, 2, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other
    assert [q.hops for q in first] == [n for n in range(1, 9) for _ in range(2)]


def test_settings_hold_all_that_decides_the_result(corpus, run):
    settings = json.loads((run / "settings.json").read_text())
    assert set(settings) == {
        "model", "objective", "schedule", "mixture", "optimizer", "seed", "weights_of"
    }  # fmt: skip
    assert options.schedule_of(settings).steps == STEPS
    # Settings from before a run could end early.
    del settings["schedule"]["until"]
    assert options.schedule_of(settings).until == 1.0
