"""Prepared text as token arrays: written once, read by training and by the task files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from .lexicon import END, Lexicon

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class Texts:
    """Token arrays of several sources and how often each is drawn from."""

    arrays: tuple[np.ndarray, ...]  # uint16 [tokens] each
    weights: np.ndarray  # [sources], sums to 1

    def __call__(self, rng: np.random.Generator, tokens: int) -> np.ndarray:
        """A passage int32 `[tokens]` from anywhere; a source that is shorter is repeated."""
        array = self.arrays[rng.choice(len(self.arrays), p=self.weights)]
        if len(array) < tokens:
            return np.resize(array, tokens).astype(np.int32)
        start = int(rng.integers(0, len(array) - tokens + 1))
        return array[start : start + tokens].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What `prepare` wrote."""

    lexicon: Lexicon
    train: Texts
    held: Texts
    manifest: dict

    @property
    def vocabulary(self) -> int:
        return self.lexicon.tokenizer.get_vocab_size()


def encode(tokenizer: tokenizers.Tokenizer, documents: Sequence[Sequence[str]]) -> np.ndarray:
    """Tokens uint16 of documents: paragraphs parted by an empty line, documents by id 0."""
    joined = ["\n\n".join(document) for document in documents]
    pieces: list[np.ndarray] = []
    for encoding in tokenizer.encode_batch_fast(joined):
        pieces.append(np.asarray([*encoding.ids, END], np.uint16))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)


def write(
    directory: Path,
    tokenizer: tokenizers.Tokenizer,
    sources: Sequence[tuple[dict, np.ndarray, np.ndarray]],
) -> None:
    """Writes arrays, tokenizer and manifest.

    Args:
      sources: (facts with at least `name` and `weight`, training tokens, held-out tokens).
    """
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for facts, train, held in sources:
        np.save(directory / f"{facts['name']}.train.npy", train)
        np.save(directory / f"{facts['name']}.held.npy", held)
        entries.append(facts | {"train_tokens": len(train), "held_tokens": len(held)})
    tokenizer.save(str(directory / TOKENIZER))
    text = json.dumps({"sources": entries}, indent=1)
    (directory / MANIFEST).write_text(text + "\n", "utf-8")


def read(directory: Path) -> Corpus:
    """The corpus in a directory.

    Raises:
      ValueError: there is none, or its tokens are not those of its tokenizer.
    """
    if not (directory / MANIFEST).is_file():
        raise ValueError(
            f"{directory} has no {MANIFEST}: make it with python -m examples.train_tiny.prepare"
        )
    manifest = json.loads((directory / MANIFEST).read_text("utf-8"))
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER))
    size = tokenizer.get_vocab_size()
    weights = np.asarray([entry["weight"] for entry in manifest["sources"]], float)

    def texts(kind: str) -> Texts:
        arrays = []
        for entry in manifest["sources"]:
            file = directory / f"{entry['name']}.{kind}.npy"
            array = np.load(file)
            if array.size == 0 or int(array.max()) >= size:
                raise ValueError(
                    f"{file} is empty or has tokens outside the vocabulary of {size}: prepare "
                    "the corpus again"
                )
            arrays.append(array)
        return Texts(tuple(arrays), weights / weights.sum())

    return Corpus(Lexicon(tokenizer), texts("train"), texts("held"), manifest)
