"""The runs of the small model's recipe, at toy size: from a corpus to a finished run."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import LENGTH, STEPS, arguments, log_of

import sparse_loop_jax as slj
from examples.train_tiny import (
    card,
    corpus as corpora,
    evaluate,
    export,
    options,
    prepare,
    recipe,
    record,
    state,
    train,
)
from sparse_loop_jax.models import OuroConfig

pytest_plugins = ["tiny_runs"]


# The corpus ----------------------------------------------------------------------------


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
    more = ["--weights-of", str(run), "--rope-theta", "7"]  # no shape tells
    with pytest.raises(ValueError, match=r"another model .*: .'rope_theta': .100000.0, 7.0"):
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
        state.restore_weights(run / "checkpoints", config, settings)


def test_a_loss_that_is_not_finite_stops_the_run(corpus, tmp_path, monkeypatch):
    def broken(params, optimizer, batch, rate, *, config, objective, rule):
        return params, optimizer, {"loss": jnp.float32(np.nan)}

    monkeypatch.setattr(train, "train_step", broken)
    with pytest.raises(FloatingPointError, match="the loss is nan after step 1"):
        train.main(arguments(corpus, tmp_path / "run"))


def test_settings_hold_all_that_decides_the_result(corpus, run):
    settings = json.loads((run / "settings.json").read_text())
    assert set(settings) == {
        "model", "objective", "schedule", "mixture", "optimizer", "seed", "tokenizer",
        "weights_of",
    }  # fmt: skip
    assert options.schedule_of(settings).steps == STEPS
    del settings["schedule"]["until"]
    assert options.schedule_of(settings).until == 1.0


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
    # What is done is not made again, and is not taken for another run's.
    monkeypatch.setattr(train, "main", None)
    assert toy_recipe("--peak", "5e-3")
    with pytest.raises(ValueError, match=r"first-1 has a run with other settings .*'schedule'"):
        toy_recipe("--peak", "6e-3")
    (tmp_path / "run/checkpoints/newest").unlink()
    with pytest.raises(TypeError):  # it would be trained again
        toy_recipe("--peak", "5e-3")


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


@pytest.mark.parametrize("option", ["--seed=7", "--resume", "--weights-of"])
def test_options_that_the_recipe_decides_are_refused(toy_recipe, option):
    with pytest.raises(ValueError, match=f"{option}: the recipe decides it"):
        toy_recipe(option)


def test_pointers_are_followed_where_the_last_loop_last_answered_half(tmp_path):
    path = tmp_path / "log.jsonl"

    def look(first: float, last: float) -> str:
        chains = {"recall": [1 - last] * 2, "hops 1": [first, last], "hops 2": [1 - last] * 2}
        return json.dumps({"kind": "held_out"} | chains) + "\n"

    path.write_text(look(0.0, 0.9) + look(1.0, 0.4) + '{"kind": "held')
    assert not recipe.follows_pointers(tmp_path)
    path.write_text(look(0.0, 0.1) + look(0.0, 0.5))
    assert recipe.follows_pointers(tmp_path)


def test_from_the_recipe_to_the_card(toy_recipe, corpus, tmp_path, monkeypatch):
    """All that makes a model, one command after the other."""
    monkeypatch.setattr(recipe, "LEARNT", 0.0)
    assert toy_recipe()
    where = ["--corpus", corpus.manifest["directory"]]
    run, out, found = tmp_path / "run", tmp_path / "tiny", tmp_path / "new.json"
    sizes = ["--lengths", str(LENGTH), "--count", "2"]
    export.main([*where, "--run", str(run), "--out", str(out), *sizes])
    model = slj.load(out)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype("bfloat16")),
        model.params,
        export.trained(run, corpus).params,
    )
    sizes += ["--window", "64"]
    evaluate.main([str(out), *where, *sizes, "--json", str(found)])
    runs = ["--run", str(tmp_path / "first-1"), str(run)]
    files = ["--new", str(found), "--old", str(found), "--out", str(out / "README.md")]
    card.main([*where, *runs, *files])
    text = (out / "README.md").read_text()
    assert text.startswith("---\nlicense:")
    assert "First run, from random weights:" in text
    assert "Then, from its weights" in text
    assert "| its predecessor |" in text


def test_the_recipe_begins_again_while_pointers_are_not_followed(toy_recipe, tmp_path):
    logs = r".*first-1/log.jsonl, .*first-2/log.jsonl, .*first-3/log.jsonl"
    with pytest.raises(RuntimeError, match=rf"no seed of \(1, 2, 3\) .* in {logs}; a higher"):
        toy_recipe()
    for seed in (1, 2, 3):
        first = tmp_path / f"first-{seed}"
        settings = record.read_record(first).settings
        assert (settings["seed"], recipe.is_done(first)) == (seed, True)
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
    assert first["optimizer"] == {"rule": "muon", "decay": 0.1, "table_decay": 0.0}
    assert (first["schedule"]["minutes"], first["schedule"]["until"]) == (13, 0.33)
    assert (second["schedule"]["minutes"], second["schedule"]["until"]) == (6.6, 1)
