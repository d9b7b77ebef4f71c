"""The tasks of the small model's recipe, and its batches."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from examples.train_tiny import batches, hops, lexicon, papers, tasks
from examples.train_tiny.corpus import Texts, encode

TEXT = Path(__file__).parent.parent / "sparse_loop_jax/data/tiny-ouro/heldout.txt"


@pytest.fixture(scope="module")
def words() -> lexicon.Lexicon:
    lines = TEXT.read_text().splitlines()[:200]
    return lexicon.Lexicon(lexicon.train_tokenizer(lines, 1024, repeats=1000))


@pytest.fixture(scope="module")
def texts(words) -> Texts:
    ids = encode(words.tokenizer, [TEXT.read_text().split("\n\n")[:60]])
    return Texts((ids, ids[:500]), np.array([0.75, 0.25]))


# Independent solvers: they read the text, and know nothing of how it was made. ----------


def solve_hops(text: str) -> list[tuple[str, str, int]]:
    """(start, name, steps between them) of each name of each answer, by following pointers."""
    pointer = dict(re.findall(r"From (\w+) go to (\w+)\.", text))
    found = []
    for start, steps in re.findall(r"From (\w+) take (\d) steps to", text):
        at = before = start
        for step in range(1, int(steps) + 1):
            at = pointer[at]
            if step in (4, int(steps)):
                found.append((before, at, step if step <= 4 else step - 4))
                before = at
    return found


def solve_story(text: str) -> list[str]:
    """Where each thing is that the story asks for."""
    at, where = {}, {}
    answers = []
    for line in text.splitlines():
        if match := re.search(r"(\w+) (is at|goes to) the (\w+)\.$", line):
            at[match[1]] = match[3]
        elif match := re.search(r"(\w+) takes the (\w+)\.$", line):
            where[match[2]] = lambda who=match[1]: at[who]
        elif match := re.search(r"(\w+) drops the (\w+)\.$", line):
            where[match[2]] = lambda place=at[match[1]]: place
        elif match := re.match(r"Where is the (\w+)\?", line):
            answers.append(where[match[1]]())
    return answers


def said(words, paper: papers.Paper) -> list[str]:
    """The tokens of the answers."""
    return [words.tokenizer.decode([paper.ids[i]]).strip() for i in paper.answers]


@pytest.mark.parametrize("prose", [False, True])
def test_several_hops_are_what_an_independent_solver_finds(words, texts, prose):
    rng = np.random.default_rng(0)
    steps_seen = set()
    for _ in range(20):
        paper = tasks.several_hops(rng, words, 400, loops=4, prose=texts if prose else None)
        assert len(paper) <= 400
        text = words.tokenizer.decode(paper.ids)
        solved = solve_hops(text)
        assert said(words, paper) == [answer for _, answer, _ in solved]
        # Each shallow loop is asked for the node one step further on.
        pointer = dict(re.findall(r"From (\w+) go to (\w+)\.", text))
        steps_seen |= {int(steps) for steps in re.findall(r"take (\d) steps", text)}
        for index, (start, _, steps) in zip(paper.answers, solved, strict=True):
            for loop, token in enumerate(paper.staged[index]):
                at = start
                for _ in range(min(steps, loop + 1)):
                    at = pointer[at]
                assert words.tokenizer.decode([token]).strip() == at
    assert steps_seen == set(range(1, 9))


def test_the_solver_objects_to_a_wrong_answer(words):
    paper = tasks.several_hops(np.random.default_rng(0), words, 300, loops=4)
    off_by_one = [words.tokenizer.decode([paper.ids[i - 3]]) for i in paper.answers]
    assert off_by_one != [
        answer for _, answer, _ in solve_hops(words.tokenizer.decode(paper.ids))
    ]
    text = words.tokenizer.decode(paper.ids)
    # Other numbers of steps that leave as many names.
    shifted = re.sub(
        r"take (\d)", lambda m: f"take {int(m[1]) + (-1 if m[1] in '48' else 1)}", text
    )
    right = [(a, steps) for _, a, steps in solve_hops(text)]
    wrong = [a for _, a, _ in solve_hops(shifted)]
    last = [i for i, (_, steps) in enumerate(right) if steps != 4]
    assert last
    assert all(right[i][0] != wrong[i] for i in last)


@pytest.mark.parametrize("prose", [False, True])
def test_recall_asks_for_codes_that_were_given(words, texts, prose):
    rng = np.random.default_rng(1)
    for _ in range(10):
        paper = tasks.recall(rng, words, 500, prose=texts if prose else None)
        text = words.tokenizer.decode(paper.ids)
        codes = dict(re.findall(r"The (\w+ \w+) has code (\d{3})\.", text))
        asked = re.findall(r"What code has the (\w+ \w+)\? (\d{3})", text)
        assert len(asked) == 8
        assert len(paper) <= 500
        assert [codes[name] for name, _ in asked] == [code for _, code in asked]
        assert "".join(said(words, paper)) == "".join(code for _, code in asked)


@pytest.mark.parametrize("prose", [False, True])
def test_stories_end_where_an_independent_reader_says(words, texts, prose):
    rng = np.random.default_rng(2)
    asked = 0
    for _ in range(40):
        paper = tasks.story(rng, words, 400, prose=texts if prose else None)
        assert len(paper) <= 400
        assert said(words, paper) == solve_story(words.tokenizer.decode(paper.ids))
        asked += len(paper.answers)
    assert asked > 40


def test_copying_repeats_the_passage(words, texts):
    for seed in range(10):
        paper = tasks.copying(np.random.default_rng(seed), words, 300, prose=texts)
        start = len(words.ids("Remember:"))
        passage = [paper.ids[i] for i in paper.answers]
        assert paper.ids[start : start + len(passage)] == passage
        assert len(paper) <= 300


def test_pieces_join_to_what_the_tokenizer_makes_of_the_text(words):
    rng = np.random.default_rng(3)
    made = [
        tasks.several_hops(rng, words, 300, loops=2),
        tasks.recall(rng, words, 300),
        tasks.story(rng, words, 300),
    ]
    for paper in made:
        assert words.tokenizer.encode(words.tokenizer.decode(paper.ids)).ids == paper.ids


def test_tasks_refuse_what_does_not_fit(words, texts):
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="20 tokens have no room for 9 pointers"):
        tasks.several_hops(rng, words, 20, loops=4)
    with pytest.raises(ValueError, match="60 tokens have no room for 1 records"):
        tasks.recall(rng, words, 60)
    with pytest.raises(ValueError, match="no room for a passage twice"):
        tasks.copying(rng, words, 12, prose=texts)
    with pytest.raises(ValueError, match="no room for a story"):
        tasks.story(rng, words, 30)
    with pytest.raises(ValueError, match="a cycle of 4 of 10 names does not fit chains of 8"):
        hops.draw_chain(rng, names=10, nodes=4, questions=1, hops=np.array([8]))


def test_most_hops_is_the_longest_chain_that_fits(words):
    rng = np.random.default_rng(0)
    for length in range(40, 120, 7):
        longest = tasks.most_hops(words, length)
        made = tasks.several_hops(rng, words, length, loops=4, questions=1, hops=longest)
        assert len(made) <= length
        if longest < hops.MAX_HOPS:
            with pytest.raises(ValueError, match="no room"):
                tasks.several_hops(rng, words, length, loops=4, questions=1, hops=longest + 1)


def test_a_tokenizer_that_leaves_names_in_pieces_is_refused():
    with pytest.raises(ValueError, match=r"the name '\w+' is \d+ tokens, not one"):
        lexicon.train_tokenizer([TEXT.read_text()], 300, repeats=1)


def test_spread_uses_all_of_the_prose():
    gaps = papers.spread(np.random.default_rng(0), 100, 7)
    assert gaps.sum() == 100
    assert gaps.min() >= 0
    assert papers.spread(np.random.default_rng(0), 0, 3).tolist() == [0, 0, 0]


# Batches -------------------------------------------------------------------------------


def batch(words, texts, **changes):
    options = {"seed": 0, "step": 5, "rows": 24, "length": 256, "loops": 4, "hops": 8}
    mixture = batches.Mixture(answer_weight=6.0, paper_weight=0.3)
    return batches.make_batch(texts, words, mixture, synthetic=0.7, **(options | changes))


def test_a_batch_is_a_function_of_its_step(words, texts):
    first, again, other = (batch(words, texts, step=s) for s in (5, 5, 6))
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.targets, again.targets)
    np.testing.assert_array_equal(first.weights, again.weights)
    assert (np.asarray(first.ids) != np.asarray(other.ids)).mean() > 0.5


def test_batches_hold_tokens_of_the_vocabulary_and_targets_one_further_on(words, texts):
    made = batch(words, texts)
    size = words.tokenizer.get_vocab_size()
    for ids in (np.asarray(made.ids), np.asarray(made.targets)):
        assert ids.min() >= 0
        assert ids.max() < size
    ids, targets, weights = map(np.asarray, (made.ids, made.targets, made.weights))
    np.testing.assert_array_equal(targets[-1, :, :-1], ids[:, 1:])
    staged = (targets != targets[-1:]).any(axis=0)
    assert staged.any()
    assert (weights[staged] == 6.0).all()
    # Asking every loop for the answer leaves nothing staged.
    mixture = batches.Mixture(per_loop=None)
    plain = batches.make_batch(
        texts,
        words,
        mixture,
        seed=0,
        step=5,
        rows=8,
        length=256,
        synthetic=1.0,
        loops=4,
        hops=8,
    )
    plain_targets = np.asarray(plain.targets)
    np.testing.assert_array_equal(
        plain_targets, np.broadcast_to(plain_targets[-1:], (4, 8, 256))
    )


def test_answers_weigh_most_and_text_weighs_one(words, texts):
    mixture = batches.Mixture(hops=1, recall=0, copying=0, story=0)
    made = batches.make_batch(
        texts,
        words,
        mixture,
        seed=0,
        step=1,
        rows=6,
        length=300,
        synthetic=1.0,
        loops=4,
        hops=4,
    )
    answers = 0
    for ids, weights in zip(np.asarray(made.ids), np.asarray(made.weights), strict=True):
        paper = weights != 1.0
        start, end = np.flatnonzero(paper)[[0, -1]]
        assert ids[start] == lexicon.END  # the paper begins after it
        text = words.tokenizer.decode(ids[start + 1 : end + 2].tolist())
        heavy = [
            words.tokenizer.decode([token]).strip()
            for token in np.append(ids[1:], 0)[weights == mixture.answer_weight]
        ]
        solved = [answer for _, answer, _ in solve_hops(text)]
        assert heavy == solved
        answers += len(solved)
    assert answers > 10


def test_short_rows_are_refused(words, texts):
    with pytest.raises(ValueError, match="at least 96 tokens, got 64"):
        batch(words, texts, length=64)


def test_texts_repeat_a_source_that_is_shorter_than_asked(texts):
    assert texts(np.random.default_rng(0), 100_000).shape == (100_000,)
