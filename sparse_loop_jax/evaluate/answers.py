"""Exact answers to questions, by greedy decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sparse_loop_jax.evaluate.inputs import Question, at_retention
from sparse_loop_jax.evaluate.progress import Steps
from sparse_loop_jax.evaluate.report import Row
from sparse_loop_jax.generation.generate import generate
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse.config import SparseDecodeConfig

# Tokens beyond those of the answer, so that it shows whether the answer ends there.
_MORE = 2


def is_right(text: str, answer: str) -> bool:
    """Whether a continuation gives the answer: it begins with it and then ends the word.

    Blanks around either count for nothing.

    >>> is_right(" 337.\\nThe", " 337"), is_right(" 3370", " 337"), is_right("33", " 337")
    (True, False, False)
    """
    text, answer = text.strip(), answer.strip()
    return text.startswith(answer) and not text[len(answer) : len(answer) + 1].isalnum()


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question in tokens."""

    prompt: list[int]
    limit: int  # tokens to decode
    answer: str


def ask(model: Ouro, questions: Sequence[Question]) -> list[Asked]:
    """Questions in the model's tokens.

    Raises:
      ValueError: there are none, the model has no tokenizer, or a question leaves no room for
        its answer in the context.
    """
    if not questions:
        raise ValueError("questions is empty: give at least one, or None")
    if model.tokenizer is None:
        raise ValueError(
            "tasks are text and the model has no tokenizer: load a checkpoint with a "
            "tokenizer.json"
        )
    context = model.config.max_position_embeddings
    asked = []
    for number, question in enumerate(questions, start=1):
        prompt = model.tokenizer.encode(question.prompt).ids
        whole = model.tokenizer.encode(question.prompt + question.answer).ids
        # The answer's first token may swallow the prompt's last.
        answer = model.tokenizer.encode(question.answer, add_special_tokens=False).ids
        tokens = max(len(whole) - len(prompt), len(answer))
        if len(prompt) + tokens > context:
            raise ValueError(
                f"question {number} has {len(prompt)} tokens and its answer {tokens}, more "
                f"than the model's context of {context}"
            )
        asked.append(Asked(prompt, tokens + _MORE, question.answer))
    return asked


def measure_answers(
    model: Ouro,
    questions: Sequence[Asked],
    retentions: Sequence[float],
    *,
    sparse: SparseDecodeConfig,
    batch: int,
    implementation: str | None,
    steps: Steps,
) -> list[Row]:
    """Table "answers"; see `evaluate` for its columns.

    Questions are batched by length, so that short ones do not wait for long ones.
    """
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].prompt))
    rows = []
    dense: list[bool] = []
    for retention in retentions:
        right = [False] * len(questions)
        for start in range(0, len(order), batch):
            steps.begin(f"answers, retention {retention:g}")
            group = order[start : start + batch]
            longest = max(len(questions[i].prompt) + questions[i].limit for i in group)
            out = generate(
                model,
                [questions[i].prompt for i in group],
                max_new_tokens=[questions[i].limit for i in group],
                sparse=at_retention(sparse, retention, longest, model.config),
                exit_threshold=1.0,
                implementation=implementation,
                progress=False,
            )
            for i, text in zip(group, out.texts or [], strict=True):
                right[i] = is_right(text, questions[i].answer)
            steps.done()
        dense = dense or right
        rows.append(
            {
                "retention": retention,
                "questions": len(questions),
                "right": sum(right),
                "accuracy": sum(right) / len(questions),
                "lost": sum(d and not r for d, r in zip(dense, right, strict=True)),
                "won": sum(r and not d for d, r in zip(dense, right, strict=True)),
            }
        )
    return rows


def parts(questions: int, retentions: int, batch: int) -> int:
    """Parts that `measure_answers` reports to `steps`."""
    return -(-questions // batch) * retentions
