"""Windows, prompts, questions and retentions, and what is wrong with them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.evaluate import evaluate, read_questions, text_prompts, text_windows
from sparse_loop_jax.evaluate.inputs import (
    Question,
    at_retention,
    check_retentions,
    encode,
    evenly,
    rolling_windows,
    within,
)
from sparse_loop_jax.models import OURO_1_4B


@pytest.fixture(scope="module")
def model(ascii_checkpoint):
    return slj.load(ascii_checkpoint)


@pytest.fixture(scope="module")
def mute(load_gold):
    """A model without a tokenizer."""
    return load_gold("mha").model()


@pytest.mark.parametrize("length", [14, 15, 21, 22, 23, 60])
def test_windows_judge_every_token_behind_the_first_prefix_once(mute, length):
    ids = np.arange(length) % 128
    windows = text_windows(mute, ids, window=12, prefix=4)
    judged = []
    for number, w in enumerate(windows):
        start = 8 * number
        assert w.prefix == 4
        assert w.ids.tolist() == ids[start : start + 13].tolist()
        judged += range(start + 5, start + 5 + w.rows)
    assert judged == list(range(5, length))
    assert max(len(w.ids) for w in windows) <= 13


def test_fewer_windows_are_evenly_spaced(mute):
    ids = np.arange(100)
    every = text_windows(mute, ids, window=12, prefix=4)
    assert len(every) == 12
    some = text_windows(mute, ids, window=12, prefix=4, most=3)
    # The last window has seven rows, and is taken where all are.
    assert [(w.ids[0], w.rows) for w in some] == [(0, 8), (40, 8), (80, 8)]
    assert len(text_windows(mute, ids, window=12, prefix=4, most=99)) == 12
    assert [w.rows for w in text_windows(mute, ids, window=12, prefix=4, most=12)][-1] == 7
    whole = text_windows(mute, ids[:93], window=12, prefix=4, most=2)
    assert [w.ids[0] for w in whole] == [0, 80]
    assert len(text_windows(mute, ids[:20], window=12, prefix=4, most=1)) == 1
    assert evenly([1, 2, 3], None) == [1, 2, 3]


@pytest.mark.parametrize(("tokens", "length"), [(1, 4), (4, 4), (5, 4), (8, 4), (9, 2)])
def test_rolling_windows_cover_the_text(tokens, length):
    ids = list(range(tokens))
    judged = []
    for window in rolling_windows(ids, 99, length):
        assert len(window.ids) - 1 <= length
        judged += window.ids[window.prefix + 1 :].tolist()
    assert judged == ids


def test_prompts_are_evenly_spaced(model):
    prompts = text_prompts(model, "abcdefghij", count=3, tokens=4)
    assert [bytes(p.tolist()).decode() for p in prompts] == ["abcd", "defg", "ghij"]


def test_questions_of_json_lines():
    text = (
        '{"prompt": "a", "answer": " 1", "more": 2}\n\n  \n{"prompt": "b\u2028", "answer": "2"}'
    )
    questions = read_questions(text)
    assert [(q.prompt, q.answer) for q in questions] == [("a", " 1"), ("b\u2028", "2")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "tasks, line 2: is no JSON"),
        ("[1]", "tasks, line 2: must be an object"),
        ('{"prompt": "b"}', "tasks, line 2: 'answer' must be a string that is not empty"),
        (
            '{"prompt": "", "answer": "1"}',
            "line 2: 'prompt' must be a string that is not empty",
        ),
        ('{"prompt": "b", "answer": 337}', "line 2: 'answer' must be a string .* got 337"),
    ],
)
def test_malformed_task_lines_are_named(line, message):
    with pytest.raises(ValueError, match=message):
        read_questions('{"prompt": "a", "answer": "1"}\n' + line)


def test_questions_within_a_number_of_tokens(model):
    a, b = (Question(prompt, "x") for prompt in ("1234", "12345"))
    assert within(model, [a, b], None) == [a, b]
    assert within(model, [a, b], 4) == [a]
    with pytest.raises(ValueError, match="at most 3 tokens: the shortest of 2 has 4"):
        within(model, [a, b], 3)


def test_a_task_file_without_questions():
    with pytest.raises(ValueError, match="recall has no questions"):
        read_questions("\n\n", "recall")


def test_dense_comes_first_and_always():
    assert check_retentions([0.02, 0.5]) == [1.0, 0.5, 0.02]
    assert check_retentions([1, np.float64(0.5)]) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("retentions", "message"),
    [
        ([], "retentions is empty"),
        ([0.0], r"must be numbers in \(0, 1\], got 0.0"),
        ([0.5, 1.5], r"must be numbers in \(0, 1\], got 1.5"),
        ([-0.1], "got -0.1"),
        ([float("nan")], "got nan"),
        (["0.5"], "got '0.5'"),
        ([True], "got True"),
        ([0.5, 0.1, 0.5], "retention 0.5 is given twice"),
        ([1.0, 1], "retention 1.0 is given twice"),
    ],
)
def test_bad_retentions(mute, retentions, message):
    with pytest.raises(ValueError, match=message):
        evaluate(mute, retentions=retentions, text=[1, 2, 3])


def test_retentions_share_a_capacity():
    sparse = slj.SparseDecodeConfig(sink_keys=2)
    assert at_retention(sparse, 0.1, 300, OURO_1_4B).capacity == 512
    assert at_retention(sparse, 0.1, 300, OURO_1_4B).sink_keys == 2
    assert at_retention(sparse, 1.0, 300, OURO_1_4B).is_dense
    own = slj.SparseDecodeConfig(capacity=40)
    assert at_retention(own, 0.1, 300, OURO_1_4B).capacity == 40


TEXT = "some text that is long enough for a window"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": ""}, "the text is empty: give it some text"),
        ({"text": " \n "}, "the text is empty: give it some text"),
        ({"text": []}, "the text is empty: it needs at least one token"),
        ({"text": [[1, 2]]}, "flat list of integer token ids, got int64 of shape"),
        ({"text": [0.5]}, "flat list of integer token ids, got float64"),
        ({"text": [3, 128]}, "token id 128, outside the vocabulary of 128"),
        ({"text": [-1, 5]}, "token id -1, outside the vocabulary"),
        ({"text": "short"}, "the text has 5 tokens; a prefix of 8 needs at least 10"),
        ({"window": 513}, "window 513 is more than the model's context of 512"),
        ({"window": 1, "prefix": 1}, "window must be an integer >= 2, got 1"),
        ({"window": 16.0}, "window must be an integer >= 2, got 16.0"),
        ({"prefix": 0}, "prefix must be an integer >= 1, got 0"),
        ({"prefix": 16}, "prefix 16 leaves nothing of a window of 16 to decode"),
        ({"windows": 0}, "windows must be an integer >= 1, got 0"),
        ({"inside_windows": -1}, "inside_windows must be an integer >= 0, got -1"),
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"prompts": -1}, "prompts must be an integer >= 0, got -1"),
        ({"prompts": 1, "new_tokens": 1}, "new_tokens must be an integer >= 2, got 1"),
        ({"prompts": 1, "prompt_tokens": 0}, "prompt tokens must be an integer >= 1, got 0"),
        ({"prompts": 1, "prompt_tokens": 99}, "fewer than a prompt of 99"),
        (
            {"prompts": 1, "prompt_tokens": 8, "new_tokens": 506},
            "prompts of 8 tokens continued by 506 are more than the model's context of 512",
        ),
        ({"acceptance": True}, "acceptance is measured on prompts: ask for at least one"),
        ({"speculative_tokens": 0}, "speculative_tokens must be an integer >= 1, got 0"),
        ({"draft_loops": [4]}, "draft_loops must be from 1 to 3, got 4"),
        ({"draft_loops": [1, 0]}, "draft_loops must be from 1 to 3, got 0"),
        ({"questions": []}, "questions is empty"),
        ({"text": None}, "nothing to measure"),
        ({"text": None, "questions": read_questions('{"prompt": "a", "answer": "b"}'),
          "prompts": 1}, "prompts are taken from the text"),
        ({"sparse": slj.SparseDecodeConfig(capture_loop=3)}, "more than the model's 4 loops"),
        ({"sparse": slj.SparseDecodeConfig(capacity=7)}, "capacity 7 is below the 8 keys"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_anything_runs(
    model, options, message, compile_counter
):
    arguments = {"text": TEXT, "window": 16, "prefix": 8, "retentions": [0.5]} | options
    with compile_counter() as compiled, pytest.raises(ValueError, match=message):
        evaluate(model, **arguments)
    assert compiled.count == 0, compiled


def test_text_and_tasks_need_a_tokenizer(mute):
    with pytest.raises(ValueError, match="the text is text and the model has no tokenizer"):
        encode(mute, "text", "the text")
    questions = read_questions('{"prompt": "a", "answer": "b"}')
    with pytest.raises(ValueError, match="tasks are text and the model has no tokenizer"):
        evaluate(mute, retentions=[1.0], questions=questions)


def test_a_question_beyond_the_context(model):
    questions = read_questions(f'{{"prompt": "{"a" * 510}", "answer": "bcd"}}')
    with pytest.raises(ValueError, match="question 1 has 510 tokens and its answer 3, more"):
        evaluate(model, retentions=[1.0], questions=questions)


# Contexts that are no power of two -------------------------------------------------------


@pytest.fixture(scope="module")
def short():
    """A function that makes a small model of some context."""

    def make(context):
        return slj.Ouro(
            slj.OuroConfig(
                vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                max_position_embeddings=context,
            ),
            rngs=0,
        )  # fmt: skip

    return make


def test_the_capacity_is_within_the_context(short):
    config = short(100).config
    sparse = slj.SparseDecodeConfig(key_retention=0.5)
    capacities = [at_retention(sparse, 0.5, n, config).capacity for n in (60, 70, 100, 200)]
    assert capacities == [64, 100, 100, 100]


def test_everything_up_to_the_end_of_any_context(short):
    """What passes the checks runs, to the last token that there is room for."""
    ids = np.arange(300) % 128
    options = {"text": ids, "retentions": [0.5], "prefix": 16, "windows": 2, "prompts": 2}
    for context, window in ((100, 100), (64, 40)):
        result = evaluate(
            short(context), window=window, prompt_tokens=context - 8, new_tokens=9,
            acceptance=True, draft_loops=[2], **options,
        )  # fmt: skip
        assert [row["retention"] for row in result["text"]] == [1.0, 0.5]
        assert len(result["divergence"]) == len(result["acceptance"]) == 2


def test_a_question_at_the_end_of_the_context(short, model):
    small = short(32)
    small.tokenizer = model.tokenizer
    (question,) = read_questions(json.dumps({"prompt": "a" * 31, "answer": "b"}))
    result = evaluate(small, questions=[question], retentions=[0.5])
    assert [row["questions"] for row in result["answers"]] == [1, 1]
