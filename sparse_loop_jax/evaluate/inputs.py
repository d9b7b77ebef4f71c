"""What is evaluated on: windows of a text, questions with answers, and retentions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from sparse_loop_jax.evaluate.forcing import Forced
from sparse_loop_jax.generation.buckets import power_of_two
from sparse_loop_jax.generation.inputs import token_ids
from sparse_loop_jax.generation.options import is_int, is_number
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse.config import SparseDecodeConfig

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and the text that should follow it."""

    prompt: str
    answer: str


def check_retentions(retentions: Iterable[float]) -> list[float]:
    """The retentions in falling order, dense (1.0) first, whether or not it was asked for.

    Raises:
      ValueError: there is none, one is outside (0, 1], or one is there twice.
    """
    values = list(retentions)
    if not values:
        raise ValueError("retentions is empty: give at least one number in (0, 1]")
    for value in values:
        if not is_number(value) or not 0.0 < value <= 1.0:
            raise ValueError(f"retentions must be numbers in (0, 1], got {value!r}")
        if values.count(value) > 1:
            raise ValueError(f"retention {value!r} is given twice")
    return sorted({1.0, *(float(v) for v in values)}, reverse=True)


def at_retention(
    sparse: SparseDecodeConfig, retention: float, longest: int, config: OuroConfig
) -> SparseDecodeConfig:
    """`sparse` at a retention, with a capacity that fits every one up to `longest` keys.

    A capacity of its own would give each retention its own program to compile.

    Args:
      longest: keys that a row may see; of more than the model's context, that many.
      config: the model's.
    """
    chosen = dataclasses.replace(sparse, key_retention=retention)
    if chosen.is_dense or sparse.capacity is not None:
        return chosen
    capacity = min(power_of_two(longest), config.max_position_embeddings)
    return dataclasses.replace(chosen, capacity=capacity)


def encode(model: Ouro, text: str | Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Token ids int32 of a text, or of ids as they are.

    Raises:
      ValueError: nothing is there, an id is none, or text meets a model without a tokenizer.
    """
    if isinstance(text, str) and not text.strip():
        raise ValueError(f"{name} is empty: give it some text")
    return token_ids(model, text, name)


def text_windows(
    model: Ouro,
    text: str | Sequence[int] | np.ndarray,
    *,
    window: int = 512,
    prefix: int = 128,
    most: int | None = None,
) -> list[Forced]:
    """Cuts a text into windows whose decoded rows judge each token once.

    A window prefills `prefix` tokens and feeds the `window - prefix` after them one by one;
    the next one begins `window - prefix` tokens later. What a text of any length is longer
    than the context is thus no obstacle, but no row sees more than `window` keys.

    Args:
      window: tokens that the last row of a window sees.
      prefix: prefilled tokens of each window, at least 1.
      most: keep so many windows, evenly spaced over the text; None keeps all. Where some are
        left out, the last one is if the text's end cuts it short.

    Raises:
      ValueError: a size is out of range, or the text is empty or shorter than a prefix and
        two tokens.
    """
    for name, value, least in (("window", window, 2), ("prefix", prefix, 1)):
        if not is_int(value) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    if most is not None and (not is_int(most) or most < 1):
        raise ValueError(f"windows must be an integer >= 1, got {most!r}")
    if prefix >= window:
        raise ValueError(
            f"prefix {prefix} leaves nothing of a window of {window} to decode: make it smaller"
        )
    context = model.config.max_position_embeddings
    if window > context:
        raise ValueError(
            f"window {window} is more than the model's context of {context}: make it smaller"
        )
    ids = encode(model, text, "the text")
    if len(ids) < prefix + 2:
        raise ValueError(
            f"the text has {len(ids)} tokens; a prefix of {prefix} needs at least "
            f"{prefix + 2}: give a longer text or a shorter prefix"
        )
    stride = window - prefix
    cuts = [
        Forced(ids[start : start + window + 1], prefix)
        for start in range(0, len(ids) - prefix - 1, stride)
    ]
    if most is not None and most < len(cuts) and len(cuts[-1].ids) <= window:
        cuts.pop()
    return evenly(cuts, most)


def rolling_windows(ids: list[int], first: int, length: int) -> list[Forced]:
    """Windows over which each of `ids` is predicted once, with at most `length` of context.

    >>> [(w.ids.tolist(), w.prefix) for w in rolling_windows([0, 1, 2, 3, 4, 5], 9, 4)]
    [([9, 0, 1, 2, 3], 0), ([1, 2, 3, 4, 5], 2)]

    Args:
      first: what the first token is conditioned on.
      length: tokens that a window feeds.
    """
    whole = np.asarray([first, *ids], np.int32)
    windows = []
    for start in range(0, len(ids), length):
        end = min(start + length, len(ids))  # predicts ids[start:end]
        begin = max(0, end - length)
        windows.append(Forced(whole[begin : end + 1], start - begin))
    return windows


def evenly(items: list[T], most: int | None) -> list[T]:
    """At most `most` of the items, evenly spaced; all if that is None."""
    if most is None or most >= len(items):
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)]


def text_prompts(
    model: Ouro, text: str | Sequence[int] | np.ndarray, *, count: int, tokens: int
) -> list[np.ndarray]:
    """`count` prompts of `tokens` tokens each, evenly spaced over a text.

    Raises:
      ValueError: a size is below 1, or the text is shorter than a prompt.
    """
    for name, value in (("the number of prompts", count), ("prompt tokens", tokens)):
        if not is_int(value) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    ids = encode(model, text, "the text")
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than a prompt of {tokens}")
    starts = np.linspace(0, len(ids) - tokens, count).round().astype(int)
    return [ids[start : start + tokens] for start in starts]


def read_questions(text: str, name: str = "tasks") -> list[Question]:
    """Questions of a JSON-lines text: objects with the strings `prompt` and `answer`.

    Other keys are ignored, and so are blank lines.

    Args:
      name: of the file, for complaints.

    Raises:
      ValueError: a line is malformed (the message has its number), or there is no question.
    """
    questions = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}, line {number}: is no JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{name}, line {number}: must be an object, got {line.strip()!r}")
        for key in ("prompt", "answer"):
            value = record.get(key)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(
                    f"{name}, line {number}: {key!r} must be a string that is not empty, got "
                    f"{value!r}"
                )
        questions.append(Question(record["prompt"], record["answer"]))
    if not questions:
        raise ValueError(f"{name} has no questions: give lines with 'prompt' and 'answer'")
    return questions


def within(model: Ouro, questions: list[Question], tokens: int | None) -> list[Question]:
    """The questions whose prompts have at most `tokens` tokens; all for None.

    Raises:
      ValueError: there is none.
    """
    if tokens is None or model.tokenizer is None:  # `evaluate` complains of the latter
        return questions
    sizes = [len(model.tokenizer.encode(question.prompt).ids) for question in questions]
    kept = [q for q, size in zip(questions, sizes, strict=True) if size <= tokens]
    if not kept:
        raise ValueError(
            f"no question has at most {tokens} tokens: the shortest of {len(questions)} has "
            f"{min(sizes)}"
        )
    return kept
