"""What a step trains on, as a pure function of a seed and the step's number.

Nothing but the step's number is needed to go on with the data where a run stopped.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .corpus import Texts
from .lexicon import END, Lexicon
from .objective import Batch
from .papers import Paper
from .tasks import copying, log_uniform, most_hops, recall, several_hops, story

SHORTEST = 96  # tokens that every task fits into


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """What papers are made of, and what they weigh.

    Attributes:
      hops, recall, copying, story: relative shares of the tasks.
      answer_weight: of an answer's tokens in the loss, where text weighs 1.
      paper_weight: of the rest of a paper, whose names and codes cannot be foreseen.
      per_loop: steps that each loop is asked for in several-hop questions; None: what is
        named next.
    """

    hops: float = 0.5
    recall: float = 0.25
    copying: float = 0.15
    story: float = 0.1
    answer_weight: float = 6.0
    paper_weight: float = 0.1
    per_loop: int | None = 1


def draw_paper(
    rng: np.random.Generator,
    lexicon: Lexicon,
    texts: Texts,
    length: int,
    *,
    loops: int,
    hops: int,
    mixture: Mixture,
) -> Paper:
    """A paper of a random task with at most `length` tokens."""
    shares = np.array([mixture.hops, mixture.recall, mixture.copying, mixture.story])
    task = rng.choice(4, p=shares / shares.sum())
    prose = texts if rng.random() < 0.5 else None
    if task == 0:
        return several_hops(
            rng,
            lexicon,
            length,
            loops=loops,
            prose=prose,
            hops=min(hops, most_hops(lexicon, length)),
            per_loop=mixture.per_loop,
        )
    if task == 1:
        questions = max(1, length // 80)
        return recall(rng, lexicon, length, prose=prose, questions=questions)
    if task == 2:
        return copying(rng, lexicon, length, prose=texts)
    return story(rng, lexicon, length, prose=prose)


def make_batch(
    texts: Texts,
    lexicon: Lexicon,
    mixture: Mixture,
    *,
    seed: int,
    step: int,
    rows: int,
    length: int,
    synthetic: float,
    loops: int,
    hops: int,
) -> Batch:
    """One batch of `rows` rows of `length` positions, as numpy arrays.

    A row is a passage of text, or has one paper in it, with text before and after. Two papers
    in a row could contradict each other.

    Args:
      synthetic: share of rows that hold a paper of a task; the rest are text.
      seed, step: the batch is a function of these and of the shapes.
      hops: most steps of several-hop questions.

    Raises:
      ValueError: `length` is below `SHORTEST`.
    """
    if length < SHORTEST:
        raise ValueError(f"rows must have at least {SHORTEST} tokens, got {length}")
    rng = np.random.default_rng([seed, step])
    ids = np.empty((rows, length + 1), np.int32)
    weights = np.ones((rows, length), np.float32)
    staged: list[tuple[int, int, tuple[int, ...]]] = []
    for row in range(rows):
        if rng.random() >= synthetic:
            ids[row] = texts(rng, length + 1)
            continue
        # Long papers have most of the answers, short ones are learnt from first.
        size = length if rng.random() < 0.5 else log_uniform(rng, SHORTEST, length)
        paper = draw_paper(
            rng, lexicon, texts, size - 2, loops=loops, hops=hops, mixture=mixture
        )
        end = len(paper) + 2  # an end of text before and after
        start = int(rng.integers(0, length + 1 - end + 1))
        ids[row] = texts(rng, length + 1)
        ids[row, start : start + end] = [END, *paper.ids, END]
        # The weight of a position is that of the token it predicts, one further on.
        weights[row, start : start + len(paper)] = mixture.paper_weight
        weights[row, [start + a for a in paper.answers]] = mixture.answer_weight
        staged += [(row, start + index, said) for index, said in paper.staged.items()]
    targets = np.repeat(ids[None, :, 1:], loops, axis=0)
    for row, position, said in staged:
        targets[:, row, position] = said
    return Batch(ids=ids[:, :-1], targets=targets, weights=weights)  # type: ignore[arg-type]
