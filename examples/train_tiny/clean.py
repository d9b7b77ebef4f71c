"""From raw paragraphs to ASCII prose, and what training may not see of it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

from .extract import Document

_SIGNS = str.maketrans(
    {
        "\u2018": "'",  # quotation marks
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",  # dashes
        "\u2014": "--",
        "\u2212": "-",
        "\u00d7": "x",
        "\u2022": "-",
    }
)


def ascii_prose(text: str) -> str:
    """ASCII with single blanks; accents are dropped, and what has no ASCII sign."""
    text = unicodedata.normalize("NFKD", text.translate(_SIGNS))
    return " ".join(text.encode("ascii", "ignore").decode().split())


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph reads as text: long enough, mostly letters and blanks."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return len(paragraph) >= 40 and letters >= 0.85 * len(paragraph)


def clean(documents: Iterable[Document]) -> Iterator[list[str]]:
    """Documents of prose paragraphs; a paragraph seen before anywhere is dropped."""
    seen: set[str] = set()
    for document in documents:
        kept = []
        for paragraph in map(ascii_prose, document):
            if is_prose(paragraph) and paragraph not in seen:
                seen.add(paragraph)
                kept.append(paragraph)
        if kept:
            yield kept


# Words in a row that two texts do not share by chance.
_RUN = 13


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of 13 words of a text, letters alone and in lower case."""
    words = re.findall(r"[a-z]+", text.lower())
    for start in range(len(words) - _RUN + 1):
        yield tuple(words[start : start + _RUN])


def without_overlap(documents: Iterable[list[str]], judged: str) -> Iterator[list[str]]:
    """Documents without the paragraphs that share a run of 13 words with `judged`.

    What a model is judged on it must not have been trained on, wherever a text occurs.
    """
    held = set(runs(judged))
    for document in documents:
        kept = [p for p in document if not any(run in held for run in runs(p))]
        if kept:
            yield kept


def split(documents: list[list[str]], share: float) -> tuple[list[list[str]], list[list[str]]]:
    """Training documents, and the last `share` of the characters, by whole paragraphs.

    Raises:
      ValueError: `share` is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"the held-out share must be between 0 and 1, got {share}")
    left = share * sum(len(p) for d in documents for p in d)
    train, held = [list(d) for d in documents], []
    while left > 0 and train:
        tail = []
        while train[-1] and left > 0:
            tail.insert(0, train[-1].pop())
            left -= len(tail[0])
        held.insert(0, tail)
        if not train[-1]:
            train.pop()
    return train, held
