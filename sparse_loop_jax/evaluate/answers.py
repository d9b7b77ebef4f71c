"""Exact answers to questions, by greedy decoding."""

from __future__ import annotations

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


def measure_answers(
    model: Ouro,
    questions: Sequence[Question],
    retentions: Sequence[float],
    *,
    sparse: SparseDecodeConfig,
    batch: int,
    implementation: str | None,
    steps: Steps,
) -> list[Row]:
    """Table "answers"; see `evaluate` for its columns.

    Questions are batched by length, so that short ones do not wait for long ones.

    Raises:
      ValueError: the model has no tokenizer, or a question leaves no room for its answer.
    """
    if model.tokenizer is None:
        raise ValueError(
            "tasks are text and the model has no tokenizer: load a checkpoint with a "
            "tokenizer.json"
        )
    prompts = [model.tokenizer.encode(q.prompt).ids for q in questions]
    limits = [
        len(model.tokenizer.encode(q.prompt + q.answer).ids) - len(p) + _MORE
        for q, p in zip(questions, prompts, strict=True)
    ]
    context = model.config.max_position_embeddings
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True), start=1):
        if len(prompt) + limit - _MORE > context:
            raise ValueError(
                f"question {number} has {len(prompt)} tokens and its answer {limit - _MORE}, "
                f"more than the model's context of {context}"
            )
    order = sorted(range(len(questions)), key=lambda i: len(prompts[i]))
    rows = []
    dense: list[bool] = []
    for retention in retentions:
        right = [False] * len(questions)
        for start in range(0, len(order), batch):
            steps.begin(f"answers, retention {retention:g}")
            group = order[start : start + batch]
            longest = max(len(prompts[i]) + limits[i] for i in group)
            out = generate(
                model,
                [prompts[i] for i in group],
                max_new_tokens=[limits[i] for i in group],
                sparse=at_retention(sparse, retention, longest),
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
