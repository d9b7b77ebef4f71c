"""What comes out of a run of the small model's recipe: weights, questions, numbers, a card."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import LENGTH, ROOT, STEPS, TEXT

import sparse_loop_jax as slj
from examples.train_tiny import (
    card,
    evaluate,
    export,
    objective,
    questions,
    record,
    scoring,
    tables,
)
from sparse_loop_jax.evaluate import read_questions
from sparse_loop_jax.models.forward import forward_params

pytest_plugins = ["tiny_runs"]


# The export and its questions ----------------------------------------------------------


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


def test_questions_are_drawn_anew_for_another_seed(corpus):
    first, again, other = (questions.draw_hops(corpus, 200, 2, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other
    assert [q.hops for q in first] == [n for n in range(1, 9) for _ in range(2)]


# The evaluation ------------------------------------------------------------------------


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


# The card ------------------------------------------------------------------------------


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


def test_the_bundled_model_s_card_is_what_its_records_make():
    """The runs, the corpus and the evaluations that `examples/train_tiny/bundled` keeps."""
    kept = ROOT / "examples/train_tiny/bundled"
    models = {"this model": "new", "its predecessor": "old"}
    measured = {k: json.loads((kept / f"{v}.json").read_text()) for k, v in models.items()}
    runs = [record.read_record(kept / name) for name in ("first", "run")]
    manifest = json.loads((kept / "manifest.json").read_text())
    text = (ROOT / "sparse_loop_jax/data/tiny-ouro/README.md").read_text()
    assert card.card(measured, runs, manifest) == text


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
    assert f"| Rows | until 33% of the plan rows of {LENGTH} tokens" in first
    assert "minus 0.1 of that distribution's entropy" in first
    assert "minus 0.3 of the exit distribution's entropy" in second
    assert "weight decay 0.6 of matrices and 0.5 of the embedding and the head" in second
    assert f"| Rows | until 100% of the plan rows of {LENGTH} tokens" in second
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
         "follows 1 after loop 1, 1 to 2 after loop 2 (loops are counted from 1 here, and from "
         "0 in the library). What"),
        ([[0, 0, 0], [1, 0, 1], [1, 0, 1]], 0.95, "follows 1 pointer from"),
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
