"""Questions as text, for any model and tokenizer: what the evaluation asks, and task files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .corpus import Corpus
from .papers import Paper
from .tasks import most_hops, recall, several_hops

# Room left in a context for a tokenizer's whims and for what is decoded after the answer.
MARGIN = 16


@dataclasses.dataclass(frozen=True)
class Asked:
    """One question.

    Attributes:
      prompt, answer: text; the answer begins with a blank.
      tokens: nominal length of the prompt, in tokens of the corpus.
      hops: pointers to follow, 0 for recall.
      filler: whether prose stands between the records.
    """

    prompt: str
    answer: str
    tokens: int
    hops: int
    filler: bool


def as_text(corpus: Corpus, paper: Paper, *, hops: int, filler: bool) -> Asked:
    """A paper of one question, cut off after the answer.

    The token before the answer, which anyone can foresee, is left to be decoded too: the first
    new token comes out of the prompt's pass, which is dense, and it is the rows after it that
    sparse decoding has to get right.
    """
    decode = corpus.lexicon.tokenizer.decode
    first, last = paper.answers[0], paper.answers[-1]
    prompt = decode(paper.ids[: first - 1])
    whole = decode(paper.ids[: last + 1])
    return Asked(prompt, whole[len(prompt) :], first - 1, hops, filler)


def draw_recall(corpus: Corpus, length: int, count: int, *, seed: int) -> list[Asked]:
    """Questions for a code among records that fill `length` tokens, every other with prose.

    The prose is held out of training.
    """
    rng = np.random.default_rng([seed, length, 0])
    return [
        as_text(
            corpus,
            recall(
                rng,
                corpus.lexicon,
                length - MARGIN,
                prose=corpus.held if index % 2 else None,
                questions=1,
            ),
            hops=0,
            filler=bool(index % 2),
        )
        for index in range(count)
    ]


def draw_hops(corpus: Corpus, length: int, count: int, *, seed: int) -> list[Asked]:
    """Several-hop questions in `length` tokens, `count` of each number of steps from 1 on."""
    rng = np.random.default_rng([seed, length, 1])
    return [
        as_text(
            corpus,
            several_hops(
                rng,
                corpus.lexicon,
                length - MARGIN,
                loops=1,
                prose=corpus.held,
                questions=1,
                hops=np.array([steps]),
            ),
            hops=steps,
            filler=True,
        )
        for steps in range(1, most_hops(corpus.lexicon, length - MARGIN) + 1)
        for _ in range(count)
    ]


def write_questions(questions: Sequence[Asked], path: Path) -> None:
    """JSON lines with the fields of `Asked`."""
    lines = [json.dumps(dataclasses.asdict(question)) for question in questions]
    path.write_text("\n".join(lines) + "\n", "utf-8")
